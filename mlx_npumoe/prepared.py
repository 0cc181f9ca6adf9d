"""The Prepared folder: profile, plan, programs and a manifest with hashes. Reads and checks it; `prepare` writes it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn

from .cache import cache_root
from .errors import PreparedError
from .fingerprint import loaded_hash
from .planning.plan import Plan
from .sites import ExpertSite

SCHEMA = 1
MANIFEST, PLAN, PROFILE, PROGRAMS = "manifest.json", "plan.json", "profile.safetensors", "programs"


@dataclass(frozen=True)
class PreparedSite:
    """One site in the manifest. `error` is what the interpreter measured against MLX, by name."""

    path: str
    experts: int
    hidden: int
    width: int
    dtypes: dict[str, str]
    sampled_sha256: str
    full_sha256: str
    program: str | None = None
    program_bytes: int = 0
    error: dict[str, float] | None = None
    reason: str | None = None  # why a planned program was not kept

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, D, F)."""
        return (self.experts, self.hidden, self.width)


@dataclass(frozen=True)
class Prepared:
    """A checked Prepared folder."""

    folder: Path
    model: str
    model_type: str
    fingerprint: str
    plan: Plan
    sites: dict[str, PreparedSite]
    versions: dict[str, str]

    @classmethod
    def open(cls, folder: str | Path, *, verify: bool = True) -> Prepared:
        """Read a folder `prepare` has written.

        Args:
            verify: compare every file with its hash in the manifest.

        Raises:
            PreparedError: missing, damaged, of another schema, or naming files outside itself.
        """
        folder = Path(folder)
        manifest = _read_manifest(folder)
        try:
            sites = {s["path"]: PreparedSite(**s) for s in manifest["sites"]}
            files: dict[str, dict[str, Any]] = dict(manifest["files"])
            described = {k: manifest[k] for k in ("model", "model_type", "fingerprint", "versions")}
            programs = [s.program for s in sites.values() if s.program]
            missing = [p for p in programs if not any(f.startswith(f"{p}/") for f in files)]
        except (KeyError, TypeError, AttributeError) as e:
            raise PreparedError(f"{folder / MANIFEST} is damaged ({e}); {_AGAIN}") from e
        if missing or PLAN not in files:
            raise PreparedError(f"{folder / MANIFEST} does not list the files of {(missing or [PLAN])[0]}; {_AGAIN}")
        for name, facts in files.items():
            _check_file(folder, name, facts, verify)
        plan = Plan.load(folder / PLAN)
        if plan.model_fingerprint != described["fingerprint"]:
            raise PreparedError(f"{folder} holds a plan of another model; {_AGAIN}")
        return cls(folder=folder, plan=plan, sites=sites, **described)

    @classmethod
    def find(cls, model: nn.Module, sites: Mapping[ExpertSite, nn.Module]) -> Prepared | None:
        """The cached folder of a loaded model's fingerprint, or None."""
        for folder in cached_folders():
            try:
                candidate = _read_manifest(folder)
                entries = {s["path"]: PreparedSite(**s) for s in candidate["sites"]}
            except (PreparedError, KeyError, TypeError):
                continue
            if candidate.get("model_type") == getattr(model, "model_type", None) and _same(entries, sites):
                return cls.open(folder)
        return None

    def require_model(self, sites: Mapping[ExpertSite, nn.Module], name: str) -> None:
        """Raises PreparedError unless at least one site is what was prepared."""
        if not any(s.path in self.sites and _matches(self.sites[s.path], s, m) for s, m in sites.items()):
            raise PreparedError(
                f"{self.folder} was prepared from {self.model}, whose experts differ from those of {name} in every "
                "layer; run mlx_npumoe.prepare on this model."
            )


_AGAIN = "run mlx_npumoe.prepare again."


def prepared_root() -> Path:
    """Where Prepared folders are cached, one a fingerprint."""
    return cache_root() / "prepared"


def cached_folders() -> Iterator[Path]:
    """Every finished folder in the cache."""
    root = prepared_root()
    if root.is_dir():
        yield from sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))


def write_manifest(
    folder: Path, *, model: str, model_type: str, fingerprint: str, sites: list[PreparedSite], versions: dict[str, str]
) -> None:
    """Hash every file below `folder` and write its manifest. The caller publishes the folder."""
    files = {
        p.relative_to(folder).as_posix(): {"sha256": _sha256(p), "bytes": p.stat().st_size}
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }
    manifest = {
        "schema": SCHEMA,
        "model": model,
        "model_type": model_type,
        "fingerprint": fingerprint,
        "versions": versions,
        "sites": [asdict(s) for s in sites],
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        raise PreparedError(
            f"{folder} is not a Prepared folder (it has no {MANIFEST}); make one with mlx_npumoe.prepare."
        )
    try:
        manifest = json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise PreparedError(f"{path} cannot be read ({e}); {_AGAIN}") from e
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA:
        found = manifest.get("schema") if isinstance(manifest, dict) else "none"
        raise PreparedError(f"{path} has schema {found}, this version reads {SCHEMA}; {_AGAIN}")
    return manifest


def _check_file(folder: Path, name: str, facts: dict[str, Any], verify: bool) -> None:
    path = folder / name
    inside = path.resolve().is_relative_to(folder.resolve())
    if not inside or Path(name).is_absolute() or path.is_symlink():
        raise PreparedError(f"{folder / MANIFEST} names {name}, which lies outside the folder; {_AGAIN}")
    if not path.is_file() or path.stat().st_size != facts.get("bytes"):
        raise PreparedError(f"{path} is missing or has the wrong size; {_AGAIN}")
    if verify and _sha256(path) != facts.get("sha256"):
        raise PreparedError(f"{path} differs from what was written (its hash does not match); {_AGAIN}")


def _sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _matches(entry: PreparedSite, site: ExpertSite, module: nn.Module) -> bool:
    same_shape = entry.shape == (site.experts, site.hidden, site.width)
    return same_shape and loaded_hash(module, entry.dtypes) == entry.sampled_sha256


def _same(entries: Mapping[str, PreparedSite], sites: Mapping[ExpertSite, nn.Module]) -> bool:
    """Whether a manifest describes exactly these sites."""
    if set(entries) != {s.path for s in sites}:
        return False
    return all(_matches(entries[s.path], s, m) for s, m in sites.items())
