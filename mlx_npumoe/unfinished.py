"""What a prepare that was interrupted had finished: site by site, taken up by the next run of the same work."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict
from pathlib import Path

from .cache import whole_file
from .converters.package import content_sha256
from .errors import PreparedError, ProgramError
from .planning.plan import Plan
from .prepared import PreparedSite, prepared_site
from .records import read

FINISHED = "finished"  # folder of one small file a site, inside the unfinished Prepared folder


def work_key(fingerprint: str, plan: Plan, profile: Path) -> str:
    """Tells apart work that cannot be continued by other work: model, plan, profile."""
    digest = hashlib.sha256(f"{fingerprint}\n{plan.to_json()}\n".encode())
    digest.update(profile.read_bytes())
    return digest.hexdigest()


def keep(folder: Path, entry: PreparedSite) -> None:
    """Note that a site is finished, its program in place."""
    (folder / FINISHED).mkdir(exist_ok=True)
    program = content_sha256(folder / entry.program) if entry.program else None
    with whole_file(folder / FINISHED / f"{entry.path}.json") as file:
        file.write_text(json.dumps({**asdict(entry), "program_sha256": program}))


def finished(folder: Path, path: str) -> PreparedSite | None:
    """A site finished by an earlier run, if its program is what was written then."""
    file = folder / FINISHED / f"{path}.json"
    if not file.is_file():
        return None
    try:
        record = read(file, "note of a finished layer", "it is made again")
        entry = prepared_site(record)
        if entry.program and content_sha256(folder / entry.program) != record.text("program_sha256"):
            return None
    except (PreparedError, ProgramError, OSError):
        return None
    return entry


def forget(folder: Path) -> None:
    """Remove the notes: the folder is whole."""
    shutil.rmtree(folder / FINISHED, ignore_errors=True)
