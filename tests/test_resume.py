"""A prepare that is interrupted or killed goes on where it stopped. Run: pytest tests/test_resume.py"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlx_npumoe import cache, preparation, recording, unfinished
from mlx_npumoe.__main__ import run
from mlx_npumoe.prepared import PROFILE, Prepared
from prepared_models import Maker

SCRIPT = """
import sys, time
from mlx_npumoe import preparation, unfinished
made = preparation._prepare_site
def noted(weights, *rest):
    print("site", weights.site.path, flush=True)
    time.sleep(0.1)
    return made(weights, *rest)
preparation._prepare_site = noted
keep = unfinished.keep
def kept(folder, entry):
    keep(folder, entry)
    print("made", entry.path, flush=True)
unfinished.keep = kept
print("ready", flush=True)
model, profile, plan, out = sys.argv[1:]
preparation.prepare(model, profile=profile, plan=plan, out=out, progress=False)
print("done", flush=True)
"""


def _interrupted(monkeypatch: pytest.MonkeyPatch, at: int) -> list[str]:
    """Make `prepare` stop at its n-th site; the sites it makes are noted in the list."""
    made, sites = preparation._prepare_site, []

    def stopping(weights: object, *rest: object) -> object:
        sites.append(weights.site.path)  # type: ignore[attr-defined]
        if len(sites) == at:
            raise KeyboardInterrupt
        return made(weights, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(preparation, "_prepare_site", stopping)
    return sites


def test_finished_layers_are_not_made_again(tiny: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, out = tiny("mixtral"), tmp_path / "out"
    what = {"profile": made.prepared.folder / PROFILE, "plan": made.prepared.plan, "out": out, "progress": False}
    with monkeypatch.context() as patch:
        sites = _interrupted(patch, at=3)
        with pytest.raises(KeyboardInterrupt):
            preparation.prepare(str(made.folder), **what)
        assert len(sites) == 3 and not out.exists()
    with monkeypatch.context() as patch:
        sites = _interrupted(patch, at=99)
        prepared = preparation.prepare(str(made.folder), **what)
    assert sites == [made.prepared.plan.sites[2].path]
    assert prepared.sites == made.prepared.sites
    assert [p.name for p in tmp_path.iterdir() if p.name != "cache"] == ["out"]
    assert not (out / "finished").exists()
    Prepared.open(out)


def test_a_finished_layer_that_was_damaged_is_made_again(
    tiny: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, out = tiny("mixtral"), tmp_path / "out"
    what = {"profile": made.prepared.folder / PROFILE, "plan": made.prepared.plan, "out": out, "progress": False}
    with monkeypatch.context() as patch:
        _interrupted(patch, at=3)
        with pytest.raises(KeyboardInterrupt):
            preparation.prepare(str(made.folder), **what)
    (left,) = tmp_path.glob(".out.*.part")
    weights = sorted(left.rglob("weight.bin"))[0]
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0\0")
    with monkeypatch.context() as patch:
        sites = _interrupted(patch, at=99)
        prepared = preparation.prepare(str(made.folder), **what)
    assert len(sites) == 2
    assert prepared.sites == made.prepared.sites


def test_other_work_does_not_take_it_up(tiny: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, out = tiny("mixtral"), tmp_path / "out"
    with monkeypatch.context() as patch:
        _interrupted(patch, at=3)
        with pytest.raises(KeyboardInterrupt):
            preparation.prepare(
                str(made.folder), profile=made.prepared.folder / PROFILE, plan=made.prepared.plan, out=out
            )
    other = tiny("mixtral", weights="int8")
    with monkeypatch.context() as patch:
        sites = _interrupted(patch, at=99)
        preparation.prepare(str(made.folder), profile=made.prepared.folder / PROFILE, plan=other.prepared.plan, out=out)
    assert len(sites) == 3


@pytest.mark.parametrize("most", [4, pytest.param(30, marks=pytest.mark.soak)])
def test_killed_at_random_moments_nothing_is_half_written_and_every_layer_is_made_once(
    most: int, tiny: Maker, tmp_path: Path
) -> None:
    """Killed `most` times; a run that outlives the moment it was to be killed at is let through."""
    made, out = tiny("mixtral"), tmp_path / "out"
    plan = made.prepared.folder / "plan.json"
    command = [sys.executable, "-c", SCRIPT, str(made.folder), str(made.prepared.folder / PROFILE), str(plan), str(out)]
    chance, kills, done = random.Random(most), 0, 0
    made_before: set[str] = set()
    resumed = 0
    while kills < most:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        text = "".join(process.stdout.readline() for _ in range(chance.randint(1, 6)))  # ready, site, made, site, ...
        time.sleep(chance.random() * 0.4)
        process.kill()
        rest, err = process.communicate()
        text += rest
        assert err == ""
        lines = [line.split() for line in text.splitlines()]
        assert not {path for what, *rest in lines if what == "site" for path in rest} & made_before
        resumed += bool(made_before)
        made_before |= {path for what, *rest in lines if what == "made" for path in rest}
        if out.exists():
            done, made_before = done + 1, set()
            Prepared.open(out)
            assert Prepared.open(out).sites == made.prepared.sites
            for path in sorted(out.rglob("*"), reverse=True):
                path.unlink() if path.is_file() else path.rmdir()
            out.rmdir()
        kills += "done" not in text
    assert resumed > 0


def test_two_at_once_both_succeed(tiny: Maker, tmp_path: Path) -> None:
    made, out = tiny("mixtral"), tmp_path / "out"
    plan = made.prepared.folder / "plan.json"
    command = [sys.executable, "-c", SCRIPT, str(made.folder), str(made.prepared.folder / PROFILE), str(plan), str(out)]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in runs:
        text, err = process.communicate(timeout=120)
        assert process.returncode == 0 and text.endswith("done\n") and err == ""
    assert Prepared.open(out).sites == made.prepared.sites
    assert [p.name for p in tmp_path.iterdir() if p.name != "cache"] == ["out"]


def test_a_calibration_is_recorded_once(
    tiny: Maker, private_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tiny("mixtral").folder)
    what = {"text": None, "max_tokens": 256, "sequence": 128, "progress": False}
    first = recording.calibrated(folder, **what)
    with monkeypatch.context() as patch:
        patch.setattr(recording, "calibrate", lambda *a, **k: pytest.fail("recorded twice"))
        again = recording.calibrated(folder, **what)
        with pytest.raises(pytest.fail.Exception):
            recording.calibrated(folder, **{**what, "max_tokens": 128})
    assert "recorded before" in capsys.readouterr().err
    assert {p: s.maxima for p, s in first.sites.items()} == {p: s.maxima for p, s in again.sites.items()}
    (file,) = (private_cache / "profiles").iterdir()
    file.write_bytes(b"damaged")
    assert recording.calibrated(folder, **what).tokens == 256


def test_a_cache_that_cannot_be_written_is_one_sentence(
    tiny: Maker, private_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    private_cache.write_text("a file where a folder should be")
    assert run("prepare", ["--model", str(tiny("mixtral").folder), "--max-tokens", "128", "--quiet"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "unexpected" not in err and str(private_cache) in err


def test_a_run_stopped_before_the_last_rename_is_taken_up(
    tiny: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tiny("mixtral")
    out = shutil.copytree(made.prepared.folder, tmp_path / "out")
    what = {"profile": made.prepared.folder / PROFILE, "plan": made.prepared.plan, "out": out, "progress": False}
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_exchange", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            preparation.prepare(str(made.folder), **what)
    (left,) = tmp_path.glob(".out.*.part")
    (left / ".plan.123.json").write_text("half")
    with monkeypatch.context() as patch:
        sites = _interrupted(patch, at=99)
        preparation.prepare(str(made.folder), **what)
    assert sites == [] and Prepared.open(out).sites == made.prepared.sites


def test_layers_made_under_other_rules_are_made_again(
    tiny: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, out = tiny("mixtral"), tmp_path / "out"
    what = {"profile": made.prepared.folder / PROFILE, "plan": made.prepared.plan, "out": out, "progress": False}
    with monkeypatch.context() as patch:
        _interrupted(patch, at=3)
        with pytest.raises(KeyboardInterrupt):
            preparation.prepare(str(made.folder), **what)
    monkeypatch.setattr(unfinished, "TOLERANCE", {"fp16": 1e-9, "int8": 1e-9})
    sites = _interrupted(monkeypatch, at=99)
    preparation.prepare(str(made.folder), **what)
    assert len(sites) == 3


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    with cache.resumable(tmp_path / "out", "key") as first:
        assert cache.in_use(first)
        with cache.resumable(tmp_path / "out", "key") as second:
            assert second != first
    assert not cache.in_use(first) and not first.exists()


def test_remains_are_swept_after_a_day(tmp_path: Path) -> None:
    left = tmp_path / ".out.abc.part"
    left.mkdir()
    os.utime(left, (time.time() - 2 * cache.STALE_SECONDS,) * 2)
    with cache.resumable(tmp_path / "out", "key") as folder:
        (folder / "x").write_text("x")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
