"""Which device profile holds on this machine, and measuring one here."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .cache import cache_root
from .planning.device_profile import DeviceProfile, load_profile

if TYPE_CHECKING:
    import mlx.core as mx
    import mlx.nn as nn
    import numpy as np

    from .devices.interpreter import InterpreterDevice

MEASURED = "device-interpreter.json"


def measured_path() -> Path:
    """Where `doctor --measure` keeps this machine's profile."""
    return cache_root() / MEASURED


def device_profile(name_or_path: str | Path | None = None) -> DeviceProfile:
    """The profile asked for; else the shipped one of Apple chips on macOS; else the one measured here, or shipped.

    Raises:
        PreparedError: no such profile, or it is damaged.
    """
    if name_or_path is not None:
        return load_profile(name_or_path)
    if sys.platform == "darwin":
        return load_profile("apple")  # what is measured below is the interpreter, not the Neural Engine
    return load_profile(measured_path() if measured_path().is_file() else "interpreter")


def best_of(action: Callable[[], object], repeats: int = 3) -> float:
    """Least seconds of a few runs."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def chip() -> str:
    """What this machine calls its processor."""
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def measure(threads: int = 2) -> DeviceProfile:
    """Measure this machine: the interpreter's launch (the join with it) and rate, packing, MLX's own expert kernels.

    Sizes are those of a Qwen3-30B-A3B expert (D=2048, F=768), float32 experts on MLX's side. What is not measured
    keeps its figure and kind from the shipped profile. Takes about a minute where MLX runs on a CPU.
    """
    import mlx.core as mx
    import numpy as np
    from mlx_lm.models.switch_layers import SwitchGLU

    from .devices.interpreter import InterpreterDevice
    from .program import Group, ProgramSpec
    from .routing import SlotTable, assign, combine, pack

    D, F = 2048, 768
    rng = np.random.default_rng(0)
    source = f"doctor --measure on {chip()}, {time.strftime('%Y-%m-%d')}, D={D} F={F}, {threads} threads"
    base = load_profile("interpreter")
    device = InterpreterDevice(threads=threads)
    try:
        tiny = _launch_seconds(device, 32, 64, 1, rng)
        rates = {}
        for rows in (32, 64, 128, 256):
            seconds = _launch_seconds(device, D, F, threads, rng, rows) - tiny
            rates[rows] = threads * rows * 6 * D * F / max(seconds, 1e-9) / 1e9
    finally:
        device.close()

    experts: nn.Module = SwitchGLU(D, F, 1)
    mx.eval(experts.parameters())
    local = {}
    for rows in (8, 32):
        x, chosen = mx.random.normal((rows, D)), mx.zeros((rows, 1), mx.uint32)
        mx.eval(x, chosen, experts(x, chosen))
        local[rows] = rows * 6 * D * F / best_of(partial(_evaluate, experts, x, chosen), 2) / 1e9

    spec = ProgramSpec(D, F, (Group(tuple(range(8)), 128),))
    table = SlotTable.of(spec, 8)
    block = mx.random.normal((8 * 128, D))
    assignment = assign(mx.repeat(mx.arange(8), 128)[:, None], table)
    packed = pack(block, assignment, table)
    mx.eval(block, packed, assignment.source)
    moved = 2 * 8 * 128 * D / 1e9  # GB of float16 rows
    packing = best_of(lambda: mx.eval(pack(block, assignment, table)))
    unpacking = best_of(lambda: mx.eval(combine(packed, None, assignment, table, (8 * 128, 1, D), mx.float32)))
    figures = {
        "launch_s": tiny,
        "pack_gbps": moved / packing,
        "unpack_gbps": moved / unpacking,
        "weight_gbps": None,  # part of the rates
    }
    return base.replace_measured(
        source, name="interpreter", chip=chip(), figures=figures, device_rate=rates, local_rate=local
    )


def _evaluate(experts: nn.Module, x: mx.array, chosen: mx.array) -> None:
    import mlx.core as mx

    mx.eval(experts(x, chosen))


def _launch_seconds(
    device: InterpreterDevice, hidden: int, width: int, experts: int, rng: np.random.Generator, capacity: int = 32
) -> float:
    """Least seconds from submit to join of a random fp16 program."""
    import tempfile

    import numpy as np

    from .converters import builder, package
    from .program import ExpertMatrices, Group, ProgramSpec

    spec = ProgramSpec(hidden, width, (Group(tuple(range(experts)), capacity),), weights="fp16")
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    matrices = ExpertMatrices(*(rng.standard_normal(s).astype(np.float32) / s[1] ** 0.5 for s in shapes))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "measured.mlpackage"
        package.write_package(builder.build_program(spec, lambda _: matrices), path, release=True)
        loaded = device.load(path, spec)

        def call() -> None:
            lease = device.lease(loaded)
            lease.inputs[0].host[:] = 1
            device.submit(lease).result().retire()

        call()
        return best_of(call)
