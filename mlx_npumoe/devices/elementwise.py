"""Operations on one number at a time: arithmetic and activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..converters.mil import Graph, Operation
from ..errors import DeviceError
from .compute import Compute
from .constants import Constants


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


ELEMENTWISE: dict[str, Callable[[Operation, Graph, Constants], Compute]] = {
    "add": _binary(np.add),
    "cast": _cast,
    "clip": _clip,
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
