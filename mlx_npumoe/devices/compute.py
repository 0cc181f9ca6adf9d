"""What one operation is to the dataflow: a computation that writes a new array, or a view of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ..converters.mil import Constant, Graph, Operation
from ..errors import DeviceError

View = Callable[[np.ndarray], list[np.ndarray]]
Argument: TypeAlias = str | Constant


@dataclass(frozen=True)
class Compute:
    """An operation that writes one new array: `run(operands, out)`, out of the operation's output shape."""

    operands: tuple[str, ...]
    run: Callable[[Sequence[np.ndarray], np.ndarray], object]
    weight: np.ndarray | None = None  # (out, in) float32, of a convolution: may be stacked with others
    bias: np.ndarray | None = None  # (out,) float32, its bias
    accumulates: bool = False  # a product of matrices, which saturates on the engine
    flops: int = 0


def unknown(op: Operation, graph: Graph) -> DeviceError:
    """The error for an operation that is in neither table."""
    return DeviceError(f"the interpreter does not know the operation {op.kind} ({op.name}) in {graph.source}")
