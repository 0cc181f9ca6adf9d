"""Runs saved expert programs with NumPy, on any machine: the second unit away from a Mac, and the oracle in tests.

Values are rounded to float16 where the Neural Engine would round them, products accumulate in float32. Knows
programs, surfaces and threads; MLX is never called from the device's threads.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from ..converters.mil import load_graph
from ..converters.package import package_bytes
from ..errors import DeviceError, ProgramError
from ..program import MAIN, ProgramSpec
from .base import Lease, LoadedProgram
from .dataflow import Dataflow
from .surfaces import SurfaceRings
from .tasks import Scratch
from .ungroup import ungrouped
from .worker import SerialWorker, Team

DEFAULT_THREADS = 2


@dataclass(frozen=True)
class Emulation:
    """Manners of a real device, for tests and benchmarks. The default is none."""

    launch_s: float = 0.0  # latency added to every call
    saturate: bool = False  # products of matrices become infinite at +-32768
    last_axis_fault: bool = False  # a slice of the last axis that starts late loses values over 4094 (M1, M2)
    max_bytes: int | None = None  # larger packages are refused
    nan_output: bool = False  # every output is NaN
    fail_every: int = 0  # every n-th call fails; 0 is never
    hang_s: float = 0.0  # every call sleeps this long first, unless the device is closed


# Held around every call: the number of BLAS threads is one setting for the whole process, and overlapping limits of
# two threads restore each other's. Interpreters in one process take turns; they would share the cores anyway.
_BLAS = threading.Lock()


class InterpreterDevice:
    """Runs programs on `threads` threads of its own, with one BLAS thread each.

    A LoadedProgram counts with the bytes of its package, as it would on the engine; here its weights take twice
    (fp16) or four times (int8) as much memory, in float32, for as long as it lives.
    """

    name = "interpreter"

    def __init__(self, threads: int | None = None, emulation: Emulation | None = None, depth: int = 2) -> None:
        self.threads = threads or min(DEFAULT_THREADS, os.cpu_count() or 1)
        self.emulation = emulation or Emulation()
        self._rings = SurfaceRings(depth)
        self._worker = SerialWorker(self.name)
        self._team = Team([Scratch() for _ in range(self.threads)], self.name)
        self._blas = ThreadpoolController()
        self._calls = 0

    def load(self, program: Path, spec: ProgramSpec, function: str = MAIN) -> LoadedProgram:
        """Load a function of a package. Raises DeviceError where it is damaged, too large or not what `spec` says."""
        path = Path(program)
        nbytes = package_bytes(path)
        limit = self.emulation.max_bytes
        if limit is not None and nbytes > limit:
            raise DeviceError(f"program {path} has {nbytes} bytes, the device takes {limit}: put fewer experts into it")
        try:
            graph = load_graph(path, function)
            flow = Dataflow(
                ungrouped(graph), saturate=self.emulation.saturate, last_axis_fault=self.emulation.last_axis_fault
            )
        except ProgramError as error:
            raise DeviceError(str(error)) from error
        for side, ports in (("input", graph.inputs), ("output", graph.outputs)):
            wanted = [(getattr(port, side), port.shape) for port in spec.ports]
            if [(p.name, p.type.shape) for p in ports] != wanted:
                raise DeviceError(
                    f"program {path} has the ports {', '.join(f'{p.name} {p.type.shape}' for p in ports)} where its "
                    f"plan says {wanted}; prepare it again"
                )
        return LoadedProgram(spec, path, nbytes, flow, function)

    def lease(self, loaded: LoadedProgram) -> Lease:
        """Surfaces for one call."""
        return self._rings.lease(loaded)

    def submit(self, lease: Lease) -> Future[Lease]:
        """Start the call on the device's thread; the future gives the lease back with `device_s` set."""
        return self._worker.submit(lambda: self._call(lease))

    def close(self) -> None:
        """End the threads and let go of the surfaces. A call that hangs is left behind on its daemon thread."""
        self._worker.close()
        self._team.close()
        self._rings.clear()

    def _call(self, lease: Lease) -> Lease:
        start = time.perf_counter()
        emulation = self.emulation
        self._calls += 1
        delay = emulation.launch_s + emulation.hang_s
        if delay and self._worker.closing.wait(delay):
            raise DeviceError("the interpreter was closed during the call")
        if emulation.fail_every and self._calls % emulation.fail_every == 0:
            raise DeviceError(f"emulated failure of call {self._calls}")
        flow: Any = lease.program.state
        with _BLAS, self._blas.limit(limits=1, user_api="blas"):
            flow.run(
                [_shaped(s.host, port.type.shape) for s, port in zip(lease.inputs, flow.graph.inputs, strict=True)],
                [_shaped(s.host, port.type.shape) for s, port in zip(lease.outputs, flow.graph.outputs, strict=True)],
                self._team,
            )
        if emulation.nan_output:
            for surface in lease.outputs:
                surface.host[...] = np.nan
        lease.device_s = time.perf_counter() - start
        return lease


def _shaped(host: np.ndarray, shape: tuple[int | None, ...]) -> np.ndarray:
    """A `(n*D, C)` surface in its port's shape, the same memory."""
    return host.reshape([int(d or 0) for d in shape])
