"""How a program spells each activation: the operations between an expert's first and last convolutions.

One entry a formula of `mlx_npumoe.activations`. Constants are float16, as everything on the Neural Engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mlx_npumoe.activations import Activation


class Emitter:
    """Emits elementwise operations of one expert, named `{prefix}_{name}`; a number becomes a float16 constant."""

    def __init__(self, mb: Any, prefix: str) -> None:
        self._mb = mb
        self._prefix = prefix

    def __call__(self, kind: str, name: str, **operands: Any) -> Any:
        """The operation `kind` of the builder."""
        operands = {key: np.float16(v) if isinstance(v, float) else v for key, v in operands.items()}
        return getattr(self._mb, kind)(**operands, name=f"{self._prefix}_{name}")


def emit(mb: Any, activation: Activation, gate: Any, up: Any, prefix: str) -> Any:
    """What `down` is applied to, `(1, F, 1, C)`, called `{prefix}_hidden`; `gate` is None without a gate matrix."""
    return EMITTERS[activation.name](Emitter(mb, prefix), gate, up, *activation.values)


def _swiglu(op: Emitter, gate: Any, up: Any) -> Any:
    return op("mul", "hidden", x=op("silu", "act", x=gate), y=up)


def _geglu(op: Emitter, gate: Any, up: Any) -> Any:
    return op("mul", "hidden", x=op("gelu", "act", x=gate, mode="TANH_APPROXIMATION"), y=up)


def _clipped(op: Emitter, up: Any, limit: float) -> Any:
    return op("clip", "up_clip", x=up, alpha=-limit, beta=limit)


def _swiglu_oai(op: Emitter, gate: Any, up: Any, alpha: float, limit: float) -> Any:
    low = op("minimum", "gate_min", x=gate, y=limit)
    act = op("mul", "act", x=low, y=op("sigmoid", "sigmoid", x=op("mul", "alpha", x=low, y=alpha)))
    return op("mul", "hidden", x=act, y=op("add", "up_one", x=_clipped(op, up, limit), y=1.0))


def _swiglu_clamped_before(op: Emitter, gate: Any, up: Any, limit: float) -> Any:
    return _swiglu(op, op("minimum", "gate_min", x=gate, y=limit), _clipped(op, up, limit))


def _swiglu_clamped_after(op: Emitter, gate: Any, up: Any, limit: float) -> Any:
    act = op("minimum", "act_min", x=op("silu", "act", x=gate), y=limit)
    return op("mul", "hidden", x=act, y=_clipped(op, up, limit))


def _situ(op: Emitter, gate: Any, up: Any, beta: float) -> Any:
    bounded = op("tanh", "gate_tanh", x=op("mul", "gate_scaled", x=gate, y=1 / beta))
    act = op("mul", "act", x=bounded, y=op("sigmoid", "sigmoid", x=gate))
    return op("mul", "hidden", x=op("mul", "act_scaled", x=act, y=beta), y=up)


def _situ_bounded(op: Emitter, gate: Any, up: Any, beta: float, linear_beta: float) -> Any:
    bounded = op("tanh", "up_tanh", x=op("mul", "up_scaled", x=up, y=1 / linear_beta))
    return _situ(op, gate, op("mul", "up_bounded", x=bounded, y=linear_beta), beta)


def _relu2(op: Emitter, gate: Any, up: Any) -> Any:
    return op("square", "hidden", x=op("relu", "act", x=up))


def _gelu_tanh(op: Emitter, gate: Any, up: Any) -> Any:
    return op("gelu", "hidden", x=up, mode="TANH_APPROXIMATION")


EMITTERS: dict[str, Callable[..., Any]] = {
    "silu": _swiglu,
    "geglu": _geglu,
    "swiglu_oai": _swiglu_oai,
    "swiglu_clamped_before": _swiglu_clamped_before,
    "swiglu_clamped_after": _swiglu_clamped_after,
    "situ": _situ,
    "situ_bounded": _situ_bounded,
    "relu2": _relu2,
    "gelu_tanh": _gelu_tanh,
}
