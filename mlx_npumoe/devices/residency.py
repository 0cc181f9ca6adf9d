"""Which programs are loaded on a device: within its limits of bytes a program, programs and total bytes."""

from __future__ import annotations

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

    def admit(self, path: Path, spec: ProgramSpec, nbytes: int) -> LoadedProgram:
        """Load a program of `nbytes`. Raises DeviceError where a limit or the device says no."""
        if nbytes > self.program_bytes:
            raise DeviceError(f"program of {nbytes} bytes is over the device's limit of {self.program_bytes} a program")
        if len(self.resident) >= self.programs:
            raise DeviceError(f"the device holds its limit of {self.programs} programs")
        if self.nbytes + nbytes > self.total_bytes:
            raise DeviceError(f"the device's limit of {self.total_bytes} bytes over all programs is reached")
        loaded = self.device.load(path, spec)
        self.resident.append(loaded)
        return loaded
