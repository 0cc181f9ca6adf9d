"""What lies between an expert's matrices: the activations programs can express, and their formulas.

One table, `FORMULAS`, serves NumPy and MLX alike. How a program spells an activation is in converters, where mlx-lm
keeps it in sites; a new activation is one entry in each. Knows neither models nor programs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

_TEXT = re.compile(r"(\w+)(?:\((.*)\))?")


@dataclass(frozen=True)
class Activation:
    """An activation by name, with the numbers its formula takes, in the order of `Formula.parameters`.

    As text (`str` and `parse`) it reads `silu` or `swiglu_oai(alpha=1.702, limit=7.0)`; a name that is not in FORMULAS
    is one no program can express.
    """

    name: str
    values: tuple[float, ...] = ()

    @property
    def formula(self) -> Formula | None:
        """Its entry in FORMULAS; None where there is none that takes this many numbers."""
        found = FORMULAS.get(self.name)
        return found if found is not None and len(found.parameters) == len(self.values) else None

    @property
    def gated(self) -> bool:
        """Whether experts have a gate matrix (`SwitchGLU`) or only up and down (`SwitchMLP`)."""
        return self.formula is None or self.formula.gated

    @property
    def linear(self) -> bool:
        """Whether the result is linear in `up`, so that scaling `up` scales the result."""
        return self.formula is not None and self.formula.linear

    @property
    def matrices(self) -> int:
        """Matrices an expert has."""
        return 3 if self.gated else 2

    @property
    def parameters(self) -> dict[str, float]:
        """Its numbers by name."""
        formula = self.formula
        return dict(zip(formula.parameters, self.values, strict=True)) if formula is not None else {}

    def apply(self, xp: Any, gate: Any, up: Any) -> Any:
        """The formula on arrays of `xp` (NumPy or mlx.core); `gate` is None without a gate matrix."""
        if self.formula is None:
            raise ValueError(f"activation {self} has no formula")
        return self.formula.run(xp, gate, up, *self.values)

    def __str__(self) -> str:
        numbers = ", ".join(f"{name}={value!r}" for name, value in self.parameters.items())
        return f"{self.name}({numbers})" if numbers else self.name

    @classmethod
    def parse(cls, text: str) -> Activation:
        """Back from text. Raises ValueError where it names no known activation with its numbers."""
        match = _TEXT.fullmatch(text)
        formula = FORMULAS.get(match.group(1)) if match else None
        if match is None or formula is None:
            raise ValueError(f"{text!r} is no known activation; there are {', '.join(FORMULAS)}")
        given = [part.partition("=") for part in match.group(2).split(",")] if match.group(2) else []
        if tuple(name.strip() for name, _, _ in given) != formula.parameters:
            raise ValueError(f"{text!r} should give {', '.join(formula.parameters) or 'no numbers'}")
        values = tuple(float(value) for _, _, value in given)
        if not np.isfinite(values).all():
            raise ValueError(f"{text!r} has numbers that are not finite")
        return cls(match.group(1), values)


@dataclass(frozen=True)
class Formula:
    """`run(xp, gate, up, *values)`; gate is None where `gated` is False."""

    run: Callable[..., Any]
    parameters: tuple[str, ...] = ()
    gated: bool = True
    linear: bool = True  # in up


def _sigmoid(xp: Any, x: Any) -> Any:
    return 1.0 / (1.0 + xp.exp(xp.minimum(-x, 80.0)))  # exp(88) is the last in float32


def _silu(xp: Any, x: Any) -> Any:
    return x * _sigmoid(xp, x)


def _gelu_tanh(xp: Any, x: Any) -> Any:
    return 0.5 * x * (1.0 + xp.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


def _clip(xp: Any, x: Any, limit: float) -> Any:
    return xp.minimum(xp.maximum(x, -limit), limit)


def _swiglu_oai(xp: Any, gate: Any, up: Any, alpha: float, limit: float) -> Any:
    gate = xp.minimum(gate, limit)
    return (_clip(xp, up, limit) + 1.0) * (gate * _sigmoid(xp, alpha * gate))


def _swiglu_clamped_before(xp: Any, gate: Any, up: Any, limit: float) -> Any:
    return _silu(xp, xp.minimum(gate, limit)) * _clip(xp, up, limit)


def _swiglu_clamped_after(xp: Any, gate: Any, up: Any, limit: float) -> Any:
    return xp.minimum(_silu(xp, gate), limit) * _clip(xp, up, limit)


def _situ(xp: Any, gate: Any, up: Any, beta: float) -> Any:
    return beta * xp.tanh(gate / beta) * _sigmoid(xp, gate) * up


def _situ_bounded(xp: Any, gate: Any, up: Any, beta: float, linear_beta: float) -> Any:
    return _situ(xp, gate, linear_beta * xp.tanh(up / linear_beta), beta)


FORMULAS: dict[str, Formula] = {
    "silu": Formula(lambda xp, gate, up: _silu(xp, gate) * up),  # SwiGLU
    "geglu": Formula(lambda xp, gate, up: _gelu_tanh(xp, gate) * up),
    "swiglu_oai": Formula(_swiglu_oai, ("alpha", "limit"), linear=False),  # gpt_oss, minimax_m3
    "swiglu_clamped_before": Formula(_swiglu_clamped_before, ("limit",), linear=False),  # deepseek_v41
    "swiglu_clamped_after": Formula(_swiglu_clamped_after, ("limit",), linear=False),  # step3p5
    "situ": Formula(_situ, ("beta",)),  # kimi_k3
    "situ_bounded": Formula(_situ_bounded, ("beta", "linear_beta"), linear=False),
    "relu2": Formula(lambda xp, _, up: xp.square(xp.maximum(up, 0.0)), gated=False, linear=False),
    "gelu_tanh": Formula(lambda xp, _, up: _gelu_tanh(xp, up), gated=False, linear=False),
}
SILU = Activation("silu")
