"""What one expert program computes: the contract between planning, converters, devices and executors.

Knows nothing of Core ML, devices or models: only which experts share a program, in which groups, and the
shapes of what goes in and out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from .activations import SILU, Activation

WeightFormat = Literal["fp16", "int8", "lut8", "lut6", "lut4", "int4"]
WEIGHT_FORMATS: tuple[WeightFormat, ...] = ("fp16", "int8", "lut8", "lut6", "lut4", "int4")
LOWEST_MACOS: dict[WeightFormat, str] = {  # whose Core ML loads programs of the format
    "fp16": "13.0", "int8": "13.0", "lut8": "13.0", "lut6": "13.0", "lut4": "13.0", "int4": "15.0",
}  # fmt: skip
LAYOUTS = ("layer", "groups")  # one program a site, or one a group
BODIES = ("split", "grouped", "separate")  # what a program does with the experts of a group
BRANCHES = 8  # experts that meet in one concat; more make the Neural Engine's compiler explode
CHANNELS = 65536  # of any tensor: G*F inside a grouped body
SURFACE_ROWS = 16384  # G*D of one input or output: the height of an IOSurface
PROGRAM_BYTES = 900 * 2**20  # weights of one program; larger ones are moved to the CPU without a word
MAIN = "main"  # the function of a program that has one
DEFAULT_CHUNK = 2048  # tokens a launch: mlx-lm's prefill step
DEFAULT_TOKENS = 8192  # tokens to calibrate on


class ExpertMatrices(NamedTuple):
    """One expert's matrices in float32, each `(out, in)` as in a linear layer, and the biases it may have."""

    gate: np.ndarray | None  # (F, D), None where the activation is not gated
    up: np.ndarray  # (F, D)
    down: np.ndarray  # (D, F)
    gate_bias: np.ndarray | None = None  # (F,)
    up_bias: np.ndarray | None = None  # (F,)
    down_bias: np.ndarray | None = None  # (D,)

    def astype(self, dtype: Any) -> ExpertMatrices:
        """All of it in another type."""
        parts: list[Any] = [None if m is None else np.asarray(m, dtype) for m in self]
        return ExpertMatrices(*parts)

    def rows(self, xp: Any, activation: Activation, x: Any) -> tuple[Any, Any, Any, Any]:
        """Gate (None without its matrix), up, their product and the result for rows `(n, D)` of `xp` (NumPy, MLX)."""

        def linear(x: Any, weight: np.ndarray, bias: np.ndarray | None) -> Any:
            y = x @ xp.asarray(weight).T
            return y if bias is None else y + xp.asarray(bias)

        gate = None if self.gate is None else linear(x, self.gate, self.gate_bias)
        up = linear(x, self.up, self.up_bias)
        product = activation.apply(xp, gate, up)
        return gate, up, product, linear(product, self.down, self.down_bias)


@dataclass(frozen=True)
class Group:
    """Experts of one capacity, neighbours in a program."""

    experts: tuple[int, ...]
    capacity: int

    @property
    def rows(self) -> int:
        """Token rows the group computes at every launch, pads included."""
        return len(self.experts) * self.capacity


@dataclass(frozen=True)
class Port:
    """An input of a program and the output that answers it: float16 of one shape, `(1, n*D, 1, C)` for n experts.

    The port's g-th expert owns channels g*D to (g+1)*D; tokens lie on the last axis.
    """

    input: str
    output: str
    group: int  # index in the program's groups
    experts: tuple[int, ...]
    hidden: int  # D
    capacity: int  # C

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """`(1, n*D, 1, C)`."""
        return (1, self.channels, 1, self.capacity)

    @property
    def channels(self) -> int:
        """n*D: rows of the surface it lies in."""
        return len(self.experts) * self.hidden

    @property
    def slots(self) -> int:
        """Token rows of all its experts, pads included."""
        return len(self.experts) * self.capacity


@dataclass(frozen=True)
class ProgramSpec:
    """The groups of experts of one MoE site, and the form of the program or programs that compute them.

    Layout `layer` is one program with all groups, `groups` one program a group: see `programs`. Bodies `split` and
    `grouped` have an input `x{i}` and an output `y{i}` for group i; body `separate` has `x{i}_e{e}` and `y{i}_e{e}` for
    each expert e of it: see `ports`. All are float16. Every expert computes `down(activation(gate(x), up(x)))`; the
    program's `up`, its bias included, is scaled by `2**-up_shift`, so outputs have to be multiplied by `2**up_shift`
    outside, where the range is wider. An activation that is not linear in `up` allows no shift.
    """

    hidden: int  # D
    width: int  # F
    groups: tuple[Group, ...]
    activation: Activation = SILU
    weights: WeightFormat = "int8"
    layout: str = "layer"
    body: str = "split"
    up_shift: int = 0

    @property
    def experts(self) -> tuple[int, ...]:
        """Experts in slot order: group by group."""
        return tuple(e for g in self.groups for e in g.experts)

    @property
    def capacities(self) -> tuple[int, ...]:
        """Capacity of each of `experts`."""
        return tuple(g.capacity for g in self.groups for _ in g.experts)

    @property
    def rows(self) -> int:
        """Token rows computed at every launch, pads included."""
        return sum(g.rows for g in self.groups)

    @cached_property
    def ports(self) -> tuple[Port, ...]:
        """Inputs and outputs in order; they cover the slots one after the other.

        Of a site with several programs: those of the programs, one program after the other (each counts its groups
        from 0, so take names from the programs' own specs).
        """

        def port(i: int, name: str, experts: tuple[int, ...], capacity: int) -> Port:
            return Port(f"x{name}", f"y{name}", i, experts, self.hidden, capacity)

        if self.body == "separate":
            return tuple(port(i, f"{i}_e{e}", (e,), g.capacity) for i, g in enumerate(self.groups) for e in g.experts)
        return tuple(port(i, str(i), g.experts, g.capacity) for i, g in enumerate(self.groups))

    @property
    def programs(self) -> tuple[ProgramSpec, ...]:
        """The spec of each saved program, in slot order: itself, or with layout `groups` one a group."""
        if self.layout == "layer":
            return (self,)
        return tuple(replace(self, groups=(group,)) for group in self.groups)

    def flops(self) -> int:
        """Floating-point operations of one launch, pads included."""
        return 2 * self.activation.matrices * self.rows * self.hidden * self.width

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        return {
            "hidden": self.hidden,
            "width": self.width,
            "groups": [{"experts": list(g.experts), "capacity": g.capacity} for g in self.groups],
            "activation": str(self.activation),
            "weights": self.weights,
            "layout": self.layout,
            "body": self.body,
            "up_shift": self.up_shift,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ProgramSpec:
        """Back from `to_dict`."""
        groups = tuple(Group(tuple(g["experts"]), int(g["capacity"])) for g in data["groups"])
        return cls(
            hidden=int(data["hidden"]),
            width=int(data["width"]),
            groups=groups,
            activation=Activation.parse(data["activation"]),
            weights=data["weights"],
            layout=data["layout"],
            body=data["body"],
            up_shift=int(data["up_shift"]),
        )
