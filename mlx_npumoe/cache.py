"""The cache folder, and how a file or a folder appears whole or not at all. Knows nothing about what is kept there."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

CACHE_VARIABLE = "MLX_NPUMOE_CACHE"
DEFAULT_CACHE = "~/.cache/mlx_npumoe"
STALE_SECONDS = 24 * 3600


def cache_root() -> Path:
    """The folder for everything we build and keep: `MLX_NPUMOE_CACHE`, else `~/.cache/mlx_npumoe`.

    Only names the folder; whoever writes creates it.
    """
    return Path(os.environ.get(CACHE_VARIABLE) or DEFAULT_CACHE).expanduser().absolute()


def publish(tmp: Path, final: Path) -> Path:
    """Make the finished folder `tmp` appear as `final` in one step, after its bytes have reached the disk.

    Both must be on one file system. If another process has published `final` meanwhile, its folder stands and
    `tmp` is removed.

    Raises:
        OSError: the folder cannot be synced or renamed; `tmp` is then still there.
    """
    sync(tmp)
    try:
        os.rename(tmp, final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        shutil.rmtree(tmp)
    _fsync(final.parent)
    return final


@contextmanager
def whole_file(final: Path | str) -> Iterator[Path]:
    """Give a temporary name beside `final` to write to; synced and renamed when the block ends, removed if it fails.

    Raises:
        OSError: the file cannot be synced or renamed.
    """
    final = Path(final)
    tmp = final.parent / f".{final.stem}.{uuid.uuid4().hex[:12]}{final.suffix}"
    try:
        yield tmp
        _fsync(tmp)
        os.replace(tmp, final)
    finally:
        tmp.unlink(missing_ok=True)


@contextmanager
def staged(final: Path, *, replace: bool = False) -> Iterator[Path]:
    """Give an empty folder beside `final` to write into; publish it when the block ends, remove it if the block fails.

    With `replace` it takes the place of a `final` that exists, which comes back if it cannot be published.

    Raises:
        OSError: the folder cannot be made or published.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    _sweep(final)
    tmp = final.parent / f".{final.name}.{uuid.uuid4().hex[:12]}.tmp"
    tmp.mkdir()
    try:
        yield tmp
        if replace:
            _exchange(tmp, final)
        else:
            publish(tmp, final)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


@contextmanager
def resumable(final: Path, key: str) -> Iterator[Path]:
    """As `staged` with `replace`, but a run that is interrupted or killed leaves its folder to the next one,
    for a day.

    The folder's name carries `key`, which has to tell apart all work that cannot be continued by other work. A run that
    fails leaves nothing, and neither does one that finds the folder in another run's hands: that one works apart.

    Raises:
        OSError: the folder cannot be made or published.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    _sweep(final)
    folder = final.parent / f".{final.name}.{key[:16]}.part"
    lock = final.parent / f".{final.name}.{key[:16]}.lock"
    with _opened(lock) as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.path.samestat(os.fstat(held.fileno()), lock.stat())  # not one its last owner has removed
        except OSError:
            mine = False
        if not mine:
            with staged(final, replace=True) as apart:
                yield apart
            return
        try:
            folder.mkdir(exist_ok=True)
            yield folder
            _exchange(folder, final)
        except Exception:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            lock.unlink(missing_ok=True)


def in_use(folder: Path) -> bool:
    """Whether a running process is at a folder that is not published yet."""
    if folder.suffix == ".part":
        lock = folder.with_suffix(".lock")
        if not lock.exists():
            return False
        with _opened(lock) as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return True
        return False
    return folder.suffix == ".tmp" and not _stale(folder)


def _opened(lock: Path) -> IO[str]:
    return open(lock, "a", encoding="utf-8")


def _exchange(tmp: Path, final: Path) -> None:
    """Publish `tmp` in place of what stands at `final`, which is away for no longer than two renames take."""
    sync(tmp)
    aside = final.parent / f".{final.name}.{uuid.uuid4().hex[:12]}.tmp"
    while tmp.exists():
        with suppress(FileNotFoundError):  # it is new, or another process is exchanging it, too
            os.rename(final, aside)
        try:
            os.rename(tmp, final)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        finally:
            if aside.exists() and not final.exists():
                os.rename(aside, final)
            shutil.rmtree(aside, ignore_errors=True)
    _fsync(final.parent)


def sync(folder: Path) -> None:
    """Have every file below `folder`, and the folder, reach the disk."""
    for path in [*folder.rglob("*"), folder]:
        _fsync(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sweep(final: Path) -> None:
    """Remove what killed processes left of `final` a day or more ago."""
    for tmp in [p for end in ("tmp", "part") for p in final.parent.glob(f".{final.name}.*.{end}")]:
        if _stale(tmp) and not in_use(tmp):
            shutil.rmtree(tmp, ignore_errors=True)


def _stale(folder: Path) -> bool:
    """Whether nothing in a folder was written for a day."""
    try:
        newest = max(path.stat().st_mtime for path in [folder, *folder.rglob("*")])
    except FileNotFoundError:  # its owner has just published or removed something
        return False
    return time.time() - newest > STALE_SECONDS
