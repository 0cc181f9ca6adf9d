"""Constants of a program as the interpreter computes with them: decompressed, in float32."""

from __future__ import annotations

import numpy as np

from ..converters.compressed import decompressed, is_compressed
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
        if op is not None and is_compressed(op):
            return self._decompress(op)
        return None

    def _float(self, value: np.ndarray) -> np.ndarray:
        out = np.empty(value.shape, np.float32)
        if value.dtype == np.float16 and value.ndim:
            widen(np.ascontiguousarray(value), out)
        else:
            out[...] = value
        return out

    def _decompress(self, op: Operation) -> np.ndarray:
        """A compressed weight, rounded to float16 where that is its type."""
        values = np.ascontiguousarray(decompressed(self._graph, op), np.float32)
        if op.outputs[0].type.dtype == "FLOAT16":
            round_to_fp16(values.reshape(-1), self._scratch)
        return values


def is_constant(op: Operation) -> bool:
    """Whether `op` is evaluated when the program is loaded."""
    return op.kind == "const" or is_compressed(op)
