"""Preparing, and refusing what is damaged. Run: pytest tests/test_prepared.py"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import mlx_npumoe
import tiny_models
from mlx_npumoe import cache, loading, preparation
from mlx_npumoe.calibration import BLOCK, RoutingProfile, SiteProfile, sequences, up_shift
from mlx_npumoe.errors import PreparedError, UsageError
from mlx_npumoe.prepared import MANIFEST, PLAN, PROFILE, Prepared
from mlx_npumoe.programs import _rows_of
from mlx_npumoe.sites import find_sites
from prepared_models import Maker, prepare_all_hot


def _edit(folder: Path, change: Callable[[dict], None]) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(bytes(data))


def _weights(folder: Path) -> Path:
    return next(folder.rglob("weight.bin"))


def _exchange_programs(manifest: dict) -> None:
    a, b = manifest["sites"][:2]
    a["programs"], b["programs"] = b["programs"], a["programs"]


def _link_weights(folder: Path) -> None:
    weights = _weights(folder)
    weights.rename(folder.parent / "weights elsewhere")
    weights.symlink_to(folder.parent / "weights elsewhere")


def _link_program(folder: Path) -> None:
    program = sorted((folder / "programs").iterdir())[0]
    program.rename(folder.parent / "program elsewhere")
    program.symlink_to(folder.parent / "program elsewhere")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda f: (f / MANIFEST).unlink(), "not a Prepared folder"),
    "manifest is no JSON": (lambda f: (f / MANIFEST).write_text("{"), "not valid JSON"),
    "manifest is a list": (lambda f: (f / MANIFEST).write_text("[]"), "JSON object"),
    "newer schema": (lambda f: _edit(f, lambda m: m.update(schema_version=99)), "newer"),
    "no sites": (lambda f: _edit(f, lambda m: m.pop("sites")), "'sites'"),
    "a file that is a number": (lambda f: _edit(f, lambda m: m["files"].update({PLAN: 5})), "JSON object"),
    "profile not listed": (lambda f: _edit(f, lambda m: m["files"].pop(PROFILE)), "does not list"),
    "no dtypes": (lambda f: _edit(f, lambda m: m["sites"][0].update(dtypes=None)), "dtypes"),
    "bytes that are text": (lambda f: _edit(f, lambda m: m["sites"][0]["programs"][0].update(nbytes="x")), "nbytes"),
    "model that is a number": (lambda f: _edit(f, lambda m: m.update(model=7)), "'model'"),
    "a file nobody listed": (lambda f: (f / "programs" / "extra").write_text("x"), "does not list"),
    "a name no file can have": (
        lambda f: _edit(f, lambda m: m["files"].update({"a" * 5000: {"sha256": "x", "bytes": 0}})),
        "no file's name",
    ),
    "programs exchanged": (lambda f: _edit(f, _exchange_programs), "is not the program of"),
    "files without hashes": (lambda f: _edit(f, lambda m: m.update(files={})), "does not list"),
    "program bit flipped": (lambda f: _flip(_weights(f)), "hash does not match"),
    "program truncated": (lambda f: _weights(f).write_bytes(b"short"), "wrong size"),
    "program gone": (lambda f: shutil.rmtree(f / "programs"), "missing"),
    "plan bit flipped": (lambda f: _flip(f / PLAN), "hash does not match"),
    "profile gone": (lambda f: (f / PROFILE).unlink(), "missing"),
    "path out of the folder": (
        lambda f: _edit(f, lambda m: m["files"].update({"../stolen": {"sha256": "", "bytes": 0}})),
        "outside the folder",
    ),
    "absolute path": (
        lambda f: _edit(f, lambda m: m["files"].update({"/etc/hostname": {"sha256": "", "bytes": 0}})),
        "outside the folder",
    ),
    "empty": (lambda f: [shutil.rmtree(p) if p.is_dir() else p.unlink() for p in f.iterdir()], "not a Prepared folder"),
    "half copied": (lambda f: shutil.rmtree(sorted((f / "programs").iterdir())[-1]), "missing"),
    "an empty program": (lambda f: _weights(f).write_bytes(b""), "wrong size"),
    "a program that is a link": (_link_weights, "outside the folder"),
    "a link to a folder": (_link_program, "outside the folder"),
    "plan of another model": (lambda f: _edit(f, lambda m: m.update(fingerprint="0" * 64)), "another model"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_one_sentence(damage: str, tiny: Maker, tmp_path: Path) -> None:
    break_it, message = DAMAGES[damage]
    folder = tmp_path / "copy"
    shutil.copytree(tiny("mixtral").prepared.folder, folder)
    break_it(folder)
    with pytest.raises(PreparedError, match=message) as caught:
        Prepared.open(folder)
    assert "\n" not in str(caught.value)
    with pytest.raises(PreparedError):
        mlx_npumoe.load(str(tiny("mixtral").folder), prepared=folder)


def test_a_damaged_cached_folder_means_plain_mlx_and_one_line(
    tiny: Maker, private_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tiny("mixtral")
    (private_cache / "prepared").mkdir(parents=True)
    copy = shutil.copytree(made.prepared.folder, private_cache / "prepared" / "it")
    _flip(_weights(copy))
    model, _ = mlx_npumoe.load(str(made.folder))
    assert mlx_npumoe.engine(model) is None
    assert "hash does not match" in capsys.readouterr().err


def test_the_manifest_states_each_programs_error(tiny: Maker) -> None:
    for weights, low, high in (("fp16", 1e-4, 2e-3), ("int8", 3e-3, 3e-2)):
        for site in tiny("qwen3_moe", weights=weights).prepared.sites.values():
            assert site.error is not None and low < site.error["relative_l2"] < high
            assert site.program_bytes > 0


def test_prepare_goes_to_the_cache_of_the_fingerprint_and_replaces_what_stood_there(
    tiny: Maker, private_cache: Path
) -> None:
    made = tiny("mixtral")
    profile, plan = RoutingProfile.load(made.prepared.folder / PROFILE), made.prepared.plan
    first = preparation.prepare(str(made.folder), profile=profile, plan=plan, progress=False)
    assert first.folder == private_cache / "prepared" / first.fingerprint[:24]
    few = replace(
        plan, sites=(plan.sites[0], *(replace(s, spec=None, reason="test", min_chunk=0) for s in plan.sites[1:]))
    )
    again = preparation.prepare(str(made.folder), profile=profile, plan=few, progress=False)
    assert again.folder == first.folder
    assert [bool(s.programs) for s in Prepared.open(again.folder).sites.values()] == [True, False, False]
    assert [p.name for p in (private_cache / "prepared").iterdir()] == [first.folder.name]


def test_a_failing_prepare_leaves_nothing_and_keeps_what_was(
    tiny: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tiny("mixtral")
    out = tmp_path / "out"
    kept = shutil.copytree(made.prepared.folder, out)
    monkeypatch.setattr(preparation, "measure_error", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        preparation.prepare(str(made.folder), profile=kept / PROFILE, plan=kept / PLAN, out=out, progress=False)
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith("cache")] == ["out"]
    assert Prepared.open(out).fingerprint == made.prepared.fingerprint


def test_a_program_that_computes_something_else_is_not_kept(
    tiny: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tiny("mixtral")
    measured = preparation.measure_error
    calls: list[int] = []

    def second_is_wrong(*args: object) -> dict[str, float]:
        calls.append(1)
        error = measured(*args)  # type: ignore[arg-type]
        return {**error, "relative_l2": 0.5} if len(calls) == 2 else error

    monkeypatch.setattr(preparation, "measure_error", second_is_wrong)
    prepared = preparation.prepare(
        str(made.folder),
        profile=made.prepared.folder / PROFILE,
        plan=made.prepared.plan,
        out=tmp_path / "out",
        progress=False,
    )
    assert "layer 1 stays local" in capsys.readouterr().err
    with mlx_npumoe.attach(made.model, prepared) as engine:
        mx.eval(made.model(mx.arange(2, 66)[None]))
        assert [layer.counters.launches for layer in engine.report().layers] == [1, 0, 1]
        assert "differs from MLX" in (engine.report().layers[1].reason or "")


def test_given_a_profile_the_model_is_never_loaded(
    tiny: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tiny("qwen3_moe", 4)
    monkeypatch.setattr(loading, "load_whole", lambda *a, **k: pytest.fail("the model was loaded"))
    peak: list[int] = []
    real = preparation._prepare_site

    def watched(*args: object) -> object:
        entry = real(*args)  # type: ignore[arg-type]
        peak.append(mx.get_active_memory())
        return entry

    monkeypatch.setattr(preparation, "_prepare_site", watched)
    before = mx.get_active_memory()
    preparation.prepare(str(made.folder), profile=made.prepared.folder / PROFILE, out=tmp_path / "o", progress=False)
    site = next(iter(find_sites(made.model)))
    assert max(peak) - before < site.nbytes


def test_profiles_and_plans_of_other_models_are_refused(tiny: Maker, tmp_path: Path) -> None:
    other = tiny_models.save(tiny_models.build("mixtral", seed=3), tmp_path / "m", "mixtral")
    folder = tiny("mixtral").prepared.folder
    with pytest.raises(PreparedError, match="other experts"):
        preparation.prepare(str(other), profile=folder / PROFILE, out=tmp_path / "o", progress=False)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    "wrong", [{"tiers": "x"}, {"weights": "int2"}, {"layout": "x"}, {"body": "x"}, {"chunk": 0}, {"max_tokens": 0}]
)
def test_wrong_arguments_are_usage_errors(wrong: dict, tiny: Maker) -> None:
    with pytest.raises(UsageError):
        preparation.prepare(str(tiny("mixtral").folder), **wrong)


def test_arguments_that_contradict_the_plan_are_refused(tiny: Maker, tmp_path: Path) -> None:
    made = tiny("mixtral")
    with pytest.raises(UsageError, match="contradicts the plan"):
        preparation.prepare(str(made.folder), plan=made.prepared.plan, chunk=64, out=tmp_path / "o")


def test_without_offsets_one_site_is_in_memory_at_a_time(
    tiny: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tiny("qwen3_moe")
    monkeypatch.setattr("mlx_npumoe.weights._find", lambda *a: None)
    sizes: list[int] = []
    real = preparation._prepare_site

    def watched(*args: object) -> object:
        entry = real(*args)  # type: ignore[arg-type]
        sizes.append(mx.get_active_memory())
        return entry

    monkeypatch.setattr(preparation, "_prepare_site", watched)
    before = mx.get_active_memory()
    prepared = preparation.prepare(
        str(made.folder), profile=made.prepared.folder / PROFILE, out=tmp_path / "o", progress=False
    )
    site = next(iter(find_sites(made.model)))
    assert max(sizes) - before < 2 * site.nbytes
    assert prepared.fingerprint == made.prepared.fingerprint
    assert [s.full_sha256 for s in prepared.sites.values()] == [s.full_sha256 for s in made.prepared.sites.values()]


def test_checking_programs_compares_the_model_too(tiny: Maker, tmp_path: Path) -> None:
    made = tiny("mixtral")
    assert len(preparation.check_programs(made.prepared, progress=False)) == 3
    model = tiny_models.build("mixtral")
    experts = model.layers[1].block_sparse_moe.switch_mlp
    experts.up_proj.weight = experts.up_proj.weight * 1.001
    other = tiny_models.save(model, tmp_path / "m", "mixtral")
    with pytest.raises(PreparedError, match=r"layers\.1.*differ"):
        preparation.check_programs(made.prepared, str(other), progress=False)


def test_the_largest_row_is_among_those_a_program_is_compared_on() -> None:
    rows = np.arange(64, dtype=np.float16)[::-1, None].repeat(4, axis=1)
    chosen = np.zeros((64, 2), np.int32)
    assert _rows_of(0, rows, chosen, 32)[0, 0] == 63 and len(_rows_of(0, rows, chosen, 32)) == 16
    assert len(_rows_of(5, rows, chosen, 8)) == 8


def _rewrite_plan(folder: Path, change: Callable[[dict], None]) -> None:
    """Edit the plan and its hash in the manifest, as somebody who knows both would."""
    plan = json.loads((folder / PLAN).read_text())
    change(plan)
    (folder / PLAN).write_text(json.dumps(plan))
    digest = hashlib.sha256((folder / PLAN).read_bytes()).hexdigest()
    facts = {"sha256": digest, "bytes": (folder / PLAN).stat().st_size}
    _edit(folder, lambda m: m["files"].update({PLAN: facts}))


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s["groups"][0]["experts"].reverse(),
        lambda s: s.update(up_shift=3),
        lambda s: s.update(up_shift=2000),
        lambda s: s["groups"][0].update(experts=[0, 77]),
    ],
    ids=["order", "shift", "huge shift", "expert 77"],
)
def test_a_plan_that_does_not_fit_its_programs_is_refused(
    change: Callable[[dict], None], tiny: Maker, tmp_path: Path
) -> None:
    made = tiny("qwen3_moe")
    folder = shutil.copytree(made.prepared.folder, tmp_path / "copy")

    def edit(plan: dict) -> None:
        change(next(s["program"] for s in plan["sites"] if len(s["program"]["groups"][0]["experts"]) > 1))

    _rewrite_plan(folder, edit)
    with pytest.raises(PreparedError):
        mlx_npumoe.attach(made.model, folder)
    assert mlx_npumoe.engine(made.model) is None


def test_an_interrupted_replacement_keeps_the_old_folder(
    tiny: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tiny("mixtral")
    out = tmp_path / "out"
    shutil.copytree(made.prepared.folder, out)
    synced = cache._fsync

    def interrupted(path: Path) -> None:
        if path.name == PLAN:
            raise KeyboardInterrupt
        synced(path)

    monkeypatch.setattr(cache, "_fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        preparation.prepare(str(made.folder), profile=out / PROFILE, plan=made.prepared.plan, out=out, progress=False)
    assert Prepared.open(out).fingerprint == made.prepared.fingerprint
    (left,) = [p.name for p in tmp_path.iterdir() if p.name not in ("cache", "out")]
    assert left.startswith(".out.") and left.endswith(".part")  # for the next run to go on with


def test_programs_of_another_model_are_not_checked_silently(tiny: Maker) -> None:
    with pytest.raises(PreparedError, match="other expert layers"):
        preparation.check_programs(tiny("qwen3_moe").prepared, str(tiny("mixtral").folder), progress=False)


def test_a_plan_or_profile_without_the_models_layers_is_refused(tiny: Maker, tmp_path: Path) -> None:
    made = tiny("mixtral")
    profile = RoutingProfile.load(made.prepared.folder / PROFILE)
    del profile.sites[made.prepared.plan.sites[1].path]
    with pytest.raises(PreparedError, match="no rows of"):
        preparation.prepare(str(made.folder), profile=profile, plan=made.prepared.plan, out=tmp_path / "o")
    renamed = replace(made.prepared.plan, sites=tuple(replace(s, path="x") for s in made.prepared.plan.sites[:1]))
    with pytest.raises(PreparedError, match="not a layer"):
        preparation.prepare(str(made.folder), profile=made.prepared.folder / PROFILE, plan=renamed, out=tmp_path / "o")


def test_a_sound_folder_is_found_beside_a_damaged_one(tiny: Maker, private_cache: Path) -> None:
    made = tiny("mixtral")
    (private_cache / "prepared").mkdir(parents=True)
    _flip(_weights(shutil.copytree(made.prepared.folder, private_cache / "prepared" / "a")))
    shutil.copytree(made.prepared.folder, private_cache / "prepared" / "b")
    found = Prepared.find(made.model, find_sites(made.model))
    assert found is not None and found.folder.name == "b"


def test_out_is_never_an_unrelated_folder(tiny: Maker, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(UsageError, match="no Prepared folder"):
        preparation.prepare(str(tiny("mixtral").folder), out=tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize(("content", "message"), [(b"", "empty"), (b"\xff\xfe\x00", "UTF-8"), (None, "cannot be read")])
def test_unusable_texts_are_usage_errors(content: bytes | None, message: str, tiny: Maker, tmp_path: Path) -> None:
    file = tmp_path / "text"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        mlx_npumoe.calibrate(str(tiny("mixtral").folder), text=[file], progress=False)


def test_calibration_counts_every_pair_once(tiny: Maker, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("All work and no play makes Jack a dull boy. " * 30)
    profile = mlx_npumoe.calibrate(str(tiny("qwen3_moe").folder), text=[text], max_tokens=1000, sequence=300)
    assert profile.sites
    for site in profile.sites.values():
        assert site.tokens == 1000 and site.totals.sum() == 2000
        assert len(site.counts) == 3 * 2 and all(c.sum() == 2 * BLOCK for c in site.counts)
        assert len(site.rows) <= 64 and site.rows.shape[1] == 64
        assert np.abs(site.rows[0]).max() == pytest.approx(site.maxima["x"], rel=1e-3)


def test_a_profile_survives_the_disk_and_damage_is_one_sentence(tiny: Maker, tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    profile = RoutingProfile.load(tiny("mixtral").prepared.folder / PROFILE)
    profile.save(path)
    again = RoutingProfile.load(path)
    for a, b in zip(profile.sites.values(), again.sites.values(), strict=True):
        np.testing.assert_array_equal(np.array(a.counts), np.array(b.counts))
        assert (a.maxima, a.top_k, a.tokens) == (b.maxima, b.top_k, b.tokens)
    for content in (b"", b"junk" * 100, path.read_bytes()[:200]):
        (tmp_path / "bad.safetensors").write_bytes(content)
        with pytest.raises(PreparedError, match="not a routing profile"):
            RoutingProfile.load(tmp_path / "bad.safetensors")
    with pytest.raises(PreparedError, match="no routing profile"):
        RoutingProfile.load(tmp_path / "absent.safetensors")


def test_loads_of_a_chunk_are_sums_of_blocks() -> None:
    site = SiteProfile("s", 2, top_k=1, tokens=3 * BLOCK + 10)
    site.counts = [np.array([100, 28]), np.array([28, 100]), np.array([64, 64])]
    site.totals = np.array([200, 194])
    np.testing.assert_array_equal(site.loads(2 * BLOCK), [[128, 128], [92, 164]])
    np.testing.assert_allclose(site.loads(2 * BLOCK + 64).sum(axis=1), [320, 320])
    np.testing.assert_allclose(site.loads(1024).sum(), 1024)
    np.testing.assert_allclose(site.loads(32).sum(), 32)


def test_sequences_cut_and_limit() -> None:
    assert sequences(["abc", "de"], lambda s: [ord(c) for c in s], 2, 4) == [[97, 98], [99, 100]]


@pytest.mark.parametrize(("largest", "shift"), [(0.0, 0), (100.0, 0), (8192.0, 0), (8193.0, 1), (40000.0, 3), (1e6, 7)])
def test_up_is_scaled_to_stay_four_times_under_the_engines_limit(largest: float, shift: int) -> None:
    assert up_shift({"x": 9e9, "gate": 9e9, "up": 1.0, "product": largest, "down": 0.0}) == shift


def test_a_model_near_the_fp16_limit_is_shifted_and_exact(tmp_path: Path) -> None:
    model = tiny_models.build("mixtral")
    experts = model.layers[-1].block_sparse_moe.switch_mlp
    experts.up_proj.weight = experts.up_proj.weight * 4e4  # products of about 9e4: infinite in fp16
    folder = tiny_models.save(model, tmp_path / "m", "mixtral")
    prepared = prepare_all_hot(folder, tmp_path / "p")
    assert [s.spec is not None and s.spec.up_shift > 0 for s in prepared.plan.sites] == [False, False, True]
    from replay import per_token_error, run

    x = mx.array(np.random.default_rng(0).integers(2, 258, (1, 200)))
    stock = run(model, lambda: model(x))
    with mlx_npumoe.attach(model, prepared) as engine:
        replayed = run(model, lambda: model(x), stock)
        assert engine.report().totals.fallbacks == 0
    assert per_token_error(replayed.logits, stock.logits).max() < 2e-3
