"""What lies in the cache: Prepared folders, demo models, calibrations, this machine's figures, remains of runs."""

from __future__ import annotations

import errno
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .cache import cache_root, in_use
from .calibration import RoutingProfile
from .errors import PreparedError
from .machine import measured_path
from .planning.device_profile import load_profile
from .prepared import MANIFEST, Prepared, prepared_root
from .recording import profiles_root
from .records import read


@dataclass(frozen=True)
class Stored:
    """One entry of the cache. `model` is where it came from, None where that cannot be read."""

    kind: str  # prepared, demo, profile, device or leftover
    name: str
    path: Path
    nbytes: int
    files: int
    modified: float  # seconds since the epoch
    model: str | None

    @property
    def age(self) -> str:
        """How long ago it was written, in words as short as mlx-lm's."""
        seconds = max(time.time() - self.modified, 0)
        for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
            if seconds >= 2 * size:
                return f"{int(seconds // size)} {unit} ago"
        return "just now"


def stored(pattern: str = "") -> list[Stored]:
    """Everything in the cache whose name or model contains `pattern`, in the order of kinds and paths."""
    found = []
    for kind, root in (("prepared", prepared_root()), ("demo", cache_root() / "demo"), ("profile", profiles_root())):
        for path in sorted(root.iterdir()) if root.is_dir() else []:
            if path.suffix != ".lock":
                found.append(_describe("leftover" if path.name.startswith(".") else kind, path))
    if measured_path().is_file():
        found.append(_describe("device", measured_path()))
    return [s for s in found if pattern in s.name or pattern in (s.model or "")]


def fault(entry: Stored) -> str | None:
    """What is wrong with an entry, a Prepared folder's files compared with their hashes; None where nothing is.

    Demo models have no hashes and are not judged.
    """
    try:
        if entry.kind == "leftover":
            return (
                "in use" if in_use(entry.path) else "left by a run that was stopped; the same prepare goes on with it"
            )
        if entry.kind == "prepared":
            Prepared.open(entry.path)
        elif entry.kind == "profile":
            RoutingProfile.load(entry.path)
        elif entry.kind == "device":
            load_profile(entry.path)
    except PreparedError as e:
        return str(e)
    return None


def delete(entry: Stored) -> None:
    """Remove an entry; of a link, the link alone. Raises OSError where the disk says no or a run is at it."""
    if entry.kind == "leftover" and in_use(entry.path):
        raise OSError(errno.EBUSY, "a run is at it", str(entry.path))
    if entry.path.is_dir() and not entry.path.is_symlink():
        shutil.rmtree(entry.path)
    else:
        entry.path.unlink()
    entry.path.with_suffix(".lock").unlink(missing_ok=True) if entry.path.suffix == ".part" else None


def _describe(kind: str, path: Path) -> Stored:
    sizes = []
    for file in [path] if path.is_file() else list(path.rglob("*")):
        with suppress(FileNotFoundError):  # a run that is at it has moved it
            if file.is_file():
                sizes.append(file.stat().st_size)
    model = f"demo:{path.name}" if kind == "demo" else None
    if kind == "prepared":
        with suppress(PreparedError):
            model = read(path / MANIFEST, "manifest", "").text("model")
    elif kind == "profile":
        with suppress(PreparedError):
            model = RoutingProfile.load(path).model_type
    return Stored(kind, path.name, path, sum(sizes), len(sizes), path.lstat().st_mtime, model)
