"""A prepare that is interrupted or killed goes on where it stopped. Run: pytest tests/test_resume.py"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlx_npumoe import cache, preparation, recording
from mlx_npumoe.prepared import PROFILE, Prepared
from prepared_models import Maker

SCRIPT = """
import sys
from mlx_npumoe import preparation
made = preparation._prepare_site
def noted(weights, *rest):
    print("site", weights.site.path, flush=True)
    return made(weights, *rest)
preparation._prepare_site = noted
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
    begun: list[str] = []
    while kills < most:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(chance.random() * 1.2)
        process.kill()
        text, err = process.communicate()
        assert err == ""
        begun += [line for line in text.splitlines() if line.startswith("site")]
        if "done" in text:
            done += 1
            Prepared.open(out)
            assert Prepared.open(out).sites == made.prepared.sites
            for path in sorted(out.rglob("*"), reverse=True):
                path.unlink() if path.is_file() else path.rmdir()
            out.rmdir()
        else:
            kills += 1
            assert not out.exists() or Prepared.open(out)
    # A layer is begun again only where the kill hit it.
    assert len(begun) <= 3 * (done + 1) + kills


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


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_cache_that_cannot_be_written_is_one_sentence(tiny: Maker, private_cache: Path) -> None:
    private_cache.mkdir()
    private_cache.chmod(0o500)
    with pytest.raises(OSError):
        preparation.prepare(str(tiny("mixtral").folder), max_tokens=128, progress=False)


def test_remains_are_swept_after_a_day(tmp_path: Path) -> None:
    left = tmp_path / ".out.abc.part"
    left.mkdir()
    os.utime(left, (time.time() - 2 * cache.STALE_SECONDS,) * 2)
    with cache.resumable(tmp_path / "out", "key") as folder:
        (folder / "x").write_text("x")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
