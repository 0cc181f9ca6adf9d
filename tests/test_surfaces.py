# python -m pytest tests/test_surfaces.py
"""Surfaces share memory with MLX; rings hand out only what nobody reads any more."""

from __future__ import annotations

import threading
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from expert_programs import tiny_spec
from mlx_npumoe.devices.base import LoadedProgram
from mlx_npumoe.devices.surfaces import HostSurface, SurfaceRing, SurfaceRings, surface_shapes
from mlx_npumoe.errors import DeviceError


def loaded(*groups: tuple[tuple[int, ...], int]) -> LoadedProgram:
    return LoadedProgram(tiny_spec(*groups), Path("nowhere.mlpackage"), 0)


def test_host_and_array_are_one_memory() -> None:
    surface = HostSurface(64, 32)
    assert not surface.host.any()
    surface.host[3, 5] = 7
    assert surface.array[3, 5].item() == 7
    packed = mx.arange(64 * 32).reshape(64, 32).astype(mx.float16)
    mx.eval(packed)
    surface.write(packed)
    assert mx.array_equal(surface.array, packed)
    assert surface.host.ctypes.data == np.array(surface.array, copy=False).ctypes.data


def test_consumers_never_take_the_memory() -> None:
    surface = HostSurface(64, 32)
    address = surface.host.ctypes.data
    for _ in range(3):
        mx.eval(surface.array * 2 + 1)
    surface.host[...] = 1
    assert surface.array.sum().item() == 64 * 32
    assert np.array(surface.array, copy=False).ctypes.data == address


def test_transposed_views_are_written_in_order() -> None:
    surface = HostSurface(64, 32)
    packed = mx.arange(64 * 32).reshape(32, 64).T.astype(mx.float16)
    mx.eval(packed)
    surface.write(packed)
    assert mx.array_equal(surface.array, packed)


@pytest.mark.parametrize("packed", [mx.zeros((32, 64), mx.float16), mx.zeros((64, 32), mx.float32)])
def test_wrong_shape_or_type_is_refused(packed: mx.array) -> None:
    with pytest.raises(DeviceError, match="was given"):
        HostSurface(64, 32).write(packed)


def test_rings_are_shared_by_shape() -> None:
    rings = SurfaceRings()
    for first in range(48):
        lease = rings.lease(loaded(((first, first + 1), 32), ((first + 2,), 64)))
        assert [s.host.shape for s in lease.inputs] == [(128, 32), (64, 64)]
        assert [s.host.shape for s in lease.outputs] == [(128, 32), (64, 64)]
        lease.retire()
    assert len(rings) == 1
    rings.lease(loaded(((0,), 32)))
    assert len(rings) == 2


def test_two_sets_take_turns() -> None:
    program = loaded(((0,), 32))
    shapes = surface_shapes(program.spec)
    ring = SurfaceRing(shapes, shapes)
    seen = []
    for _ in range(6):
        lease = ring.lease(program)
        seen.append(lease.outputs[0].host.ctypes.data)
        lease.retire()
    assert len(ring) == len(set(seen)) == 2
    assert seen[::2] == [seen[0]] * 3 and seen[1::2] == [seen[1]] * 3


def test_leases_in_flight_never_share_and_are_never_waited_for() -> None:
    program = loaded(((0,), 32))
    rings = SurfaceRings()
    leases = [rings.lease(program) for _ in range(5)]
    assert len({lease.inputs[0].host.ctypes.data for lease in leases}) == 5


def test_consumers_read_before_the_surface_is_used_again() -> None:
    program = loaded(((0,), 32))
    rings = SurfaceRings()
    sums = []
    for value in range(1, 6):
        lease = rings.lease(program)
        lease.outputs[0].host[...] = value
        sums.append(lease.outputs[0].array.sum())  # lazy until somebody evaluates it
        lease.retire(sums[-1])
    assert [s.item() / (64 * 32) for s in sums] == [1, 2, 3, 4, 5]


def test_evaluated_consumers_cost_nothing_and_retiring_twice_is_once() -> None:
    program = loaded(((0,), 32))
    rings = SurfaceRings()
    lease = rings.lease(program)
    done = lease.outputs[0].array + 1
    mx.eval(done)
    lease.retire(done)
    lease.retire(done)
    lease.abandon()
    second, third = rings.lease(program), rings.lease(program)
    assert second.inputs[0] is not third.inputs[0]


def test_abandoned_surfaces_never_come_back() -> None:
    program = loaded(((0,), 32))
    rings = SurfaceRings()
    lost = rings.lease(program)
    inputs = lost.inputs[0]
    lost.abandon()
    lost.retire()
    for _ in range(6):
        lease = rings.lease(program)
        assert lease.inputs[0] is not inputs
        lease.retire()


def test_threads_never_get_the_same_surfaces() -> None:
    program = loaded(((0,), 32))
    shapes = surface_shapes(program.spec)
    ring = SurfaceRing(shapes, shapes)
    held: set[int] = set()
    clashes = []
    lock = threading.Lock()

    def work() -> None:
        for _ in range(50):
            lease = ring.lease(program)
            address = lease.inputs[0].host.ctypes.data
            with lock:
                if address in held:
                    clashes.append(address)
                held.add(address)
            with lock:
                held.discard(address)
            lease.retire()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not clashes and len(ring) <= 4
