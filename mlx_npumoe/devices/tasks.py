"""What a worker of the interpreter does: steps over float32 memory of its own, one branch of a program at a time.

Runs what dataflow has planned. Knows arrays, not operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .fp16 import RoundingScratch, narrow, round_to_fp16

SATURATION = 32768.0  # magnitude at which the engine's multiply-accumulate output gives up
Values = dict[str, np.ndarray]
_NOTHING = np.empty(0, np.float32)


class Scratch:
    """A worker's own memory: rounding blocks, and slots that hold the values of the branch it is at."""

    def __init__(self) -> None:
        self.rounding = RoundingScratch()
        self._slots: list[np.ndarray] = []

    def reserve(self, sizes: Sequence[int]) -> None:
        """Make room for `sizes` float32 elements in slots 0, 1, ..."""
        for i, size in enumerate(sizes):
            if i == len(self._slots):
                self._slots.append(np.empty(size, np.float32))
            elif self._slots[i].size < size:
                self._slots[i] = np.empty(size, np.float32)

    def slot(self, index: int, size: int) -> np.ndarray:
        """The first `size` elements of a slot."""
        return self._slots[index][:size]


@dataclass
class Step:
    """One thing to do: `run(operands, out)` writes memory, `view(operand)` only looks at it in another way."""

    operands: tuple[str, ...]
    names: tuple[str, ...] = ()  # of the results, which lie in `out` one after the other
    shapes: tuple[tuple[int, ...], ...] = ()
    run: Callable[[Sequence[np.ndarray], np.ndarray], object] | None = None
    view: Callable[[np.ndarray], list[np.ndarray]] | None = None
    rounds: bool = False  # results are float16 numbers
    saturates: bool = False
    sink: str | None = None  # the part of an output that takes the result, as float16
    fixed: np.ndarray | None = None  # memory for results that outlive the task
    slot: int = -1  # the worker's memory for results that do not
    flops: int = 0

    @property
    def size(self) -> int:
        """Elements it writes."""
        return sum(math.prod(s) for s in self.shapes)

    def execute(self, values: Values, scratch: Scratch) -> None:
        """Read operands from `values`, put results there."""
        if self.view is not None:
            values.update(zip(self.names, self.view(values[self.operands[0]]), strict=True))
        if self.run is None:
            return
        flat = self._memory(scratch)
        whole = flat.reshape(self.shapes[0]) if len(self.shapes) == 1 else flat
        self.run([values[name] for name in self.operands], whole)
        if self.saturates:
            np.copysign(np.float32(np.inf), flat, out=flat, where=np.abs(flat) >= SATURATION)
        if self.sink is not None:
            sink = values[self.sink]
            if sink.flags.c_contiguous:
                narrow(flat, sink.reshape(-1), scratch.rounding)
            else:
                np.copyto(sink, whole, casting="same_kind")
            return
        if self.rounds:
            round_to_fp16(flat, scratch.rounding)
        start = 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            stop = start + math.prod(shape)
            values[name] = flat[start:stop].reshape(shape)
            start = stop

    def _memory(self, scratch: Scratch) -> np.ndarray:
        if self.fixed is not None:
            return self.fixed
        return scratch.slot(self.slot, self.size) if self.slot >= 0 else _NOTHING


@dataclass
class Task:
    """A branch: steps that one worker takes in order."""

    steps: list[Step]
    slots: list[int] = field(default_factory=list)  # elements of each slot

    def __post_init__(self) -> None:
        self.slots = assign_slots(self.steps)

    @property
    def flops(self) -> int:
        """What it costs, for taking long ones first."""
        return sum(step.flops for step in self.steps)

    def execute(self, values: Values, scratch: Scratch) -> None:
        """All steps; overflow and NaN are values here, not events."""
        scratch.reserve(self.slots)
        with np.errstate(all="ignore"):
            for step in self.steps:
                step.execute(values, scratch)


def assign_slots(steps: Sequence[Step]) -> list[int]:
    """Give each step that needs the worker's memory a slot no live value is in; returns the size of each slot."""
    owner: dict[str, int] = {}  # the step whose memory a value lies in
    last: dict[int, int] = {}  # the step that reads that memory last
    for i, step in enumerate(steps):
        last[i] = i
        for name in step.operands:
            if name in owner:
                last[owner[name]] = i
        mine = owner.get(step.operands[0]) if step.view is not None else i
        if mine is not None:
            owner.update((name, mine) for name in step.names)
    sizes: list[int] = []
    free: list[int] = []
    for i, step in enumerate(steps):
        if step.run is not None and step.fixed is None and step.size:
            fitting = [slot for slot in free if sizes[slot] >= step.size]
            if fitting:
                step.slot = min(fitting, key=lambda slot: sizes[slot])
            elif free:
                step.slot = max(free, key=lambda slot: sizes[slot])
            else:
                step.slot = len(sizes)
                sizes.append(0)
            sizes[step.slot] = max(sizes[step.slot], step.size)
            if step.slot in free:
                free.remove(step.slot)
        free += [steps[j].slot for j in range(i + 1) if last[j] == i and steps[j].slot >= 0]
    return sizes
