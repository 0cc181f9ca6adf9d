"""Operations that rearrange values without touching them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..converters.mil import Graph, Operation
from .compute import View

LAST_AXIS_FAULT_LIMIT = 4094.0  # M1 and M2 scale by 16 where a slice of the last axis does not begin at 0


def _split(op: Operation, graph: Graph, fault: bool) -> View:
    axis = int(graph.constant(op, "axis"))
    sizes = [int(port.type.shape[axis] or 0) for port in op.outputs]
    ends = np.cumsum(sizes)

    def run(x: np.ndarray) -> list[np.ndarray]:
        parts = np.split(x, ends[:-1], axis=axis)
        if fault and axis % x.ndim == x.ndim - 1:
            parts[1:] = [_scaled_by_16(part) for part in parts[1:]]
        return parts

    return run


def _slice_by_index(op: Operation, graph: Graph, fault: bool) -> View:
    begin = [int(i) for i in np.atleast_1d(graph.constant(op, "begin"))]
    end = [int(i) for i in np.atleast_1d(graph.constant(op, "end"))]
    rank = len(begin)

    def listed(name: str, default: Any) -> list[Any]:
        value = graph.constant(op, name)
        return [default] * rank if value is None else list(np.atleast_1d(value))

    masks = [listed(name, False) for name in ("begin_mask", "end_mask", "squeeze_mask")]
    window = tuple(
        b if squeeze else slice(None if open_ else b, None if close else e, int(step))
        for b, e, step, open_, close, squeeze in zip(begin, end, listed("stride", 1), *masks, strict=True)
    )

    def run(x: np.ndarray) -> list[np.ndarray]:
        part = x[window]
        last = window[-1]
        starts_late = last != 0 if isinstance(last, int) else last.start not in (None, 0)
        return [_scaled_by_16(part) if fault and starts_late else part]

    return run


def _scaled_by_16(part: np.ndarray) -> np.ndarray:
    """What an engine with the last-axis fault makes of a slice: large values become infinite."""
    return np.where(np.abs(part) > LAST_AXIS_FAULT_LIMIT, np.copysign(np.inf, part), part).astype(part.dtype)


def _reshaped(op: Operation, graph: Graph, fault: bool) -> View:
    shape = tuple(int(d or 0) for d in op.outputs[0].type.shape)
    return lambda x: [x.reshape(shape)]


def _transpose(op: Operation, graph: Graph, fault: bool) -> View:
    perm = [int(i) for i in graph.constant(op, "perm")]
    return lambda x: [x.transpose(perm)]


def _identity(op: Operation, graph: Graph, fault: bool) -> View:
    return lambda x: [x]


VIEWS: dict[str, Callable[[Operation, Graph, bool], View]] = {
    "expand_dims": _reshaped,
    "identity": _identity,
    "reshape": _reshaped,
    "slice_by_index": _slice_by_index,
    "split": _split,
    "squeeze": _reshaped,
    "transpose": _transpose,
}
