"""The device executor: one site's program on the second device, from packed rows to joined outputs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..devices.base import ExpertDevice, Lease, LoadedProgram, Surface
from ..devices.health import Breaker, finite
from ..errors import DeviceError, InputError
from ..report import LayerCounters
from ..routing import SlotTable


@dataclass
class Ticket:
    """A call in flight: its surfaces, its future, and how many real rows each expert has."""

    lease: Lease
    future: Future[Lease]
    accepted: np.ndarray  # (E,) int64


class DeviceExecutor:
    """Starts and joins one site's program. A call that fails, hangs or returns bad numbers raises DeviceError."""

    def __init__(
        self,
        device: ExpertDevice,
        loaded: LoadedProgram,
        table: SlotTable,
        *,
        min_tokens: int,
        chunk: int,
        deadline_s: float,
        breaker: Breaker,
    ) -> None:
        self.table = table
        self.min_tokens = min_tokens
        self.chunk = chunk
        self.breaker = breaker
        self._device = device
        self._loaded = loaded
        self._deadline_s = deadline_s

    def wants(self, tokens: int) -> bool:
        """Whether a call of that many tokens is worth a launch, and the device is trusted."""
        return tokens >= self.min_tokens and not self.breaker.open

    def start(self, packed: Sequence[mx.array], accepted: np.ndarray) -> Ticket:
        """Write evaluated `(G*D, C)` arrays into surfaces and hand them to the device's thread."""
        lease = self._device.lease(self._loaded)
        for surface, array in zip(lease.inputs, packed, strict=True):
            surface.write(array)
        return Ticket(lease, self._device.submit(lease), accepted)

    def join(self, ticket: Ticket, counters: LayerCounters) -> list[mx.array]:
        """Wait for the outputs, one `(G*D, C)` array a group, checked to be finite where rows are real."""
        start = time.perf_counter()
        try:
            lease = ticket.future.result(timeout=self._deadline_s)
        except FutureTimeout as e:
            ticket.lease.abandon()
            self.breaker.trip(f"no answer within {self._deadline_s:g} s")
            raise DeviceError(f"the {self._device.name} device gave no answer within {self._deadline_s:g} s") from e
        except DeviceError:
            ticket.lease.retire()
            raise
        finally:
            counters.join_wait_s += time.perf_counter() - start
        counters.device_s += lease.device_s
        spec = self.table.spec
        real = [[int(ticket.accepted[e]) for e in group.experts] for group in spec.groups]
        if not _all_finite(lease.outputs, spec.hidden, real):
            sound = _all_finite(lease.inputs, spec.hidden, real)
            lease.retire()
            if not sound:
                raise InputError("rows of the model are not finite in float16")
            raise DeviceError(f"the {self._device.name} device returned numbers that are not finite")
        rows = int(ticket.accepted.sum())
        counters.launches += 1
        counters.rows += rows
        counters.pads += spec.rows - rows
        return [surface.array for surface in lease.outputs]


def _all_finite(surfaces: Sequence[Surface], hidden: int, rows: Sequence[Sequence[int]]) -> bool:
    return all(finite(surface.host, hidden, n) for surface, n in zip(surfaces, rows, strict=True))
