# python -m pytest tests/test_interpreter.py
"""The interpreter computes what a saved program says, as float16 hardware would, on any number of threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_info

from expert_programs import HIDDEN, mil_program, random_expert, reference, relative_error, saved, tiny_spec
from mlx_npumoe.converters.mil import load_graph
from mlx_npumoe.converters.package import package_bytes, write_package
from mlx_npumoe.devices.dataflow import Dataflow
from mlx_npumoe.devices.fp16 import BLOCK, RoundingScratch, narrow, round_to_fp16, widen
from mlx_npumoe.devices.interpreter import Emulation, InterpreterDevice
from mlx_npumoe.devices.null import NullDevice
from mlx_npumoe.devices.tasks import Scratch
from mlx_npumoe.devices.worker import Team
from mlx_npumoe.errors import DeviceError
from mlx_npumoe.program import ProgramSpec

LIMITS = {"fp16": 1.5e-3, "int8": 1.5e-2}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Callable[[ProgramSpec], Path]:
    """Each spec's package, built once."""
    folder = tmp_path_factory.mktemp("programs")
    made: dict[ProgramSpec, Path] = {}

    def get(spec: ProgramSpec) -> Path:
        if spec not in made:
            made[spec] = saved(spec, folder / f"{len(made)}.mlpackage")
        return made[spec]

    return get


@pytest.fixture
def devices() -> Iterator[Callable[..., InterpreterDevice]]:
    """Makes devices and closes them."""
    opened: list[InterpreterDevice] = []

    def make(threads: int = 2, **emulation: Any) -> InterpreterDevice:
        opened.append(InterpreterDevice(threads, Emulation(**emulation)))
        return opened[-1]

    yield make
    for device in opened:
        device.close()


def draw(spec: ProgramSpec, seed: int = 0) -> list[np.ndarray]:
    """Inputs `(G*D, C)` float16, one per group."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((p.channels, p.capacity)).astype(np.float16) for p in spec.ports]


def start(device: Any, loaded: Any, inputs: list[np.ndarray]) -> Future[Any]:
    lease = device.lease(loaded)
    for surface, x in zip(lease.inputs, inputs, strict=True):
        surface.write(mx.array(x))
    future: Future[Any] = device.submit(lease)
    return future


def run(device: InterpreterDevice, package: Path, spec: ProgramSpec, inputs: list[np.ndarray]) -> list[np.ndarray]:
    lease = start(device, device.load(package, spec), inputs).result(30)
    results = [surface.host.copy() for surface in lease.outputs]
    for surface, result in zip(lease.outputs, results, strict=True):
        assert mx.array_equal(surface.array, mx.array(result), equal_nan=True)
    lease.retire()
    return results


def run_graph(model: Any, *inputs: np.ndarray, **options: bool) -> list[np.ndarray]:
    """Any graph, without surfaces."""
    flow = Dataflow(load_graph(model), **options)
    outputs = [np.full(flow.shape(p.name), 99, np.float16) for p in flow.graph.outputs]
    team = Team([Scratch(), Scratch()], "test")
    flow.run(inputs, outputs, team)
    team.close()
    return outputs


# ------------------------------------------------------------------------------------------------------- rounding


def rounded(values: np.ndarray) -> np.ndarray:
    out = values.copy()
    with np.errstate(all="ignore"):
        round_to_fp16(out, RoundingScratch())
    return out


def assert_rounds_like_numpy(values: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        wanted = values.astype(np.float16)
    got = rounded(values)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
    known = ~np.isnan(wanted)
    np.testing.assert_array_equal(got[known].view(np.uint32), wanted[known].astype(np.float32).view(np.uint32))
    half = np.empty(values.shape, np.float16)
    with np.errstate(all="ignore"):
        narrow(values.copy(), half, RoundingScratch())
    np.testing.assert_array_equal(np.isnan(half), np.isnan(wanted))
    np.testing.assert_array_equal(half[known].view(np.uint16), wanted[known].view(np.uint16))


def test_every_float16_and_its_surroundings_round_like_numpy() -> None:
    grid = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    finite = np.sort(grid[np.isfinite(grid)])
    halfway = (finite[1:] + finite[:-1]) / 2
    for values in (finite, halfway, np.nextafter(halfway, -np.inf), np.nextafter(halfway, np.inf)):
        assert_rounds_like_numpy(values.astype(np.float32))
    special = [0.0, -0.0, 65519.99, 65520, -65520, 7e4, 3e38, np.inf, -np.inf, np.nan, 1e-45, -1e-30]
    edges = np.array(special, np.float32)
    assert_rounds_like_numpy(edges)
    for edge in edges:
        assert_rounds_like_numpy(np.array([edge, 1.0004883], np.float32))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=40))
def test_any_numbers_round_like_numpy(values: list[float]) -> None:
    assert_rounds_like_numpy(np.array(values, np.float32))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_random_bits_round_like_numpy(seed: int) -> None:
    bits = np.random.default_rng(seed).integers(0, 1 << 32, 5000, dtype=np.uint32)
    assert_rounds_like_numpy(bits.view(np.float32))
    assert_rounds_like_numpy(bits.view(np.float32)[np.abs(bits.view(np.float32)) < 65000])


def test_blocks_are_rounded_apart() -> None:
    values = np.random.default_rng(0).standard_normal(2 * BLOCK + 17).astype(np.float32)
    values[BLOCK + 3] = np.nan
    assert_rounds_like_numpy(values)


def test_widening_is_exact() -> None:
    half = np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(256, 256)
    for part in (half, half[:, 7:50], half[np.isfinite(half)][:1000]):
        out = np.empty(part.shape, np.float32)
        with np.errstate(all="ignore"):
            widen(part, out)
        np.testing.assert_array_equal(out, part.astype(np.float32))
        np.testing.assert_array_equal(np.signbit(out), np.signbit(part))


# --------------------------------------------------------------------------------------------------- expert programs


@pytest.mark.parametrize("weights", ["fp16", "int8"])
@pytest.mark.parametrize("up_shift", [0, 3])
@pytest.mark.parametrize("threads", [1, 2])
def test_experts_match_the_reference(packages: Any, devices: Any, weights: str, up_shift: int, threads: int) -> None:
    spec = tiny_spec(((3, 1, 6), 32), ((7,), 64), ((0, 2), 96), weights=weights, up_shift=up_shift)
    inputs = draw(spec)
    for i, got in enumerate(run(devices(threads), packages(spec), spec, inputs)):
        assert relative_error(got, reference(spec, i, inputs[i])) < LIMITS[weights]


def test_experts_match_mlx(packages: Any, devices: Any) -> None:
    spec = tiny_spec(weights="fp16")
    inputs = draw(spec)
    got = run(devices(), packages(spec), spec, inputs)
    gate, up, down = (mx.array(m) for m in random_expert(7)[:3])
    x = mx.array(inputs[1].T.astype(np.float32))  # (C, D)
    wanted = (mx.sigmoid(x @ gate.T) * (x @ gate.T) * (x @ up.T)) @ down.T
    assert relative_error(got[1].T, np.array(wanted)) < LIMITS["fp16"]


def rounding_reference(spec: ProgramSpec, group: int, x: np.ndarray) -> np.ndarray:
    """Every operation in float64, its result rounded to float16: what the program says, slowly."""

    def half(a: np.ndarray) -> np.ndarray:
        return a.astype(np.float16).astype(np.float64)

    parts = []
    for g, expert in enumerate(spec.groups[group].experts):
        gate_w, up_w, down_w = (half(m) for m in random_expert(expert)[:3])
        part = x[g * HIDDEN : (g + 1) * HIDDEN].astype(np.float64)
        gate, up = half(gate_w @ part), half(up_w @ part)
        parts.append(down_w @ half(half(gate / (1 + np.exp(-gate))) * up))
    return np.concatenate(parts).astype(np.float16)


def test_values_are_rounded_at_operation_borders(packages: Any, devices: Any) -> None:
    spec = tiny_spec(weights="fp16")
    inputs = draw(spec)
    for i, got in enumerate(run(devices(), packages(spec), spec, inputs)):
        same = np.mean(got == rounding_reference(spec, i, inputs[i]))
        assert same > 0.95  # the rest are sums that float32 and float64 put on two sides of a tie


def test_two_threads_give_the_bits_of_one(packages: Any, devices: Any) -> None:
    spec = tiny_spec((tuple(range(8)), 32), ((9, 10, 11), 64), ((12,), 32))
    inputs = draw(spec)
    one, two = (run(devices(n), packages(spec), spec, inputs) for n in (1, 2))
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a.view(np.uint16), b.view(np.uint16))


def test_nan_stays_in_its_column(packages: Any, devices: Any) -> None:
    spec = tiny_spec()
    clean = draw(spec)
    dirty = [x.copy() for x in clean]
    dirty[0][:HIDDEN, 5] = np.nan  # a token of the first expert
    dirty[1][3, 60:] = np.inf
    device = devices()
    wanted, got = (run(device, packages(spec), spec, x) for x in (clean, dirty))
    touched = [np.zeros(x.shape, bool) for x in clean]
    touched[0][:HIDDEN, 5] = True
    touched[1][:, 60:] = True
    for a, b, t in zip(wanted, got, touched, strict=True):
        np.testing.assert_array_equal(a[~t], b[~t])
        assert not np.isfinite(b[t]).all()


def test_calls_in_flight_do_not_mix(packages: Any, devices: Any) -> None:
    specs = [tiny_spec(), tiny_spec(((5, 4), 32), ((2,), 64))]  # equal shapes, one ring
    device = devices()
    loaded = [device.load(packages(s), s) for s in specs]
    jobs = [(i % 2, draw(specs[i % 2], seed=i)) for i in range(6)]
    futures = [start(device, loaded[which], inputs) for which, inputs in jobs]
    for (which, inputs), future in zip(jobs, futures, strict=True):
        lease = future.result(30)
        assert relative_error(lease.outputs[0].host, reference(specs[which], 0, inputs[0])) < LIMITS["int8"]
        lease.retire()


def test_blas_threads_are_given_back(packages: Any, devices: Any) -> None:
    before = [info["num_threads"] for info in threadpool_info()]
    spec = tiny_spec()
    pair = [devices(), devices()]  # their calls overlap
    loaded = [device.load(packages(spec), spec) for device in pair]
    for _ in range(10):
        futures = [start(device, program, draw(spec)) for device, program in zip(pair, loaded, strict=True)]
        for future in futures:
            future.result(30).retire()
    assert [info["num_threads"] for info in threadpool_info()] == before


# ------------------------------------------------------------------------------------------------------ any program


def half(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float16)


def test_other_operations_and_shapes_of_graph() -> None:
    def body(mb: Any, x: Any, z: Any) -> Any:
        a, b = mb.split(x=x, split_sizes=[24, 40], axis=1)
        c = mb.concat(values=[mb.relu(x=a), mb.square(x=b), a], axis=1)  # read again, so not only an output
        d = mb.transpose(x=mb.reshape(x=c, shape=(1, 8, 11, 32)), perm=[0, 2, 1, 3])
        e = mb.mul(x=mb.sigmoid(x=d), y=np.float16(0.5))
        f = mb.add(x=mb.reshape(x=e, shape=(1, 88, 1, 32)), y=c)
        g = mb.clip(x=mb.sub(x=f, y=z), alpha=np.float16(-1), beta=np.float16(1))
        cut = mb.slice_by_index(x=x, begin=[0, 8, 0, 0], end=[1, 24, 1, 32], stride=[1, 2, 1, 1])
        return [mb.identity(x=g, name="y0"), c, mb.concat(values=[cut, z, z, mb.silu(x=cut)], axis=1), x]

    x, z = half(1, 64, 1, 32), half(1, 88, 1, 32, seed=1)
    y0, c, y2, same = run_graph(mil_program(body, x.shape, z.shape), x, z)
    a, b = x[:, :24].astype(np.float32), x[:, 24:].astype(np.float32)
    wanted_c = np.concatenate([np.maximum(a, 0), b * b, a], axis=1).astype(np.float16)
    np.testing.assert_array_equal(c, wanted_c)
    np.testing.assert_array_equal(same, x)
    cut = x[:, 8:24:2]
    np.testing.assert_array_equal(y2[:, :184], np.concatenate([cut, z, z], axis=1))
    wide = cut.astype(np.float64)
    np.testing.assert_allclose(y2[:, 184:], wide / (1 + np.exp(-wide)), atol=1e-3)
    d = wanted_c.reshape(1, 8, 11, 32).transpose(0, 2, 1, 3).astype(np.float64)
    f = (0.5 / (1 + np.exp(-d))).reshape(1, 88, 1, 32) + wanted_c.astype(np.float64)
    np.testing.assert_allclose(y0, np.clip(f - z.astype(np.float64), -1, 1), atol=6e-3)


def test_default_passes_of_coremltools_are_understood() -> None:
    gate, up, down = (m.astype(np.float16)[:, :, None, None] for m in random_expert(1)[:3])

    def body(mb: Any, x: Any) -> Any:
        g = mb.conv(x=x, weight=gate)
        return mb.conv(x=mb.mul(x=mb.mul(x=g, y=mb.sigmoid(x=g)), y=mb.conv(x=x, weight=up)), weight=down, name="y0")

    x = half(1, HIDDEN, 1, 32)
    spec = tiny_spec(((1,), 32))
    for passes in (False, True):
        (y,) = run_graph(mil_program(body, x.shape, passes=passes), x)
        assert relative_error(y[0, :, 0], reference(spec, 0, x[0, :, 0])) < LIMITS["fp16"]


def test_convolutions_with_bias() -> None:
    weight, bias = half(16, 64, 1, 1, scale=0.1), half(16, seed=3)
    x = half(1, 64, 1, 32)
    (y,) = run_graph(mil_program(lambda mb, x: mb.conv(x=x, weight=weight, bias=bias, name="y0"), x.shape), x)
    wanted = weight[:, :, 0, 0].astype(np.float64) @ x[0, :, 0].astype(np.float64) + bias.astype(np.float64)[:, None]
    np.testing.assert_allclose(y[0, :, 0], wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda mb, x: mb.softmax(x=x, axis=1, name="y0"), "softmax .y0."),
        (lambda mb, x: mb.conv(x=x, weight=half(16, 64, 1, 3), pad_type="same", name="y0"), "conv y0"),
        (lambda mb, x: mb.conv(x=x, weight=half(16, 64, 1, 1), strides=[1, 2], name="y0"), "conv y0"),
        (lambda mb, x: mb.concat(values=[x, half(1, 64, 1, 32)], axis=1, name="y0"), "is a constant"),
        (lambda mb, x: mb.cast(x=mb.cast(x=x, dtype="int32"), dtype="fp16", name="y0"), "int32"),
    ],
)
def test_what_it_does_not_know_is_named(tmp_path: Path, devices: Any, body: Any, message: str) -> None:
    path = write_package(mil_program(body, (1, 64, 1, 32)), tmp_path / "odd.mlpackage", release=True)
    with pytest.raises(DeviceError, match=message) as error:
        devices().load(path, tiny_spec(((0,), 32)))
    assert str(path) in str(error.value)


def test_programs_of_another_plan_or_damaged_are_refused(packages: Any, devices: Any, tmp_path: Path) -> None:
    spec = tiny_spec()
    with pytest.raises(DeviceError, match="its plan says"):
        devices().load(packages(spec), tiny_spec(((3, 1), 64), ((7,), 64)))
    with pytest.raises(DeviceError, match="cannot read"):
        devices().load(tmp_path / "missing.mlpackage", spec)


# -------------------------------------------------------------------------------------------------------- emulation


def test_saturation() -> None:
    weight = np.full((64, 64, 1, 1), 16, np.float16)
    x = np.full((1, 64, 1, 32), 32, np.float16)  # sums to 32768
    x[..., 1] = -32
    x[..., 2] = 31

    def body(mb: Any, x: Any) -> Any:
        return mb.conv(x=x, weight=weight, name="y0")

    model = mil_program(body, x.shape)
    (plain,) = run_graph(model, x)
    (saturated,) = run_graph(model, x, saturate=True)
    assert plain[0, 0, 0, :3].tolist() == [32768, -32768, 31744]
    assert saturated[0, 0, 0, :3].tolist() == [np.inf, -np.inf, 31744]


def test_last_axis_fault() -> None:
    x = np.full((1, 64, 1, 64), 5000, np.float16)
    x[:, 1] = -5000
    x[:, 2] = 4000

    def body(mb: Any, x: Any) -> Any:
        a, b = mb.split(x=x, num_splits=2, axis=3)
        return [a, b, mb.slice_by_index(x=x, begin=[0, 0, 0, 32], end=[1, 64, 1, 64])]

    a, b, c = run_graph(mil_program(body, x.shape), x, last_axis_fault=True)
    assert (a[0, :3, 0, 0]).tolist() == [5000, -5000, 4000]
    for cut in (b, c):
        assert cut[0, :3, 0, 0].tolist() == [np.inf, -np.inf, 4000]
    assert all(np.isfinite(y).all() for y in run_graph(mil_program(body, x.shape), x))


def test_size_limit_refuses_to_load(packages: Any, devices: Any) -> None:
    spec = tiny_spec()
    nbytes = package_bytes(packages(spec))
    assert devices(max_bytes=nbytes).load(packages(spec), spec).nbytes == nbytes
    with pytest.raises(DeviceError, match="fewer experts"):
        devices(max_bytes=nbytes - 1).load(packages(spec), spec)


def test_latency_nan_and_failing_calls(packages: Any, devices: Any) -> None:
    spec = tiny_spec()
    device = devices(launch_s=0.05, nan_output=True, fail_every=2)
    loaded = device.load(packages(spec), spec)
    for i in range(1, 5):
        future = start(device, loaded, draw(spec))
        if i % 2 == 0:
            with pytest.raises(DeviceError, match="emulated failure"):
                future.result(30)
            continue
        lease = future.result(30)
        assert lease.device_s >= 0.05
        assert all(np.isnan(s.host).all() for s in lease.outputs)


def test_a_hanging_call_times_out_and_the_device_closes(packages: Any) -> None:
    spec = tiny_spec()
    device = InterpreterDevice(2, Emulation(hang_s=60))
    loaded = device.load(packages(spec), spec)
    before = time.perf_counter()
    first, second = start(device, loaded, draw(spec)), start(device, loaded, draw(spec))
    assert time.perf_counter() - before < 5  # submit never blocks
    with pytest.raises(TimeoutError):
        first.result(0.05)
    device.close()
    for future in (first, second):
        with pytest.raises(DeviceError, match="closed"):
            future.result(5)
    with pytest.raises(DeviceError, match="closed"):
        start(device, loaded, draw(spec)).result(5)
    device.close()


def test_errors_in_a_call_reach_the_future_as_device_errors(packages: Any, devices: Any) -> None:
    spec = tiny_spec()
    device = devices()
    loaded = device.load(packages(spec), spec)
    good = loaded.state
    loaded.state = None
    with pytest.raises(DeviceError, match="failed"):
        start(device, loaded, draw(spec)).result(30)
    loaded.state = good
    start(device, loaded, draw(spec)).result(30)  # the worker lives on


def test_threads_are_daemons_and_end_with_the_device(packages: Any) -> None:
    before = set(threading.enumerate())
    device = InterpreterDevice(3)
    mine = set(threading.enumerate()) - before
    assert len(mine) == 3 and all(t.daemon for t in mine)  # a coordinator and two helpers
    device.close()
    for thread in mine:
        thread.join(5)
        assert not thread.is_alive()


def test_null_device_returns_at_once_with_zeros(packages: Any) -> None:
    spec = tiny_spec()
    device = NullDevice()
    assert "not computed" in device.name
    loaded = device.load(packages(spec), spec)
    assert loaded.nbytes == package_bytes(packages(spec))
    lease = start(device, loaded, draw(spec)).result(5)
    assert lease.device_s == 0 and not any(s.host.any() for s in lease.outputs)
    lease.retire()
    with pytest.raises(DeviceError, match="no program"):
        device.load(Path("nowhere.mlpackage"), spec)
    device.close()
