"""Emits one site's program and compares it with MLX. Sits between converters, the interpreter and expert weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np

from .converters import builder, lint
from .converters import package as packages
from .devices.interpreter import InterpreterDevice
from .errors import ProgramError
from .program import ExpertMatrices, ProgramSpec

CHECK_ROWS = 16  # rows an expert gets in the comparison
TOLERANCE = {"fp16": 0.01, "int8": 0.05}  # relative L2 of the worst expert


Experts = Callable[[int], ExpertMatrices]


def emit_program(spec: ProgramSpec, experts: Experts, package: Path) -> int:
    """Build, lint and write a program; its size in bytes. Raises ProgramError where a rule is broken."""
    program = builder.build_program(spec, experts)
    lint.check(program, spec)
    packages.write_package(program, package)
    return packages.package_bytes(package)


def measure_error(package: Path, spec: ProgramSpec, experts: Experts, magnitude: float) -> dict[str, float]:
    """Run a saved program on random rows and compare each expert with MLX in float32 on the experts' own weights.

    Args:
        magnitude: largest magnitude of the rows, as calibration saw it.

    Returns:
        `relative_l2`: of the worst expert; `relative_l2_mean`: over experts; `max_abs`: largest difference.
    """
    rng = np.random.default_rng(0)
    rows = min(CHECK_ROWS, min(spec.capacities))
    device = InterpreterDevice()
    try:
        lease = device.lease(device.load(package, spec))
        inputs = []
        for surface, group in zip(lease.inputs, spec.groups, strict=True):
            x = rng.standard_normal((len(group.experts), spec.hidden, rows)) * max(magnitude, 1e-3) / 4
            x = x.astype(np.float16)
            surface.host[:] = 0
            surface.host.reshape(len(group.experts), spec.hidden, group.capacity)[:, :, :rows] = x
            inputs.append(x)
        done = device.submit(lease).result()
        errors, largest = [], 0.0
        for surface, group, x in zip(done.outputs, spec.groups, inputs, strict=True):
            y = surface.host.reshape(len(group.experts), spec.hidden, group.capacity)[:, :, :rows]
            for g, expert in enumerate(group.experts):
                want = _reference(experts(expert), x[g].T.astype(np.float32))
                got = y[g].T.astype(np.float32) * 2.0**spec.up_shift
                errors.append(float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)))
                largest = max(largest, float(np.abs(got - want).max()))
        lease.retire()
    finally:
        device.close()
    return {"relative_l2": max(errors), "relative_l2_mean": float(np.mean(errors)), "max_abs": largest}


def require_accuracy(error: dict[str, float], spec: ProgramSpec, where: str) -> None:
    """Raises ProgramError where a program is further from MLX than its weight format explains."""
    limit = TOLERANCE[spec.weights]
    if not error["relative_l2"] <= limit:
        raise ProgramError(
            f"The {spec.weights} program of {where} differs from MLX by {error['relative_l2']:.3g} (limit {limit:g}); "
            "prepare with --weights fp16, or report this model."
        )


def _reference(m: ExpertMatrices, x: np.ndarray) -> np.ndarray:
    """One expert in float32 by MLX: `(n, D)` to `(n, D)`."""
    rows, gate, up, down = (mx.array(a) for a in (x, m.gate, m.up, m.down))
    hidden = rows @ gate.T
    hidden = hidden * mx.sigmoid(hidden) * (rows @ up.T)
    return np.array(hidden @ down.T)
