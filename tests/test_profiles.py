"""Routing profiles: gate mass, overlap, the model's own text, recording in use. Run: pytest tests/test_profiles.py"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten

import families
import mlx_npumoe
from mlx_npumoe.calibration import BLOCK, SAMPLES, RoutingProfile, SiteProfile, overlaps
from mlx_npumoe.commands import calibrate, generate
from mlx_npumoe.errors import ModelError, PreparedError, UsageError
from mlx_npumoe.own_text import own_text, writes_itself
from mlx_npumoe.preparation import plan_for
from mlx_npumoe.prepared import PROFILE
from mlx_npumoe.recording import calibrated, record
from mlx_npumoe.sites import find_sites
from mlx_npumoe.tensors import site_weights
from mlx_npumoe.usage import UseRecorder
from prepared_models import Maker
from replay import run

PROMPT = "Sphinx of black quartz, judge my vow. " * 9  # over two blocks


def tokens(length: int, batch: int = 1) -> mx.array:
    return mx.array(np.random.default_rng([length, batch]).integers(2, 258, (batch, length)))


def profile_of(totals: list[list[int]], fingerprint: str = "f") -> RoutingProfile:
    sites = {
        f"layers.{i}": SiteProfile(f"layers.{i}", len(t), 2, 256, totals=np.array(t)) for i, t in enumerate(totals)
    }
    return RoutingProfile(fingerprint, "mixtral", "a text", "prefill", 256, sites)


# --- gate mass -------------------------------------------------------------------------------------------


def test_gate_mass_is_the_sum_of_the_routers_weights(tmp_path: Path) -> None:
    model = families.build("mixtral")
    x = tokens(200)
    watched = run(model, lambda: model(x))
    sites = record(model, x.tolist(), progress=False)
    for chosen, logits, site in zip(watched.chosen, watched.routers, sites.values(), strict=True):
        assert logits is not None and site.gate_mass is not None
        scores = np.exp(np.take_along_axis(logits.astype(np.float64), chosen, 1))
        gates = scores / scores.sum(1, keepdims=True)
        want = np.bincount(chosen.ravel(), gates.ravel(), minlength=8)
        np.testing.assert_allclose(site.gate_mass, want, rtol=1e-4)
        assert site.gate_mass.sum() == pytest.approx(200, rel=1e-5) and site.gates_reason is None
    saved = RoutingProfile("f", "mixtral", "t", "prefill", 200, sites)
    saved.save(tmp_path / "p.safetensors")
    for path, site in RoutingProfile.load(tmp_path / "p.safetensors").sites.items():
        np.testing.assert_allclose(site.gate_mass, sites[path].gate_mass, rtol=1e-6)


def test_a_family_whose_gates_are_not_seen_has_no_mass_and_the_reason(tmp_path: Path) -> None:
    model = families.build("llama4")
    sites = record(model, tokens(40).tolist(), progress=False)
    RoutingProfile("f", "llama4", "t", "prefill", 40, sites).save(tmp_path / "p.safetensors")
    for site in RoutingProfile.load(tmp_path / "p.safetensors").sites.values():
        assert site.gate_mass is None and "do not weigh" in str(site.gates_reason)
        assert site.totals.sum() == 40


def test_a_profile_of_the_schema_before_is_refused_in_one_sentence(tiny: Maker, tmp_path: Path) -> None:
    stored = tiny("mixtral").prepared.folder / PROFILE
    arrays, metadata = mx.load(str(stored), return_metadata=True)
    header = json.loads(metadata["profile"]) | {"schema": 1}
    old = {name: a for name, a in arrays.items() if not name.endswith("gate_mass")}
    assert len(old) < len(arrays)
    mx.save_safetensors(str(tmp_path / "old.safetensors"), old, {"profile": json.dumps(header)})
    with pytest.raises(PreparedError, match=r"schema 1, this version reads schema 2; make a new one") as caught:
        RoutingProfile.load(tmp_path / "old.safetensors")
    assert str(caught.value).count("\n") == 0


# --- overlap ---------------------------------------------------------------------------------------------


def test_overlap_of_hand_made_profiles() -> None:
    a = profile_of([[9, 8, 7, 6, 0, 0], [1, 1, 1, 1, 1, 1]])
    b = profile_of([[9, 0, 7, 0, 8, 6], [0, 0, 5, 5, 1, 1]])
    assert overlaps(a, b, 1) == {"layers.0": 1.0, "layers.1": 0.0}
    assert overlaps(a, b, 2) == {"layers.0": 0.5, "layers.1": 0.0}  # ties go by number: 0, 1 against 2, 3
    assert overlaps(a, b, 4) == {"layers.0": 0.5, "layers.1": 0.5}
    assert set(overlaps(a, b, 6).values()) == set(overlaps(a, a, 3).values()) == {1.0}
    for k in (0, 7):
        with pytest.raises(UsageError, match="1 to 6"):
            overlaps(a, b, k)
    for other in (profile_of([[1, 2, 3, 4, 5, 6]]), profile_of([[9, 0, 7, 0, 8, 6], [0, 0, 5, 5, 1, 1]], "g")):
        with pytest.raises(PreparedError, match="different models"):
            overlaps(a, other, 2)


def test_profiles_are_compared_by_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(tmp_path / f"{n}.safetensors") for n in "ab"]
    for file, totals in zip(
        files, ([[9, 8, 7, 6, 5, 0], [6, 5, 4, 3, 2, 1]], [[0, 8, 9, 6, 7, 5], [6, 5, 4, 3, 2, 1]]), strict=True
    ):
        profile_of(totals).save(Path(file))
    assert calibrate.main(["--compare", *files, "--top", "2", "4", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["layers"] == {"layers.0": {"2": 0.5, "4": 0.75}, "layers.1": {"2": 1.0, "4": 1.0}}
    assert shown["overlap"]["4"] == {"mean": 0.875, "median": 0.875}
    assert calibrate.main(["--compare", *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["layer", "top", "4"] and lines[2].split() == ["layers.0", "75.0%"]
    assert lines[-2].split() == ["mean", "87.5%"]
    for wrong in (
        ["--compare", *files, "--model", "x"],
        ["--compare", *files, "--top", "9"],
        [],
        ["--model", "x", "--top", "2"],
    ):
        with pytest.raises(UsageError):
            calibrate.main(wrong)


# --- the model's own text --------------------------------------------------------------------------------


def test_a_model_writes_the_same_text_again(tiny: Maker) -> None:
    model, tokenizer = mlx_npumoe.load(str(tiny("mixtral").folder), prepared=None)
    texts = [own_text(model, tokenizer, 150, 64, seed=seed, progress=False) for seed in (0, 0, 1)]
    assert [len(s) for s in texts[0]] == [64, 64, 22]
    assert texts[0] == texts[1] != texts[2]
    assert len({t for s in texts[0] for t in s}) > 40  # sampled, not repeated
    assert (
        writes_itself("self") and writes_itself(["self"]) and not writes_itself(["./self"]) and not writes_itself(None)
    )


def test_calibrating_on_own_text(tiny: Maker, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tiny("mixtral").folder)
    out = str(tmp_path / "p.safetensors")
    argv = ["--model", model, "--text", "self", "--max-tokens", "140", "--out", out]
    assert calibrate.main(argv) == 0
    assert "140 tokens of self" in capsys.readouterr().out
    profile = RoutingProfile.load(Path(out))
    assert profile.source == "self" and profile.tokens == 140
    options: Any = {"max_tokens": 140, "sequence": 512, "progress": False}
    first = calibrated(model, text="self", **options)
    assert "recorded before" not in capsys.readouterr().err
    again, other = calibrated(model, text=["self"], **options), calibrated(model, text="self", seed=1, **options)
    assert capsys.readouterr().err.count("recorded before") == 1
    path = next(iter(first.sites))
    np.testing.assert_array_equal(first.sites[path].totals, again.sites[path].totals)
    np.testing.assert_array_equal(first.sites[path].totals, profile.sites[path].totals)
    assert (first.sites[path].totals != other.sites[path].totals).any()


# --- recorded in use -------------------------------------------------------------------------------------


def test_use_is_recorded_and_changes_no_output(tiny: Maker, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made, file = tiny("mixtral"), tmp_path / "use.safetensors"
    for prepared in ("none", str(made.prepared.folder)):
        argv = ["--model", str(made.folder), "--prepared", prepared, "--prompt", PROMPT, "--max-tokens", "20"]
        argv += ["--json", "--temp", "0"]
        assert generate.main(argv) == 0
        want = json.loads(capsys.readouterr().out)
        assert generate.main([*argv, "--record-routing", str(file)]) == 0
        out, err = capsys.readouterr()
        got = json.loads(out)
        assert got["text"] == want["text"] and "holds the routing of" in err
        assert got["report"]["totals"]["launches"] == want["report"]["totals"]["launches"]
        seen = RoutingProfile.load(file)
    prompt = got["prompt_tokens"]
    assert 2 * (prompt + 18) <= seen.tokens <= 2 * (prompt + 20)
    assert seen.source == seen.phase == "use"
    assert [p.name for p in tmp_path.iterdir() if p.name != "cache"] == ["use.safetensors"]
    model = made.model
    assert [type(m).__name__ for _, m in model.named_modules() if "Routed" in type(m).__name__] == []
    for site in seen.sites.values():
        assert site.totals.sum() == 2 * site.tokens and len(site.counts) == 2 * ((prompt + 19) // BLOCK)
        assert site.gate_mass is not None and site.gate_mass.sum() == pytest.approx(site.tokens, rel=1e-4)
        assert 0 < len(site.rows) <= SAMPLES and all(value > 0 for value in site.maxima.values())
        assert np.abs(site.rows).max() == np.abs(site.rows[0]).max() == pytest.approx(site.maxima["x"])
    sites = [w.site for w in site_weights(str(made.folder))[1]]
    assert len(plan_for(seen, sites, chunk=128, hot="all", min_chunk=32).hot_sites) == 3


def test_logits_are_bit_identical_and_counts_are_the_routers(tiny: Maker, tmp_path: Path) -> None:
    made = tiny("qwen3_moe")
    model, _ = mlx_lm.load(str(made.folder))
    x, step = tokens(150), tokens(1)
    want, after = model(x), model(step)
    stock = record(model, x.tolist(), progress=False)
    before = [type(m) for _, m in model.named_modules()]
    with pytest.raises(ModelError, match="path_or_repo"):
        mlx_npumoe.RoutingLog(model, tmp_path / "p.safetensors")
    with mlx_npumoe.RoutingLog(model, tmp_path / "p.safetensors", path_or_repo=str(made.folder)) as log:
        assert mx.array_equal(model(x), want)
        for _ in range(3):
            assert mx.array_equal(model(step), after)
        assert log.missed == 0
    assert [type(m) for _, m in model.named_modules()] == before and mlx_npumoe.engine(model) is None
    paths = [p for p, _ in tree_flatten(model.parameters())]
    assert paths == [p for p, _ in tree_flatten(made.model.parameters())]
    seen = RoutingProfile.load(tmp_path / "p.safetensors")
    assert seen.fingerprint == made.prepared.fingerprint
    for path, site in seen.sites.items():
        assert site.tokens == 153
        steps = site.totals - stock[path].totals
        assert steps.sum() == 6 and set(steps[steps > 0]) == {3}
        np.testing.assert_array_equal(site.counts[0], stock[path].counts[0])
        np.testing.assert_allclose(
            site.maxima["x"], stock[path].maxima["x"], rtol=1e-6
        )  # the largest row is among the samples


def test_use_of_padded_batches_counts_no_padding(tiny: Maker, tmp_path: Path) -> None:
    made = tiny("mixtral")
    model, tokenizer = mlx_npumoe.load(str(made.folder), prepared=None)
    prompts = [tokens(90).tolist()[0], tokens(50).tolist()[0]]
    with mlx_npumoe.RoutingLog(model, tmp_path / "p.safetensors"):
        mlx_npumoe.batch_generate(model, tokenizer, prompts, max_tokens=2)
    seen = RoutingProfile.load(tmp_path / "p.safetensors")
    assert 140 <= seen.tokens <= 140 + 2 * 2 and all(s.totals.sum() == 2 * s.tokens for s in seen.sites.values())


def test_a_file_of_another_model_is_refused_before_anything_runs(
    tiny: Maker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.safetensors"
    shutil.copy(tiny("qwen3_moe").prepared.folder / PROFILE, other)
    content = other.read_bytes()
    argv = ["--model", str(tiny("mixtral").folder), "--prompt", "x", "--prepared", "none"]
    with pytest.raises(PreparedError, match="other experts"):
        generate.main([*argv, "--record-routing", str(other)])
    assert other.read_bytes() == content and capsys.readouterr().out == ""
    other.write_bytes(b"nothing")
    with pytest.raises(PreparedError, match="not a routing profile"):
        generate.main([*argv, "--record-routing", str(other)])


def test_use_is_added_to_a_calibration(tiny: Maker, tmp_path: Path) -> None:
    made, file = tiny("mixtral"), tmp_path / "p.safetensors"
    shutil.copy(made.prepared.folder / PROFILE, file)
    stored = RoutingProfile.load(file)
    model, tokenizer = mlx_npumoe.load(str(made.folder), prepared=made.prepared, progress=False)
    with mlx_npumoe.RoutingLog(model, file):
        mlx_npumoe.generate(model, tokenizer, PROMPT, max_tokens=4)
    both = RoutingProfile.load(file)
    assert both.source == "shipped corpus, use" and both.phase == "prefill and decode"
    for path, site in both.sites.items():
        old = stored.sites[path]
        assert site.tokens > old.tokens and (site.totals >= old.totals).all() and len(site.rows) <= SAMPLES
        assert len(site.counts) > len(old.counts) and site.maxima["down"] >= old.maxima["down"]
        assert site.gate_mass is not None and site.gate_mass.sum() == pytest.approx(site.tokens, rel=1e-4)


def test_nothing_used_writes_nothing(tiny: Maker, tmp_path: Path) -> None:
    model, _ = mlx_npumoe.load(str(tiny("mixtral").folder), prepared=None)
    log = mlx_npumoe.RoutingLog(model, tmp_path / "p.safetensors")
    assert log.close() is None and log.close() is None
    assert not (tmp_path / "p.safetensors").exists()


def test_traced_calls_are_missed_and_counted(tiny: Maker, tmp_path: Path) -> None:
    model, _ = mlx_npumoe.load(str(tiny("mixtral").folder), prepared=None)
    want = mx.compile(model.__call__)(tokens(40))
    with mlx_npumoe.RoutingLog(model, tmp_path / "p.safetensors") as log:
        assert mx.array_equal(mx.compile(model.__call__)(tokens(40)), want)
        assert log.missed == 3


def test_a_recorder_keeps_a_fair_sample_and_whole_blocks() -> None:
    site = next(iter(find_sites(families.build("mixtral"))))
    recorder = UseRecorder(site)
    random = np.random.default_rng(0)
    total = np.zeros(8, int)
    for n in (1, 1, 100, 1, 300, 2):
        x, chosen = random.normal(size=(n, 4)).astype(np.float32), random.integers(0, 8, (n, 2))
        x[0, 0] = 50 + n if n == 100 else x[0, 0]
        total += np.bincount(chosen.ravel(), minlength=8)
        recorder.note(mx.array(x), mx.array(chosen), None)
    profile = recorder.finish()
    assert profile.tokens == 405 and len(profile.counts) == 3 and profile.rows.shape == (SAMPLES, 4)
    np.testing.assert_array_equal(profile.totals, total)
    assert profile.rows[0, 0] == 150 and profile.gate_mass is None
