"""Which programs are loaded on a device: within its limits of bytes a program, programs and total bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import DeviceError
from ..program import ProgramSpec
from .base import ExpertDevice, LoadedProgram


@dataclass
class Residency:
    """Admits programs to a device until a limit is met. Nothing is evicted: programs stay for the engine's life."""

    device: ExpertDevice
    program_bytes: int
    programs: int
    total_bytes: int
    resident: list[LoadedProgram] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of the resident programs."""
        return sum(p.nbytes for p in self.resident)

    def admit(self, programs: Sequence[tuple[Path, ProgramSpec, int]]) -> list[LoadedProgram]:
        """Load a site's programs, each `(path, spec, bytes)`: all or, raising DeviceError with the reason, none."""
        sizes = [nbytes for _, _, nbytes in programs]
        if max(sizes) > self.program_bytes:
            raise DeviceError(
                f"program of {max(sizes)} bytes is over the device's limit of {self.program_bytes} a program"
            )
        if len(self.resident) + len(programs) > self.programs:
            raise DeviceError(f"the device holds its limit of {self.programs} programs")
        if self.nbytes + sum(sizes) > self.total_bytes:
            raise DeviceError(f"the device's limit of {self.total_bytes} bytes over all programs is reached")
        loaded = [self.device.load(path, spec) for path, spec, _ in programs]
        self.resident += loaded
        return loaded
