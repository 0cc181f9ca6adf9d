"""`mlx_npumoe.doctor`: what works on this machine, what is off, and why. Each line is tried, not assumed."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..errors import NpumoeError
from ..progress import note
from . import parse, parser


@dataclass(frozen=True)
class Finding:
    """One check: `ok`, `off` (works without it) or `failed`."""

    what: str
    state: str
    detail: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command: exit code 1 where something failed."""
    made = parser("doctor", "Show what works on this machine, what is off, and why.")
    made.add_argument("--measure", action="store_true", help="Measure this machine and keep the figures for planning.")
    args = parse(made, argv)
    findings = [_tried(what, check) for what, check in CHECKS.items()]
    if args.measure:
        note("Measuring, about a minute ...")
        findings.append(_tried("measured profile", _measure))
    if args.json:
        print(json.dumps([asdict(f) for f in findings], indent=2))
    else:
        for f in findings:
            print(f"{f.state:>6}  {f.what:<18} {f.detail}")
    return int(any(f.state == "failed" for f in findings))


def _tried(what: str, check: Callable[[], tuple[str, str]]) -> Finding:
    try:
        return Finding(what, *check())
    except (NpumoeError, OSError, ImportError, RuntimeError, ValueError) as e:
        return Finding(what, "failed", str(e))


def _packages() -> tuple[str, str]:
    names = ("mlx_npumoe", "mlx", "mlx-lm", "coremltools", "numpy", "huggingface-hub", "threadpoolctl")
    missing, found = [], []
    for name in names:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        return "failed", f"missing: {', '.join(missing)}; install mlx_npumoe again"
    return "ok", ", ".join(found)


def _system() -> tuple[str, str]:
    from ..machine import chip

    system = f"{platform.system()} {platform.release()}"
    return "ok", f"{system}, {chip()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def _memory() -> tuple[str, str]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return "ok", f"{total / 2**30:.1f} GiB"


def _mlx() -> tuple[str, str]:
    import mlx.core as mx

    value = mx.sum(mx.ones((4, 4)) @ mx.ones((4, 4))).item()
    if value != 64:
        return "failed", f"MLX computes wrong numbers on {mx.default_device()}"
    if not mx.metal.is_available():
        return "ok", f"{mx.default_device()} (no Metal: half-precision models are widened to float32, and run slowly)"
    return "ok", f"{mx.default_device()}"


def _interpreter() -> tuple[str, str]:
    """Emit a small program, run it, compare it with MLX."""
    import numpy as np

    from ..program import ExpertMatrices, Group, ProgramSpec
    from ..programs import TOLERANCE, emit_program, measure_error, random_rows

    rng = np.random.default_rng(0)
    spec = ProgramSpec(64, 96, (Group((0, 1), 32),), weights="int8")
    shapes = ((96, 64), (96, 64), (64, 96))
    experts = [ExpertMatrices(*(rng.standard_normal(s).astype(np.float32) / 8 for s in shapes)) for _ in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "doctor.mlpackage"
        emit_program(spec, experts.__getitem__, package)
        error = measure_error(package, spec, experts.__getitem__, *random_rows(spec.hidden))["relative_l2"]
    state = "ok" if error < TOLERANCE[spec.weights] else "failed"
    return state, f"an int8 program was emitted, linted and run; it differs from MLX by {error:.2g} (relative L2)"


def _neural_engine() -> tuple[str, str]:
    if sys.platform != "darwin":
        return "off", "needs macOS on Apple silicon; programs run on the interpreter here"
    return "off", "this version emits programs for the Neural Engine but does not run them there yet"


def _cache() -> tuple[str, str]:
    from ..cache import cache_root
    from ..prepared import cached_folders

    root = cache_root()
    existing = next(p for p in (root, *root.parents) if p.exists())
    if not os.access(existing, os.W_OK):
        return "failed", f"{existing} is read-only; set MLX_NPUMOE_CACHE to a folder that can be written"
    return "ok", f"{root}, {len(list(cached_folders()))} prepared models"


def _profile() -> tuple[str, str]:
    from ..machine import device_profile

    profile = device_profile()
    hint = "" if profile.kind == "measured" else "; `mlx_npumoe.doctor --measure` replaces it"
    return "ok", f"{profile.name} on {profile.chip} ({profile.kind}){hint}"


def _measure() -> tuple[str, str]:
    from ..machine import measure, measured_path

    profile = measure()
    measured_path().parent.mkdir(parents=True, exist_ok=True)
    profile.save(measured_path())
    device, local = profile.device_rate, profile.local_rate
    return "ok", (
        f"device {max(device.gflops):.0f} GFLOP/s, launch {profile.launch_s.value * 1e3:.2f} ms; MLX experts "
        f"{max(local.gflops):.1f} GFLOP/s; kept in {measured_path()}"
    )


CHECKS: dict[str, Callable[[], tuple[str, str]]] = {
    "packages": _packages,
    "system": _system,
    "memory": _memory,
    "MLX": _mlx,
    "interpreter": _interpreter,
    "Neural Engine": _neural_engine,
    "cache": _cache,
    "device profile": _profile,
}
