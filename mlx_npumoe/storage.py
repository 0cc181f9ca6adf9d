"""What lies in the cache folder: Prepared folders, demo models, remains of killed runs. Lists, verifies, deletes."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from .cache import cache_root
from .errors import PreparedError
from .prepared import Prepared, prepared_root


@dataclass(frozen=True)
class Stored:
    """One folder of the cache. `model` is where it came from, None where that cannot be read."""

    kind: str  # prepared, demo or leftover
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
    """Every folder whose name or model contains `pattern`, in the order of their paths."""
    found = []
    for kind, root in (("prepared", prepared_root()), ("demo", cache_root() / "demo")):
        for path in sorted(root.iterdir()) if root.is_dir() else []:
            if path.is_dir():
                found.append(_describe("leftover" if path.name.startswith(".") else kind, path))
    return [s for s in found if pattern in s.name or pattern in (s.model or "")]


def fault(entry: Stored) -> str | None:
    """What is wrong with a Prepared folder, every file compared with its hash; None where it is sound.

    Demo models have no hashes and are not judged; remains of killed runs are what they are called.
    """
    if entry.kind == "leftover":
        return "left by a run that was killed; delete it once no other run is at it"
    if entry.kind == "prepared":
        try:
            Prepared.open(entry.path)
        except PreparedError as e:
            return str(e)
    return None


def delete(entry: Stored) -> None:
    """Remove a folder. Raises OSError where the disk says no."""
    shutil.rmtree(entry.path)


def _describe(kind: str, path: Path) -> Stored:
    files = [p for p in path.rglob("*") if p.is_file()]
    model = None
    if kind == "prepared":
        try:
            model = Prepared.open(path, verify=False).model
        except PreparedError:
            model = None
    return Stored(
        kind=kind,
        name=path.name,
        path=path,
        nbytes=sum(p.stat().st_size for p in files),
        files=len(files),
        modified=path.stat().st_mtime,
        model=model if kind != "demo" else f"demo:{path.name}",
    )
