"""Emits a site's programs and compares them with MLX. Sits between converters, the interpreter and expert weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from .converters import builder, lint
from .converters import package as packages
from .devices.interpreter import InterpreterDevice
from .errors import ProgramError
from .program import ExpertMatrices, ProgramSpec, WeightFormat

CHECK_ROWS = 16  # rows an expert gets in the comparison
TOLERANCE: dict[WeightFormat, float] = {  # relative L2 of the worst expert
    "fp16": 0.01, "int8": 0.05, "lut8": 0.05, "lut6": 0.15, "lut4": 0.4, "int4": 0.3,
}  # fmt: skip


Experts = Callable[[int], ExpertMatrices]


def emit_program(spec: ProgramSpec, experts: Experts, package: Path) -> int:
    """Build, lint and write a program; its size in bytes. Raises ProgramError where a rule is broken."""
    program = builder.build_program(spec, experts)
    lint.check(program, spec)
    packages.write_package(program, package, release=True)
    return packages.package_bytes(package)


def measure_error(
    package: Path, spec: ProgramSpec, experts: Experts, rows: np.ndarray, chosen: np.ndarray
) -> dict[str, float]:
    """Run a saved program on real rows and compare each expert with MLX in float32 on the experts' own weights.

    Args:
        rows: `(N, D)` inputs calibration has seen, the largest first.
        chosen: `(N, K)` their experts. An expert computes rows that were routed to it, or, where none of them was, the
            last ones.

    Returns:
        `relative_l2`: of the worst expert; `relative_l2_mean`: over experts; `max_abs`: largest difference.
    """
    device = InterpreterDevice()
    try:
        lease = device.lease(device.load(package, spec))
        inputs = {e: _rows_of(e, rows, chosen, c) for e, c in zip(spec.experts, spec.capacities, strict=True)}
        for surface, port in zip(lease.inputs, spec.ports, strict=True):
            block = np.zeros((len(port.experts), spec.hidden, port.capacity), np.float16)
            for g, expert in enumerate(port.experts):
                block[g, :, : len(inputs[expert])] = inputs[expert].T
            surface.host[:] = block.reshape(surface.host.shape)
        done = device.submit(lease).result()
        errors, largest = [], 0.0
        for surface, port in zip(done.outputs, spec.ports, strict=True):
            y = surface.host.reshape(len(port.experts), spec.hidden, port.capacity)
            for g, expert in enumerate(port.experts):
                want = np.array(experts(expert).rows(mx, spec.activation, mx.array(inputs[expert]))[-1])
                got = y[g, :, : len(want)].T.astype(np.float32) * 2.0**spec.up_shift
                errors.append(float(np.linalg.norm(got - want)) / max(float(np.linalg.norm(want)), 1e-30))
                largest = max(largest, float(np.abs(got - want).max()))
        lease.retire()
    finally:
        device.close()
    return {"relative_l2": max(errors), "relative_l2_mean": float(np.mean(errors)), "max_abs": largest}


def together(errors: Sequence[dict[str, float]], experts: Sequence[int]) -> dict[str, float]:
    """The errors of a site's programs, which hold that many experts each, as one."""
    means = [error["relative_l2_mean"] for error in errors]
    return {
        "relative_l2": max(error["relative_l2"] for error in errors),
        "relative_l2_mean": float(np.average(means, weights=experts)),
        "max_abs": max(error["max_abs"] for error in errors),
    }


def _rows_of(expert: int, rows: np.ndarray, chosen: np.ndarray, capacity: int) -> np.ndarray:
    """Up to CHECK_ROWS rows for one expert, float32 `(n, D)`."""
    mine = rows[(chosen == expert).any(axis=1)]
    return (mine if len(mine) else rows[1:] if len(rows) > 1 else rows)[: min(CHECK_ROWS, capacity)].astype(np.float32)


def random_rows(hidden: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and experts for `measure_error` where no calibration is at hand: normal, of magnitude about 4."""
    rows = np.random.default_rng(0).standard_normal((CHECK_ROWS, hidden)).astype(np.float16)
    return rows, np.full((CHECK_ROWS, 1), -1)


def require_accuracy(error: dict[str, float], spec: ProgramSpec, where: str) -> None:
    """Raises ProgramError where a program is further from MLX than its weight format explains."""
    limit = TOLERANCE[spec.weights]
    if not error["relative_l2"] <= limit:
        raise ProgramError(
            f"The {spec.weights} program of {where} differs from MLX by {error['relative_l2']:.3g} (limit {limit:g}); "
            "prepare with --weights fp16, or report this model."
        )
