"""What a prepare that was interrupted had finished: site by site, taken up by the next run of the same work."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from .cache import whole_file
from .converters.package import content_sha256
from .errors import PreparedError, ProgramError
from .planning.plan import Plan
from .prepared import FINISHED, MANIFEST, PROGRAMS, SCHEMA, PreparedSite, prepared_site
from .programs import CHECK_ROWS, TOLERANCE
from .records import read


def versions() -> dict[str, str]:
    """Of every package that has a say in what a Prepared folder holds."""
    return {p: version(p) for p in ("mlx_npumoe", "mlx", "mlx-lm", "coremltools", "numpy")}


def work_key(fingerprint: str, plan: Plan, profile: Path) -> str:
    """Tells apart work that cannot be continued by other work: model, plan, profile, versions, what is accepted."""
    rules = [SCHEMA, CHECK_ROWS, TOLERANCE, versions()]
    digest = hashlib.sha256(f"{fingerprint}\n{plan.to_json()}\n{json.dumps(rules, sort_keys=True)}\n".encode())
    digest.update(profile.read_bytes())
    return digest.hexdigest()


def sweep(folder: Path) -> None:
    """Remove what a killed run was writing, and its manifest: only finished layers are taken up."""
    (folder / MANIFEST).unlink(missing_ok=True)
    for place in (folder, folder / PROGRAMS, folder / FINISHED):
        for remains in place.glob(".*"):
            if remains.is_dir():
                shutil.rmtree(remains)
            else:
                remains.unlink()


def keep(folder: Path, entry: PreparedSite) -> None:
    """Note that a site is finished, its programs in place."""
    (folder / FINISHED).mkdir(exist_ok=True)
    hashes = {p.path: content_sha256(folder / p.path) for p in entry.programs}
    with whole_file(folder / FINISHED / f"{entry.path}.json") as file:
        file.write_text(json.dumps({**asdict(entry), "sha256": hashes}))


def finished(folder: Path, path: str, full_sha256: str) -> PreparedSite | None:
    """A site finished by an earlier run, if its experts and its programs are what they were then."""
    file = folder / FINISHED / f"{path}.json"
    if not file.is_file():
        return None
    try:
        record = read(file, "note of a finished layer", "it is made again")
        entry = prepared_site(record)
        if entry.full_sha256 != full_sha256:
            return None
        hashes = record.record("sha256")
        if any(content_sha256(folder / p.path) != hashes.text(p.path) for p in entry.programs):
            return None
    except (PreparedError, ProgramError, OSError):
        return None
    return entry


def forget(folder: Path) -> None:
    """Remove the notes: the folder is whole."""
    shutil.rmtree(folder / FINISHED, ignore_errors=True)
