# python -m pytest tests/test_converters.py
"""Programs come out as planned, the same every time, and whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_programs import HIDDEN, WIDTH, exact_expert, random_expert, saved, tiny_spec
from mlx_npumoe.activations import Activation
from mlx_npumoe.converters import formats, package
from mlx_npumoe.converters.builder import build_program
from mlx_npumoe.converters.mil import describe, load_graph
from mlx_npumoe.errors import ProgramError
from mlx_npumoe.program import ExpertMatrices, Group, ProgramSpec

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("weights", ["fp16", "int8"])
def test_emitted_program_is_the_golden_one(tmp_path: Path, weights: str) -> None:
    """Delete the file in tests/golden and run again to accept a change."""
    spec = ProgramSpec(64, 32, (Group((2, 5), 32), Group((0,), 64)), weights=weights, up_shift=1)  # type: ignore[arg-type]
    text = describe(load_graph(saved(spec, tmp_path / "p.mlpackage", exact_expert)))
    golden = GOLDEN / f"program-{weights}.txt"
    if not golden.exists():
        golden.write_text(text)
        pytest.fail(f"{golden.name} did not exist and was written: look at it and run again")
    assert text == golden.read_text()


def test_same_spec_gives_the_same_package_in_another_process(tmp_path: Path) -> None:
    spec = tiny_spec(weights="int8")
    first = saved(spec, tmp_path / "a.mlpackage")
    script = (
        "import sys; from pathlib import Path; from expert_programs import *;"
        "saved(tiny_spec(weights='int8'), Path(sys.argv[1]))"
    )
    second = tmp_path / "b.mlpackage"
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        [sys.executable, "-c", script, str(second)], env=environment, check=True, capture_output=True, text=True
    )
    assert done.stdout == done.stderr == ""  # importing and converting stay quiet
    assert package.content_sha256(first) == package.content_sha256(second)
    files = sorted(p.relative_to(first) for p in first.rglob("*") if p.is_file())
    assert files == sorted(p.relative_to(second) for p in second.rglob("*") if p.is_file())
    for name in files:
        if name.name != package.MANIFEST:
            assert (first / name).read_bytes() == (second / name).read_bytes()


def test_hash_follows_weights_and_names(tmp_path: Path) -> None:
    one = package.content_sha256(saved(tiny_spec(), tmp_path / "a.mlpackage"))
    other = package.content_sha256(saved(tiny_spec(), tmp_path / "b.mlpackage", lambda e: random_expert(e + 1)))
    assert one != other


def test_int8_weights_stay_int8_on_disk(tmp_path: Path) -> None:
    spec = tiny_spec(((0, 1), 32))
    parameters = 3 * HIDDEN * WIDTH * 2
    small = load_graph(saved(spec, tmp_path / "a.mlpackage")).weight_bytes
    large = load_graph(saved(tiny_spec(((0, 1), 32), weights="fp16"), tmp_path / "b.mlpackage")).weight_bytes
    assert parameters < small < 1.1 * parameters
    assert 2 * parameters <= large < 2.1 * parameters
    assert (tmp_path / "a.mlpackage" / "Data/com.apple.CoreML/weights/weight.bin").stat().st_size < 1.3 * parameters


def test_runs_from_macos_13() -> None:
    for weights in formats.EMITTERS:
        assert build_program(tiny_spec(weights=weights), random_expert).get_spec().specificationVersion == 7
        assert formats.lowest_macos(weights) == "13.0"


def test_experts_are_asked_for_once_and_in_slot_order() -> None:
    asked: list[int] = []

    def experts(expert: int) -> ExpertMatrices:
        asked.append(expert)
        return random_expert(expert)

    build_program(tiny_spec(((5, 2), 32), ((9,), 64)), experts)
    assert asked == [5, 2, 9]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (tiny_spec((tuple(range(9)), 32)), "at most 8"),
        (tiny_spec(((1,), 32), ((1,), 64)), "more than one slot"),
        (tiny_spec(((), 32)), "no experts"),
        (tiny_spec(((1,), 0)), "no capacity"),
        (tiny_spec(activation=Activation("gelu")), "activation"),
        (tiny_spec(body="woven"), "body"),
        (tiny_spec(layout="rows"), "layout"),
        (tiny_spec(layout="groups"), "a program of its own"),
        (ProgramSpec(HIDDEN, 40000, (Group((0, 1), 32),), body="grouped"), "groups of 1 or fewer"),
        (tiny_spec(weights="lut4"), "weight format"),
        (ProgramSpec(HIDDEN, WIDTH, ()), "at least one group"),
    ],
)
def test_specs_that_cannot_be_built_are_refused(spec: ProgramSpec, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        build_program(spec, random_expert)


@pytest.mark.parametrize("weights", ["fp16", "int8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e6])
def test_weights_out_of_range_are_refused(weights: str, bad: float) -> None:
    def experts(expert: int) -> ExpertMatrices:
        matrices = random_expert(expert)
        matrices.up[3, 4] = bad
        return matrices

    if weights == "int8" and bad == 1e6:
        bad = 1e8
    with pytest.raises(ProgramError, match="up"):
        build_program(tiny_spec(weights=weights), experts)


def test_matrices_of_the_wrong_shape_are_refused() -> None:
    with pytest.raises(ProgramError, match="gate of expert 3"):
        build_program(tiny_spec(), lambda e: random_expert(e, HIDDEN, WIDTH + 1))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(1e-6, 10.0))
def test_int8_error_is_at_most_half_a_step(seed: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    matrix = (rng.standard_normal((5, 40)) * spread).astype(np.float32)
    matrix[2] = 0
    values, scale = formats.quantize_int8(matrix, "w")
    step = scale.astype(np.float64)[:, None]
    assert (np.abs(values * step - matrix) <= step * 0.5000001).all()
    assert np.abs(values.astype(int)).max() <= formats.INT8_MAX and not values[2].any()


def test_package_replaces_an_older_one(tmp_path: Path) -> None:
    path = saved(tiny_spec(), tmp_path / "p.mlpackage")
    (path / "left over").write_text("from before")
    before = package.package_bytes(path)
    saved(tiny_spec(), path)
    assert not (path / "left over").exists()
    assert package.package_bytes(path) < before
    assert [p.name for p in tmp_path.iterdir()] == ["p.mlpackage"]


def test_failed_write_leaves_nothing_and_keeps_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tiny_spec(), tmp_path / "p.mlpackage")
    before = package.content_sha256(path)
    model = build_program(tiny_spec(), lambda e: random_expert(e + 1))

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    for step in ("_flush", "_swap"):
        with monkeypatch.context() as patch, pytest.raises(ProgramError, match="no space left"):
            patch.setattr(package, step, full)
            package.write_package(model, path)
        assert [p.name for p in tmp_path.iterdir()] == ["p.mlpackage"]
        assert package.content_sha256(path) == before


def test_released_models_leave_no_temporary_copy(tmp_path: Path) -> None:
    model = build_program(tiny_spec(), random_expert)
    package.write_package(model, tmp_path / "p.mlpackage", release=True)
    assert not Path(model.package_path).exists()


def test_damaged_packages_are_refused_with_a_reason(tmp_path: Path) -> None:
    path = saved(tiny_spec(), tmp_path / "p.mlpackage")
    with pytest.raises(ProgramError, match="cannot read"):
        load_graph(tmp_path / "missing.mlpackage")
    weights = path / "Data/com.apple.CoreML/weights/weight.bin"
    weights.write_bytes(weights.read_bytes()[:1000])
    graph = load_graph(path)
    with pytest.raises(ProgramError, match="damaged"):
        describe(graph)
    (path / "Data/com.apple.CoreML/model.mlmodel").write_bytes(b"\xff\x00nonsense")
    with pytest.raises(ProgramError, match=r"cannot read|not an ML Program"):
        load_graph(path)


def test_constants_are_read_as_coremltools_reads_them(tmp_path: Path) -> None:
    from coremltools.libmilstoragepython import _BlobStorageReader as Reader

    path = saved(tiny_spec(weights="fp16"), tmp_path / "p.mlpackage")
    reader = Reader(str(path / "Data/com.apple.CoreML/weights/weight.bin"))
    blobs = [c for op in load_graph(path).operations for c in op.constants.values() if c.file is not None]
    assert len(blobs) == 9
    for constant in blobs:
        theirs = np.asarray(reader.read_fp16_data(constant.offset)).view(np.uint16).reshape(-1)
        np.testing.assert_array_equal(constant.array().view(np.uint16).reshape(-1), theirs)
