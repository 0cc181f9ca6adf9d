"""Constants of a program as the interpreter computes with them: decompressed, in float32."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..converters.mil import Graph, Operation
from .compute import Argument
from .fp16 import RoundingScratch, round_to_fp16, widen


class Constants:
    """The constants of a graph as float32 arrays on the float16 grid, as the engine holds them."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._scratch = RoundingScratch()

    def get(self, argument: Argument) -> np.ndarray | None:
        """The value of `argument`, or None where it is computed at run time."""
        constant = self._graph.find_constant(argument)
        if constant is not None:
            return self._float(constant.array())
        op = self._graph.producers.get(argument) if isinstance(argument, str) else None
        if op is not None and op.kind == "constexpr_affine_dequantize":
            return self._dequantize(op)
        return None

    def _float(self, value: np.ndarray) -> np.ndarray:
        out = np.empty(value.shape, np.float32)
        if value.dtype == np.float16 and value.ndim:
            widen(np.ascontiguousarray(value), out)
        else:
            out[...] = value
        return out

    def _dequantize(self, op: Operation) -> np.ndarray:
        """`(q - zero_point) * scale`, per channel of `axis`, rounded to float16."""
        part = {key: constant.array() for key, constant in op.constants.items()}
        values = part["quantized_data"].astype(np.float32)
        shape = [1] * values.ndim
        shape[int(part["axis"])] = -1

        def along_axis(name: str) -> Any:
            array = part[name].astype(np.float32)
            return array.reshape(shape) if array.ndim else array

        values -= along_axis("zero_point")
        values *= along_axis("scale")
        round_to_fp16(values.reshape(-1), self._scratch)
        return values


def is_constant(op: Operation) -> bool:
    """Whether `op` is evaluated when the program is loaded."""
    return op.kind in ("const", "constexpr_affine_dequantize")
