"""Writes, measures and identifies saved programs (`.mlpackage` folders)."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from mlx_npumoe.errors import ProgramError
from mlx_npumoe.program import MAIN

from .mil import MODEL_FILE, SPEC_KEY, read_spec
from .toolkit import writing

SUFFIX = ".mlpackage"
MANIFEST = "Manifest.json"  # names its parts by random identifiers, so it differs at every save


def write_package(model: Any, path: Path | str, *, release: bool = False) -> Path:
    """Save a coremltools MLModel as `path` (`*.mlpackage`), replacing what is there; nothing is ever half-written.

    The package is written beside its place under a temporary name, flushed to disk and renamed; on failure the
    temporary is removed and an older package stays. `release` also removes the temporary copy coremltools keeps of
    every converted model until the process ends; the model object is of no use afterwards. Raises ProgramError.
    """
    path = Path(path)
    if path.suffix != SUFFIX:
        raise ProgramError(f"a program is saved as a {SUFFIX} folder, not as {path.name}")
    token = secrets.token_hex(4)
    fresh = path.with_name(f".{path.stem}.{token}.new{SUFFIX}")
    stale = path.with_name(f".{path.stem}.{token}.old{SUFFIX}")
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            model.save(str(fresh))
            model_file = fresh / MODEL_FILE
            model_file.write_bytes(read_spec(fresh).SerializeToString(deterministic=True))
            _flush(fresh)
            _swap(fresh, path, stale)
            _flush_folder(path.parent)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(stale, ignore_errors=True)
    if release and model.package_path:
        shutil.rmtree(model.package_path, ignore_errors=True)
    return path


def stored_spec(path: Path | str, function: str = MAIN) -> dict[str, Any]:
    """What a function of a package says it computes: `ProgramSpec.to_dict()`.

    Raises ProgramError where the package does not say, or has no such function.
    """
    stored = read_spec(Path(path)).description.metadata.userDefined.get(SPEC_KEY)
    try:
        said = dict(json.loads(stored or ""))
    except (ValueError, TypeError) as error:
        raise ProgramError(f"the program {path} does not say what it computes; prepare it again") from error
    functions = said.get("functions", {MAIN: said})
    if function not in functions:
        raise ProgramError(f"the program {path} has the functions {', '.join(functions)}, not {function}")
    return dict(functions[function])


def _swap(fresh: Path, path: Path, stale: Path) -> None:
    """Put `fresh` in the place of `path`; a folder with content cannot be renamed over, so the old one steps aside."""
    replaced = path.exists()
    if replaced:
        path.rename(stale)
    try:
        fresh.rename(path)
    except OSError:
        if replaced:
            stale.rename(path)
        raise


def _flush(folder: Path) -> None:
    for item in sorted(folder.rglob("*")):
        if item.is_file():
            with item.open("rb") as file:
                os.fsync(file.fileno())
        else:
            _flush_folder(item)
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def package_bytes(path: Path | str) -> int:
    """Bytes of all files of a saved package."""
    return sum(item.stat().st_size for item in Path(path).rglob("*") if item.is_file())


def content_sha256(path: Path | str) -> str:
    """SHA-256 over the files of a saved package, names included, without the manifest's random identifiers.

    Two packages of one program have one hash whatever wrote the protocol buffer's fields in which order. Raises
    ProgramError where the package is missing or damaged.
    """
    root = Path(path)
    digest = hashlib.sha256()
    spec = read_spec(root).SerializeToString(deterministic=True)
    for item in sorted(p for p in root.rglob("*") if p.is_file()):
        name = item.relative_to(root).as_posix()
        if name == MANIFEST:
            continue
        size = len(spec) if name == MODEL_FILE else item.stat().st_size
        digest.update(f"{name}\0{size}\0".encode())
        if name == MODEL_FILE:
            digest.update(spec)
            continue
        with item.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
