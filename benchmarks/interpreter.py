"""Is the interpreter an honest second unit? Its speed per computed row against a plain NumPy loop, in one run.

    python -m mlx_npumoe.benchmarks.interpreter [--quick] [--mlx-busy] [--experts 16] [--json]

A layer of 2048 -> 768 with 128 experts and top-8 gives an expert 32 rows of 512 tokens and 128 rows of 2048 on
average. Measured are 16 hot experts of it in groups of 8, with capacities at that mean and at twice it;
`--experts 128` takes them all (10 GB of memory). The loop computes the same rows with the same weights in float32:
per expert `x @ gate.T`, `x @ up.T`, `silu * up`, `@ down.T` on contiguous rows. The device is timed from submit to
join; the two take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from threadpoolctl import ThreadpoolController

from mlx_npumoe.converters.builder import build_program
from mlx_npumoe.converters.package import write_package
from mlx_npumoe.devices.interpreter import InterpreterDevice
from mlx_npumoe.program import ExpertMatrices, Group, ProgramSpec

HIDDEN, WIDTH, EXPERTS, TOP_K = 2048, 768, 128, 8
GROUP = 8  # experts a group
REQUIRED = 0.8  # speed per row against the loop


@dataclass(frozen=True)
class Result:
    """Medians over pairs of runs at one number of tokens and threads."""

    tokens: int
    threads: int
    mlx_busy: bool
    rows: int
    loop_us_per_row: float
    device_us_per_row: float
    device_gflops: float
    speed: float  # loop time / device time, median over pairs
    lowest: float  # 25 % of the pairs are slower than this


def random_expert(seed: int) -> ExpertMatrices:
    """Matrices with the spread of a trained layer's."""
    rng = np.random.default_rng(seed)

    def draw(rows: int, columns: int) -> np.ndarray:
        return rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(columns**-0.5)

    return ExpertMatrices(draw(WIDTH, HIDDEN), draw(WIDTH, HIDDEN), draw(HIDDEN, WIDTH))


def layer_spec(tokens: int, experts: int) -> ProgramSpec:
    """Groups of hot experts, half of them at the mean load and half at twice the mean."""
    mean = tokens * TOP_K // EXPERTS
    groups = [
        Group(tuple(range(first, first + GROUP)), mean if first >= experts // 2 else 2 * mean)
        for first in range(0, experts, GROUP)
    ]
    return ProgramSpec(HIDDEN, WIDTH, tuple(groups), weights="fp16")


def sorted_loop(x: np.ndarray, experts: list[ExpertMatrices], capacities: tuple[int, ...]) -> np.ndarray:
    """The yardstick: `(rows, D)` float32 sorted by expert to `(rows, D)`."""
    y = np.empty_like(x)
    start = 0
    for matrices, capacity in zip(experts, capacities, strict=True):
        rows = x[start : start + capacity]
        assert matrices.gate is not None
        gate = rows @ matrices.gate.T  # (C, F)
        up = rows @ matrices.up.T
        y[start : start + capacity] = (gate / (1 + np.exp(-gate)) * up) @ matrices.down.T
        start += capacity
    return y


@contextmanager
def busy_mlx() -> Iterator[None]:
    """MLX multiplying matrices on another thread meanwhile, as the local executor does."""
    stop = threading.Event()

    def work() -> None:
        a = mx.random.normal((256, 256))
        while not stop.is_set():
            mx.eval(a @ a)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def measure(package: Path, spec: ProgramSpec, tokens: int, threads: int, pairs: int, mlx_busy: bool) -> Result:
    """Loop and device in turns on `threads` threads each. Raises AssertionError where their results differ."""
    experts = [random_expert(e) for e in spec.experts]
    x = np.random.default_rng(tokens).standard_normal((spec.rows, HIDDEN)).astype(np.float16).astype(np.float32)
    device = InterpreterDevice(threads)
    blas = ThreadpoolController()
    loop_s, device_s = [], []
    try:
        loaded = device.load(package, spec)
        lease = device.lease(loaded)
        _pack(x, spec, [surface.host for surface in lease.inputs])
        with busy_mlx() if mlx_busy else nullcontext():
            for _ in range(pairs + 1):
                start = time.perf_counter()
                with blas.limit(limits=threads, user_api="blas"):
                    y = sorted_loop(x, experts, spec.capacities)
                middle = time.perf_counter()
                device.submit(lease).result()
                device_s.append(time.perf_counter() - middle)
                loop_s.append(middle - start)
        got = _unpack([surface.host for surface in lease.outputs], spec)
    finally:
        device.close()
    error = float(np.linalg.norm(got - y) / np.linalg.norm(y))
    assert error < 2e-3, f"the device's results differ from the loop's by {error:.1e}"
    loop_s, device_s = loop_s[1:], device_s[1:]  # the first pair warms up
    ratios = sorted(a / b for a, b in zip(loop_s, device_s, strict=True))
    typical = statistics.median(device_s)
    return Result(
        tokens=tokens,
        threads=threads,
        mlx_busy=mlx_busy,
        rows=spec.rows,
        loop_us_per_row=1e6 * statistics.median(loop_s) / spec.rows,
        device_us_per_row=1e6 * typical / spec.rows,
        device_gflops=spec.flops() / typical / 1e9,
        speed=statistics.median(ratios),
        lowest=ratios[len(ratios) // 4],
    )


def _pack(x: np.ndarray, spec: ProgramSpec, surfaces: list[np.ndarray]) -> None:
    """Rows sorted by expert `(rows, D)` into surfaces `(G*D, C)`."""
    start = 0
    for group, surface in zip(spec.groups, surfaces, strict=True):
        for g in range(len(group.experts)):
            surface[g * HIDDEN : (g + 1) * HIDDEN] = x[start : start + group.capacity].T
            start += group.capacity


def _unpack(surfaces: list[np.ndarray], spec: ProgramSpec) -> np.ndarray:
    """Surfaces `(G*D, C)` to rows sorted by expert `(rows, D)`."""
    parts = []
    for group, surface in zip(spec.groups, surfaces, strict=True):
        by_expert = surface.reshape(len(group.experts), HIDDEN, group.capacity)
        parts.append(by_expert.transpose(0, 2, 1).reshape(-1, HIDDEN))
    return np.concatenate(parts).astype(np.float32)


def setup_arg_parser() -> argparse.ArgumentParser:
    """Options of this benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    parser.add_argument("--mlx-busy", action="store_true", help="also with MLX working on another thread")
    parser.add_argument("--experts", type=int, default=2 * GROUP, help="hot experts, a multiple of 16 (default 16)")
    parser.add_argument("--pairs", type=int, help="pairs of runs for each line (default 15, quick 5)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Measure and print; exit code 1 where a line with MLX idle is under what is required."""
    parser = setup_arg_parser()
    args = parser.parse_args(argv)
    if args.experts < 2 * GROUP or args.experts % (2 * GROUP) or args.experts > EXPERTS:
        parser.error(f"--experts {args.experts} is not a multiple of {2 * GROUP} up to {EXPERTS}")
    pairs = args.pairs or (5 if args.quick else 15)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for tokens in (512, 2048):
            spec = layer_spec(tokens, args.experts)
            package = write_package(
                build_program(spec, random_expert), Path(folder) / f"{tokens}.mlpackage", release=True
            )
            for threads in (1, 2):
                for mlx_busy in (False, True) if args.mlx_busy else (False,):
                    results.append(measure(package, spec, tokens, threads, pairs, mlx_busy))
    enough = all(r.speed >= REQUIRED for r in results if not r.mlx_busy)
    if args.json:
        print(json.dumps({"required": REQUIRED, "results": [asdict(r) for r in results]}, indent=2))
        return int(not enough)
    print(f"D={HIDDEN} F={WIDTH}, {args.experts} hot experts of {EXPERTS}, fp16, {pairs} pairs; speed = loop / device")
    print("tokens threads  MLX    rows  loop us/row  device us/row  device GFLOP/s  speed (lower quartile)")
    for r in results:
        verdict = "ok" if r.speed >= REQUIRED else f"under {REQUIRED}"
        print(
            f"{r.tokens:6} {r.threads:7}  {'busy' if r.mlx_busy else 'idle'} {r.rows:6} {r.loop_us_per_row:12.1f} "
            f"{r.device_us_per_row:14.1f} {r.device_gflops:15.1f}  {r.speed:5.2f} ({r.lowest:.2f})  {verdict}"
        )
    return int(not enough)


if __name__ == "__main__":
    raise SystemExit(main())
