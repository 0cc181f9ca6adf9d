# python -m pytest tests/test_lint.py
"""Lint passes what we build and names every rule a program breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expert_programs import mil_program, random_expert, saved, tiny_spec
from mlx_npumoe.converters.builder import build_program
from mlx_npumoe.converters.lint import DEFAULT_LIMITS, check, lint
from mlx_npumoe.errors import ProgramError
from mlx_npumoe.program import WEIGHT_FORMATS, Group

X = (1, 64, 1, 32)


def relu(mb: Any, x: Any) -> Any:
    return mb.relu(x=x, name="y0")


def wide_constant(mb: Any, x: Any) -> Any:
    bias = mb.const(val=np.ones((1, 64, 1, 32), np.float32), name="bias")
    return mb.cast(x=mb.add(x=mb.cast(x=x, dtype="fp32"), y=bias), dtype="fp16", name="y0")


def slice_from(begin: list[int]) -> Callable[[Any, Any], Any]:
    return lambda mb, x: mb.slice_by_index(x=x, begin=begin, end=[1, 64, 1, 64], stride=[1, 1, 1, 1], name="cut")


def many_branches(mb: Any, x: Any) -> Any:
    return mb.concat(values=[mb.relu(x=x) for _ in range(9)], axis=1, name="meet")


OFFENDERS: dict[str, tuple[str, str, Callable[..., Any], tuple[int, ...]]] = {
    "height": ("spatial", "x0", relu, (1, 1, 16416, 32)),
    "width": ("spatial", "x0", relu, (1, 8, 1, 16416)),
    "channels": ("channels", "x0", relu, (1, 65568, 1, 32)),
    "surface rows": ("surface", "x0", relu, (1, 16448, 1, 32)),
    "columns": ("columns", "x0", relu, (1, 64, 1, 40)),
    "last-axis split": (
        "last-axis", "cut", lambda mb, x: mb.split(x=x, num_splits=2, axis=3, name="cut"), (1, 64, 1, 64),
    ),
    "negative split axis": (
        "last-axis", "cut", lambda mb, x: mb.split(x=x, num_splits=2, axis=-1, name="cut"), (1, 64, 1, 64),
    ),
    "last-axis slice": ("last-axis", "cut", slice_from([0, 0, 0, 32]), (1, 64, 1, 64)),
    "float32 constant": ("float32", "bias", wide_constant, X),
    "unknown operation": ("operation", "y0", lambda mb, x: mb.topk(x=x, k=32, axis=1, name="y0"), X),
    "branches": ("branches", "meet", many_branches, X),
}  # fmt: skip


@pytest.mark.parametrize("name", OFFENDERS)
def test_offending_programs_are_found(name: str) -> None:
    rule, where, body, shape = OFFENDERS[name]
    findings = [f for f in lint(mil_program(body, shape)) if f.rule == rule]
    assert where in [f.where.removesuffix("_0") for f in findings]
    for finding in findings:
        assert finding.what and finding.fix and finding.where in str(finding)


def test_rank_is_limited() -> None:
    def body(mb: Any, x: Any) -> Any:
        return mb.reshape(x=mb.reshape(x=x, shape=(1, 8, 8, 1, 32), name="many"), shape=X, name="y0")

    model = mil_program(body, X)
    assert lint(model) == []
    block = model._spec.mlProgram.functions["main"].block_specializations["CoreML6"]
    many = next(op for op in block.operations if op.outputs[0].name == "many").outputs[0]
    many.type.tensorType.dimensions.add().constant.size = 1  # coremltools itself refuses to build rank 6
    many.type.tensorType.rank = 6
    assert [(f.rule, f.where) for f in lint(model)] == [("rank", "many")]


def test_slices_of_other_axes_are_fine() -> None:
    assert lint(mil_program(slice_from([0, 32, 0, 0]), (1, 64, 1, 64))) == []


def test_float32_ports_and_tensors_are_found() -> None:
    found = {f.where for f in lint(mil_program(relu, X, dtype="fp32")) if f.rule == "float32"}
    assert {"x0", "y0"} <= found


def test_flexible_and_empty_shapes_are_found() -> None:
    model = mil_program(relu, X)
    shape = model.get_spec().description.input[0].type.multiArrayType
    assert shape.WhichOneof("ShapeFlexibility") is None
    spec = model._spec
    sizes = spec.description.input[0].type.multiArrayType.shapeRange.sizeRanges
    for size in X:
        sizes.add(lowerBound=size, upperBound=64)
    dimension = spec.mlProgram.functions["main"].inputs[0].type.tensorType.dimensions
    dimension[3].unknown.variadic = False
    dimension[1].constant.size = 0
    rules = {f.rule for f in lint(model)}
    assert {"static", "empty"} <= rules


def test_weight_bytes_are_limited() -> None:
    model = build_program(tiny_spec(), random_expert)
    assert not lint(model)
    assert [f.rule for f in lint(model, limits=replace(DEFAULT_LIMITS, weight_bytes=1000))] == ["weights"]


def test_what_we_build_is_clean(tmp_path: Path) -> None:
    for weights in WEIGHT_FORMATS:
        spec = tiny_spec((tuple(range(8)), 64), ((9,), 32), weights=weights)
        path = saved(spec, tmp_path / f"{weights}.mlpackage")
        assert lint(path, spec) == []
        check(path, spec)


def test_our_own_capacities_are_checked() -> None:
    with pytest.raises(ProgramError, match=r"x1.*40 elements.*up to 64"):
        check(build_program(tiny_spec(((1,), 32), ((2,), 40)), random_expert))


def test_ports_have_to_be_those_of_the_spec(tmp_path: Path) -> None:
    spec = tiny_spec()
    path = saved(spec, tmp_path / "p.mlpackage")
    other = replace(spec, groups=(*spec.groups[:1], Group((7,), 96), Group((8,), 32)))
    assert {f.where for f in lint(path, other)} == {"x1", "y1", "x2", "y2"}
    assert {f.rule for f in lint(path, other)} == {"ports"}


def test_weights_have_to_be_in_the_format_of_the_spec(tmp_path: Path) -> None:
    for weights in WEIGHT_FORMATS:
        spec = tiny_spec(weights=weights)
        path = saved(spec, tmp_path / f"{weights}.mlpackage")
        assert lint(path, spec) == []
        other = WEIGHT_FORMATS[WEIGHT_FORMATS.index(weights) - 1]
        findings = lint(path, replace(spec, weights=other))
        assert {f.rule for f in findings} == {"format"} and len(findings) == 9


def blockwise(scale: Any, offset: Any) -> Callable[[Any, Any], Any]:
    def body(mb: Any, x: Any) -> Any:
        from coremltools.converters.mil.mil import types

        codes = (np.arange(64 * 64) % 16).reshape(64, 64, 1, 1).astype(types.np_uint4_dtype)
        parts = (np.full((64, 2, 1, 1), 0.5, scale), np.full((64, 2, 1, 1), 7.5, offset))
        weight = mb.constexpr_blockwise_shift_scale(data=codes, scale=parts[0], offset=parts[1], name="w")
        if scale == np.float32:
            weight = mb.cast(x=weight, dtype="fp16")
        return mb.conv(x=x, weight=weight, name="y0")

    return body


def test_offsets_of_blocks_may_be_float32_and_nothing_else() -> None:
    assert lint(mil_program(blockwise(np.float16, np.float32), X, target="iOS18")) == []
    found = lint(mil_program(blockwise(np.float32, np.float16), X, target="iOS18"))
    assert {(f.rule, f.where) for f in found} == {("float32", "w")}


def test_something_else_is_not_a_program(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match="cannot read"):
        lint(tmp_path)
