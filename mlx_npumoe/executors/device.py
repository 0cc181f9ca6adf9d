"""The device executor: one site's programs on the second device, from packed rows to joined outputs."""

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
    """A call in flight: surfaces and future of each program, and how many real rows each expert has."""

    leases: list[Lease]
    futures: list[Future[Lease]]
    accepted: np.ndarray  # (E,) int64

    @property
    def inputs(self) -> list[Surface]:
        """Of all programs, in the order of the site's ports."""
        return [surface for lease in self.leases for surface in lease.inputs]

    @property
    def outputs(self) -> list[Surface]:
        """Of all programs, in the order of the site's ports."""
        return [surface for lease in self.leases for surface in lease.outputs]

    def retire(self, *consumers: mx.array) -> None:
        """Give all leases back; `consumers` are evaluated before the surfaces are used again."""
        for lease in self.leases:
            lease.retire(*consumers)

    def abandon(self) -> None:
        """After a deadline: surfaces a late call may still write into are never used again."""
        for lease, future in zip(self.leases, self.futures, strict=True):
            if future.done():
                lease.retire()
            else:
                lease.abandon()


class DeviceExecutor:
    """Starts and joins one site's programs. DeviceError where one fails, hangs or returns bad numbers."""

    def __init__(
        self,
        device: ExpertDevice,
        loaded: Sequence[LoadedProgram],
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
        self._loaded = list(loaded)
        self._deadline_s = deadline_s

    def wants(self, tokens: int) -> bool:
        """Whether a call of that many tokens is worth a launch, and the device is trusted."""
        return tokens >= self.min_tokens and not self.breaker.open

    def start(self, packed: Sequence[mx.array], accepted: np.ndarray) -> Ticket:
        """Write evaluated `(n*D, C)` arrays, one a port, into surfaces and hand them to the device's thread."""
        ticket = Ticket([], [], accepted)
        try:
            ticket.leases += [self._device.lease(loaded) for loaded in self._loaded]
            for surface, array in zip(ticket.inputs, packed, strict=True):
                surface.write(array)
        except DeviceError:
            ticket.retire()
            raise
        ticket.futures += [self._device.submit(lease) for lease in ticket.leases]
        return ticket

    def join(self, ticket: Ticket, counters: LayerCounters) -> list[mx.array]:
        """Wait for the outputs, one `(n*D, C)` array a port, checked to be finite where rows are real."""
        start = time.perf_counter()
        try:
            self._wait(ticket.futures, start + self._deadline_s)
        except FutureTimeout as e:
            ticket.abandon()
            self.breaker.trip(f"no answer within {self._deadline_s:g} s")
            raise DeviceError(f"the {self._device.name} device gave no answer within {self._deadline_s:g} s") from e
        except DeviceError:
            ticket.retire()
            raise
        finally:
            counters.join_wait_s += time.perf_counter() - start
        counters.device_s += sum(lease.device_s for lease in ticket.leases)
        spec = self.table.spec
        real = [[int(ticket.accepted[e]) for e in port.experts] for port in spec.ports]
        if not _all_finite(ticket.outputs, spec.hidden, real):
            sound = _all_finite(ticket.inputs, spec.hidden, real)
            ticket.retire()
            if not sound:
                raise InputError("rows of the model are not finite in float16")
            raise DeviceError(f"the {self._device.name} device returned numbers that are not finite")
        rows = int(ticket.accepted.sum())
        counters.launches += len(ticket.leases)
        counters.rows += rows
        counters.pads += spec.rows - rows
        return [surface.array for surface in ticket.outputs]

    @staticmethod
    def _wait(futures: Sequence[Future[Lease]], deadline: float) -> None:
        """Until all are done, also where one has failed; then the first failure is raised."""
        failure: DeviceError | None = None
        for future in futures:
            try:
                future.result(timeout=max(0.0, deadline - time.perf_counter()))
            except DeviceError as e:
                failure = failure or e
        if failure is not None:
            raise failure


def _all_finite(surfaces: Sequence[Surface], hidden: int, rows: Sequence[Sequence[int]]) -> bool:
    return all(finite(surface.host, hidden, n) for surface, n in zip(surfaces, rows, strict=True))
