"""Disks that are full or cannot be written. Run: pytest tests/test_faults.py

A limit on the size of files fails writes half way on any machine; where the machine allows a file system of our own,
the real thing is tried too.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mlx_npumoe.__main__ import run
from prepared_models import Maker


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writes beyond `size` bytes of a file fail meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def fails_in_one_sentence(size: int, capsys: pytest.CaptureFixture[str], command: str, *argv: str) -> str:
    with largest_file(size):
        code = run(command, argv)
    err = capsys.readouterr().err
    assert code == 1, err
    assert err.count("\n") == 1 and err.startswith(f"mlx_npumoe.{command}: error: "), err
    assert "Traceback" not in err and "unexpected" not in err, err
    return err


@pytest.mark.parametrize("size", [0, 500, 6_000, 60_000])  # the profile, the plan, a program, its weights
def test_prepare_that_cannot_write_leaves_nothing(
    size: int, tiny: Maker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tiny("mixtral")
    profile = str(made.prepared.folder / "profile.safetensors")
    plan = str(made.prepared.folder / "plan.json")
    what = ("--model", str(made.folder), "--profile", profile, "--plan", plan, "--out", str(tmp_path / "out"))
    fails_in_one_sentence(size, capsys, "prepare", *what, "--quiet")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", [0, 500])
def test_results_that_cannot_be_written_leave_what_was(
    size: int, tiny: Maker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tiny("mixtral")
    profile, plan = tmp_path / "p.safetensors", tmp_path / "plan.json"
    shutil.copy(made.prepared.folder / "profile.safetensors", profile)
    shutil.copy(made.prepared.folder / "plan.json", plan)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    model = ("--model", str(made.folder), "--quiet")
    fails_in_one_sentence(size, capsys, "calibrate", *model, "--max-tokens", "64", "--out", str(profile))
    fails_in_one_sentence(size, capsys, "plan", *model, "--profile", str(profile), "--out", str(plan))
    fails_in_one_sentence(
        size, capsys, "programs", "emit", *model, "--plan", str(plan), "--out", str(tmp_path / "programs")
    )
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


# Runs in a mount namespace of its own: $1 is the cache's place, the rest prepares a model.
_DISKS = """
set -u
cache=$1; shift
mount -t tmpfs -o size=150k tmpfs "$cache"
"$@"; echo "full: $?"
echo left: $(cd "$cache"; find . -type f)
mount -o remount,ro tmpfs "$cache"
"$@"; echo "read-only: $?"
echo left: $(cd "$cache"; find . -type f)
"""


def own_mounts() -> list[str]:
    """How to run a command with mounts of its own; empty where this machine does not allow it."""
    how = ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None:
        return []
    tried = subprocess.run([*how, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False)
    return how if tried.returncode == 0 else []


def test_a_full_and_a_read_only_disk(tiny: Maker, private_cache: Path, tmp_path: Path) -> None:
    how = own_mounts()
    if not how:
        pytest.skip("this machine gives no file system of our own")
    made = tiny("mixtral")
    private_cache.mkdir()
    command = [sys.executable, "-m", "mlx_npumoe", "prepare", "--model", str(made.folder), "--max-tokens", "128"]
    done = subprocess.run(
        [*how, "sh", "-c", _DISKS, "sh", str(private_cache), *command, "--quiet"],
        capture_output=True, text=True, check=False, env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    full, left, read_only, left_again = done.stdout.strip().split("\n")
    assert (full, read_only) == ("full: 1", "read-only: 1"), done
    assert re.fullmatch(r"left: ./profiles/[0-9a-f]+\.safetensors", left) and left == left_again  # whole, of use again
    sentences = done.stderr.strip().split("\n")
    assert len(sentences) == 2 and all(s.startswith("mlx_npumoe.prepare: error: ") for s in sentences), sentences
    assert "No space left on device" in sentences[0] and "Read-only file system" in sentences[1]
