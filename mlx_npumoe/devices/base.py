"""What a second device must offer to run expert programs. Knows no model and no plan, only programs and buffers."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from ..program import MAIN, ProgramSpec


class Surface(Protocol):
    """One input or output buffer both sides see: `(n*D, C)` float16 for n experts, tokens on the last axis.

    `host` is the device's view (NumPy, writable); `array` is MLX's view of the same memory, held for as long as
    the surface lives so that MLX never donates it.
    """

    host: np.ndarray  # (n*D, C) float16
    array: mx.array  # (n*D, C) float16, the same memory; build consumers of an output only after the join

    def write(self, packed: mx.array) -> None:
        """Put an evaluated `(n*D, C)` float16 array into the surface."""


@dataclass
class LoadedProgram:
    """A program, or one function of it, a device has accepted. `state` belongs to the device."""

    spec: ProgramSpec
    path: Path
    nbytes: int
    state: Any = None
    function: str = MAIN


class Lease(Protocol):
    """The surfaces of one call in flight, out of a ring of at least two."""

    program: LoadedProgram
    inputs: list[Surface]  # in the order of the spec's ports
    outputs: list[Surface]
    device_s: float  # seconds the device computed, set when the call ends

    def retire(self, *consumers: mx.array) -> None:
        """Give the lease back. `consumers`, lazy arrays that read the outputs, are evaluated before reuse."""

    def abandon(self) -> None:
        """Drop the surfaces for good: a timed-out call may still write into them."""


class ExpertDevice(Protocol):
    """A device that runs expert programs on its own thread."""

    name: str

    def load(self, program: Path, spec: ProgramSpec, function: str = MAIN) -> LoadedProgram:
        """Load a package, of one with several functions the named one. Raises DeviceError with the reason."""

    def lease(self, loaded: LoadedProgram) -> Lease:
        """Surfaces for one call."""

    def submit(self, lease: Lease) -> Future[Lease]:
        """Start the call; never blocks the caller. The future raises DeviceError where the call failed."""

    def close(self) -> None:
        """End the worker and release everything."""
