"""A device that computes nothing and returns at once: it measures what everything around a device costs.

Its results are zeros and must not be trusted.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

from ..converters.package import package_bytes
from ..errors import DeviceError
from ..program import MAIN, ProgramSpec
from .base import Lease, LoadedProgram
from .surfaces import SurfaceRings
from .worker import SerialWorker


class NullDevice:
    """Accepts every program, leaves zeros in its outputs."""

    name = "null (results are not computed)"

    def __init__(self, depth: int = 2) -> None:
        self._worker = SerialWorker("null")
        self._rings = SurfaceRings(depth)

    def load(self, program: Path, spec: ProgramSpec, function: str = MAIN) -> LoadedProgram:
        """Accept a package without reading it. Raises DeviceError where there is none."""
        path = Path(program)
        if not path.exists():
            raise DeviceError(f"there is no program at {path}; prepare it again")
        return LoadedProgram(spec, path, package_bytes(path), function=function)

    def lease(self, loaded: LoadedProgram) -> Lease:
        """Surfaces for one call."""
        return self._rings.lease(loaded)

    def submit(self, lease: Lease) -> Future[Lease]:
        """A future that is done as soon as the worker thread has seen it."""

        def call() -> Lease:
            lease.device_s = 0.0
            return lease

        return self._worker.submit(call)

    def close(self) -> None:
        """End the worker and release everything."""
        self._worker.close()
        self._rings.clear()
