"""Tiny experts and programs for the tests of converters and devices, with a float64 reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mlx_npumoe.converters.builder import build_program
from mlx_npumoe.converters.package import write_package
from mlx_npumoe.converters.toolkit import coremltools, no_progress_bars
from mlx_npumoe.program import ExpertMatrices, Group, ProgramSpec

HIDDEN, WIDTH = 64, 48
Experts = Callable[[int], ExpertMatrices]


def random_expert(expert: int, hidden: int = HIDDEN, width: int = WIDTH) -> ExpertMatrices:
    """Float32 matrices that depend on the expert's number only."""
    rng = np.random.default_rng(expert)

    def draw(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    return ExpertMatrices(draw(width, hidden), draw(width, hidden), draw(hidden, width))


def exact_expert(expert: int) -> ExpertMatrices:
    """Weights that are the same numbers on every machine."""

    def grid(rows: int, columns: int) -> np.ndarray:
        flat = (np.arange(rows * columns, dtype=np.float32) * 7 + expert) % 31 - 15
        return (flat / 64).reshape(rows, columns)

    return ExpertMatrices(grid(32, 64), grid(32, 64), grid(64, 32))


def tiny_spec(*groups: tuple[tuple[int, ...], int], **options: Any) -> ProgramSpec:
    """A spec of `((experts), capacity)` groups; two groups of different capacity unless given."""
    made = tuple(Group(*g) for g in groups or (((3, 1), 32), ((7,), 64)))
    return ProgramSpec(HIDDEN, WIDTH, made, **options)


def saved(spec: ProgramSpec, path: Path, experts: Experts = random_expert) -> Path:
    """The program of `spec`, built and written."""
    return write_package(build_program(spec, experts), path, release=True)


def reference(spec: ProgramSpec, group: int, x: np.ndarray, expert_of: Experts = random_expert) -> np.ndarray:
    """Output `(G*D, C)` of a group in float64, before `up_shift` is undone."""
    parts = []
    for g, expert in enumerate(spec.groups[group].experts):
        matrices = expert_of(expert).astype(np.float64)
        part = x[g * spec.hidden : (g + 1) * spec.hidden].astype(np.float64)  # (D, C)
        parts.append(matrices.rows(np, spec.activation, part.T)[-1].T * 2.0**-spec.up_shift)
    return np.concatenate(parts)


def relative_error(got: np.ndarray, wanted: np.ndarray) -> float:
    """L2 of the difference over L2 of what is wanted."""
    return float(np.linalg.norm(got.astype(np.float64) - wanted) / np.linalg.norm(wanted))


def mil_program(
    body: Callable[..., Any], *shapes: tuple[int, ...], dtype: str = "fp16", target: str = "iOS16", passes: bool = False
) -> Any:
    """An MLModel of any MIL function `body(mb, x0, x1, ...)`, for programs our builder would never make."""
    ct = coremltools()
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import Function, Program, types

    opset = getattr(ct.target, target)
    ports = {f"x{i}": mb.TensorSpec(shape=s, dtype=getattr(types, dtype)) for i, s in enumerate(shapes)}
    program = Program()
    with Function(ports, opset_version=opset) as function:
        results = body(mb, *function.inputs.values())
        function.set_outputs(list(results) if isinstance(results, list | tuple) else [results])
    program.add_function("main", function)
    with no_progress_bars():
        return ct.convert(
            program,
            convert_to="mlprogram",
            minimum_deployment_target=opset,
            pass_pipeline=ct.PassPipeline.DEFAULT if passes else ct.PassPipeline.EMPTY,
            skip_model_load=True,
        )
