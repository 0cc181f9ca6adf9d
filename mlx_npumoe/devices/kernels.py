"""What each ML Program operation means, in NumPy.

Two tables: VIEWS rearrange values without touching them, COMPUTES write new ones. A new operation is a new entry.
Values are float32 arrays; where they are rounded to float16, and in which memory they lie, is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ..converters.mil import Constant, Graph, Operation
from ..errors import DeviceError
from .fp16 import RoundingScratch, round_to_fp16, widen

View = Callable[[np.ndarray], list[np.ndarray]]
Argument: TypeAlias = str | Constant

LAST_AXIS_FAULT_LIMIT = 4094.0  # M1 and M2 scale by 16 where a slice of the last axis does not begin at 0


@dataclass(frozen=True)
class Compute:
    """An operation that writes one new array: `run(operands, out)`, out of the operation's output shape."""

    operands: tuple[str, ...]
    run: Callable[[Sequence[np.ndarray], np.ndarray], object]
    weight: np.ndarray | None = None  # (out, in) float32, of a convolution: may be stacked with others
    bias: np.ndarray | None = None  # (out,) float32, its bias
    accumulates: bool = False  # a product of matrices, which saturates on the engine
    flops: int = 0


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


# ---------------------------------------------------------------------------------------------------------- views


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

# ------------------------------------------------------------------------------------------------------- computes


def _conv(op: Operation, graph: Graph, constants: Constants) -> Compute:
    """A dense 1x1 convolution: `W (Cout, Cin) @ x (Cin, H*W)`, accumulated in float32."""
    weight = constants.get(op.inputs["weight"][0])
    bias = constants.get(op.inputs["bias"][0]) if "bias" in op.inputs else None
    shape = op.outputs[0].type.shape
    ones = ("strides", "dilations")
    plain = (
        weight is not None
        and weight.ndim == 4
        and weight.shape[2:] == (1, 1)
        and int(graph.constant(op, "groups", 1)) == 1
        and all(np.all(np.asarray(graph.constant(op, name, 1)) == 1) for name in ones)
        and not np.any(np.asarray(graph.constant(op, "pad", 0)))
        and not ("bias" in op.inputs and bias is None)
        and shape[0] == 1
    )
    if not plain or weight is None:
        raise DeviceError(
            f"conv {op.name} of {graph.source} is not a dense 1x1 convolution with constant weights, which is all the "
            "interpreter knows"
        )
    columns = int((shape[2] or 0) * (shape[3] or 0))
    return conv1x1(op.inputs["x"][0], weight[:, :, 0, 0], columns, bias)


def conv1x1(x: Argument, weight: np.ndarray, columns: int, bias: np.ndarray | None = None) -> Compute:
    """`weight (Cout, Cin) @ x (Cin, columns) + bias (Cout)`."""
    outputs, channels = weight.shape

    def run(operands: Sequence[np.ndarray], out: np.ndarray) -> None:
        y = out.reshape(outputs, columns)
        np.matmul(weight, operands[0].reshape(channels, columns), out=y)
        if bias is not None:
            np.add(y, bias[:, None], out=y)

    flops = 2 * outputs * channels * columns
    return Compute((str(x),), run, weight, bias, accumulates=True, flops=flops)


def _unary(function: Callable[[np.ndarray, np.ndarray], object]) -> Callable[..., Compute]:
    def build(op: Operation, graph: Graph, constants: Constants) -> Compute:
        return Compute((str(op.inputs["x"][0]),), lambda operands, out: function(operands[0], out))

    return build


def _binary(ufunc: np.ufunc) -> Callable[..., Compute]:
    def build(op: Operation, graph: Graph, constants: Constants) -> Compute:
        arguments = [op.inputs[key][0] for key in ("x", "y")]
        fixed = [constants.get(a) for a in arguments]
        operands = tuple(str(a) for a, c in zip(arguments, fixed, strict=True) if c is None)

        def run(values: Sequence[np.ndarray], out: np.ndarray) -> None:
            left = iter(values)
            x, y = (next(left) if c is None else c for c in fixed)
            ufunc(x, y, out=out)

        return Compute(operands, run)

    return build


def _sigmoid(x: np.ndarray, out: np.ndarray) -> None:
    np.negative(x, out=out)
    np.exp(out, out=out)
    np.add(out, np.float32(1), out=out)
    np.reciprocal(out, out=out)


def _silu(x: np.ndarray, out: np.ndarray) -> None:
    np.negative(x, out=out)
    np.exp(out, out=out)
    np.add(out, np.float32(1), out=out)
    np.divide(x, out, out=out)


def _gelu_tanh(x: np.ndarray, out: np.ndarray) -> None:
    """`x * sigmoid(2u)`, which is `x/2 * (1 + tanh(u))`, of `u = sqrt(2/pi) * (x + 0.044715 x^3)`."""
    np.multiply(x, x, out=out)
    np.multiply(out, np.float32(-2 * 0.7978845608028654 * 0.044715), out=out)
    np.subtract(out, np.float32(2 * 0.7978845608028654), out=out)
    np.multiply(out, x, out=out)
    np.exp(out, out=out)
    np.add(out, np.float32(1), out=out)
    np.divide(x, out, out=out)


_ERFC = (0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806, 0.09678418, 0.37409196, 1.00002368)


def _gelu_exact(x: np.ndarray, out: np.ndarray) -> None:
    """`x/2 * erfc(-x/sqrt(2))`, erfc by Press et al., Numerical Recipes 6.2: relative error under 1.2e-7."""
    z = np.abs(x) * np.float32(0.7071067811865476)
    t = 1 / (1 + z / 2)
    polynomial = np.zeros_like(t)
    for coefficient in _ERFC:
        polynomial = polynomial * t + np.float32(coefficient)
    tail = t * np.exp(-z * z - np.float32(1.26551223) + t * polynomial)  # erfc of |x|/sqrt(2)
    np.multiply(x / 2, np.where(x < 0, tail, 2 - tail), out=out)


def _gelu(op: Operation, graph: Graph, constants: Constants) -> Compute:
    functions = {"EXACT": _gelu_exact, "TANH_APPROXIMATION": _gelu_tanh}
    mode = str(graph.constant(op, "mode", "EXACT"))
    if mode not in functions:
        raise DeviceError(f"gelu {op.name} of {graph.source} is {mode}; the interpreter knows {', '.join(functions)}")
    return _unary(functions[mode])(op, graph, constants)


def _clip(op: Operation, graph: Graph, constants: Constants) -> Compute:
    low, high = (np.float32(graph.constant(op, name)) for name in ("alpha", "beta"))
    return Compute((str(op.inputs["x"][0]),), lambda values, out: np.clip(values[0], low, high, out=out))


def _cast(op: Operation, graph: Graph, constants: Constants) -> Compute:
    wanted = str(graph.constant(op, "dtype"))
    if wanted not in ("fp16", "fp32"):
        raise DeviceError(f"cast {op.name} of {graph.source} gives {wanted}; the interpreter knows fp16 and fp32")
    return Compute((str(op.inputs["x"][0]),), lambda values, out: np.copyto(out, values[0]))


COMPUTES: dict[str, Callable[[Operation, Graph, Constants], Compute]] = {
    "add": _binary(np.add),
    "cast": _cast,
    "clip": _clip,
    "conv": _conv,
    "gelu": _gelu,
    "maximum": _binary(np.maximum),
    "minimum": _binary(np.minimum),
    "mul": _binary(np.multiply),
    "relu": _unary(lambda x, out: np.maximum(x, np.float32(0), out=out)),
    "sigmoid": _unary(_sigmoid),
    "silu": _unary(_silu),
    "square": _unary(lambda x, out: np.square(x, out=out)),
    "sub": _binary(np.subtract),
    "tanh": _unary(lambda x, out: np.tanh(x, out=out)),
}


def unknown(op: Operation, graph: Graph) -> DeviceError:
    """The error for an operation that is in neither table."""
    return DeviceError(f"the interpreter does not know the operation {op.kind} ({op.name}) in {graph.source}")
