"""Surfaces in MLX's own memory, and the rings they are leased from.

For devices that read main memory (interpreter, null). Knows the shapes of a program's ports, not what it computes.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from ..errors import DeviceError
from ..program import ProgramSpec
from .base import LoadedProgram, Surface

Shapes = tuple[tuple[int, int], ...]  # (n*D, C) of each port


class HostSurface:
    """A `(rows, columns)` float16 buffer that MLX owns and the host writes in place, zero at first."""

    def __init__(self, rows: int, columns: int) -> None:
        self.array = mx.zeros((rows, columns), dtype=mx.float16)  # held for life, so that MLX never donates it
        mx.eval(self.array)
        self.host: np.ndarray = np.array(self.array, copy=False)  # (rows, columns), the same memory
        if not self.host.flags.writeable or not self.host.flags.c_contiguous:
            raise DeviceError("this MLX gives no writable view of an array's memory; update mlx or turn the device off")

    def write(self, packed: mx.array) -> None:
        """Copy an evaluated `(rows, columns)` float16 array in. Raises DeviceError for any other shape or type."""
        if tuple(packed.shape) != self.host.shape or packed.dtype != mx.float16:
            raise DeviceError(
                f"a surface of {self.host.shape} float16 was given {tuple(packed.shape)} {packed.dtype}; pack for "
                "the program's own ports"
            )
        np.copyto(self.host, np.array(packed, copy=False))


@dataclass(eq=False)
class SurfaceSet:
    """The surfaces of one call, and the lazy arrays that still have to read them."""

    inputs: list[HostSurface]
    outputs: list[HostSurface]
    readers: list[mx.array] = field(default_factory=list)


class HostLease:
    """One call's surfaces. Give it back with `retire`, or drop it with `abandon`; the first of the two counts."""

    def __init__(self, program: LoadedProgram, ring: SurfaceRing, surfaces: SurfaceSet) -> None:
        self.program = program
        self.inputs: list[Surface] = [*surfaces.inputs]
        self.outputs: list[Surface] = [*surfaces.outputs]
        self.device_s = 0.0
        self._surfaces: SurfaceSet | None = surfaces
        self._ring = ring

    def retire(self, *consumers: mx.array) -> None:
        """Back to the ring. `consumers`, lazy arrays that read the outputs, are evaluated before the next lease.

        They are kept alive until then, so give the smallest arrays that depend on the outputs.
        """
        surfaces, self._surfaces = self._surfaces, None
        if surfaces is not None:
            surfaces.readers = list(consumers)
            self._ring.put_back(surfaces)

    def abandon(self) -> None:
        """Never to be used again: a timed-out call may still write into these surfaces."""
        surfaces, self._surfaces = self._surfaces, None
        if surfaces is not None:
            self._ring.forget()


class SurfaceRing:
    """Surfaces for programs whose ports have the same shapes. Safe to use from several threads.

    New surfaces are made until there are `depth`, then the ones retired longest ago are used again. Where all are
    out, more are made: a lease is never waited for.
    """

    def __init__(self, inputs: Shapes, outputs: Shapes, depth: int = 2) -> None:
        self.depth = max(2, depth)
        self._shapes = (inputs, outputs)
        self._free: deque[SurfaceSet] = deque()
        self._size = 0  # sets that exist and were not abandoned
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._size

    def lease(self, program: LoadedProgram) -> HostLease:
        """Surfaces for one call of `program`; their readers of the call before are evaluated first."""
        with self._lock:
            reuse = self._free.popleft() if self._free and self._size >= self.depth else None
            self._size += reuse is None
        if reuse is None:
            reuse = self._make()
        elif reuse.readers:
            readers, reuse.readers = reuse.readers, []
            mx.eval(readers)
        return HostLease(program, self, reuse)

    def _make(self) -> SurfaceSet:
        try:
            inputs, outputs = ([HostSurface(*shape) for shape in shapes] for shapes in self._shapes)
        except BaseException:
            self.forget()
            raise
        return SurfaceSet(inputs, outputs)

    def put_back(self, surfaces: SurfaceSet) -> None:
        """Take back the surfaces of a lease."""
        with self._lock:
            self._free.append(surfaces)

    def forget(self) -> None:
        """Surfaces of a lease that do not come back."""
        with self._lock:
            self._size -= 1


class SurfaceRings:
    """A ring for each combination of port shapes, shared by all programs that have it."""

    def __init__(self, depth: int = 2) -> None:
        self.depth = depth
        self._rings: dict[tuple[Shapes, Shapes], SurfaceRing] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._rings)

    def lease(self, program: LoadedProgram) -> HostLease:
        """Surfaces for one call of `program`."""
        shapes = surface_shapes(program.spec)
        with self._lock:
            ring = self._rings.setdefault((shapes, shapes), SurfaceRing(shapes, shapes, self.depth))
        return ring.lease(program)

    def clear(self) -> None:
        """Let go of all surfaces that are not leased."""
        with self._lock:
            self._rings.clear()


def surface_shapes(spec: ProgramSpec) -> Shapes:
    """`(n*D, C)` of each input of a program; the outputs have the same."""
    return tuple((port.channels, port.capacity) for port in spec.ports)
