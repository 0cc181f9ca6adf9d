"""The Prepared folder: profile, plan, programs and a manifest with hashes. Reads and checks it; `prepare` writes it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.nn as nn

from .cache import cache_root, whole_file
from .converters.mil import MODEL_FILE
from .errors import PreparedError
from .fingerprint import loaded_hash
from .planning.plan import Plan, SitePlan
from .program import ProgramSpec
from .records import Record, read
from .sites import ExpertSite

SCHEMA = 2
MANIFEST, PLAN, PROFILE, PROGRAMS = "manifest.json", "plan.json", "profile.safetensors", "programs"
FINISHED = "finished"  # notes of finished layers, while a folder is not whole


@dataclass(frozen=True)
class PreparedProgram:
    """One program in the manifest. `error` is what the interpreter measured against MLX, by name."""

    path: str  # in the folder
    nbytes: int
    error: dict[str, float]


@dataclass(frozen=True)
class PreparedSite:
    """One site in the manifest. `error` is that of its programs together, also where they were not kept."""

    path: str
    experts: int
    hidden: int
    width: int
    dtypes: dict[str, str]
    sampled_sha256: str
    full_sha256: str
    programs: tuple[PreparedProgram, ...] = ()  # in slot order
    error: dict[str, float] | None = None
    reason: str | None = None  # why planned programs were not kept

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, D, F)."""
        return (self.experts, self.hidden, self.width)

    @property
    def program_bytes(self) -> int:
        """Bytes of its programs."""
        return sum(p.nbytes for p in self.programs)


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
        files = {name: manifest.record("files").record(name) for name in manifest.record("files").names()}
        for name, facts in files.items():
            try:
                _check_file(folder, name, facts, verify)
            except (OSError, ValueError) as e:
                manifest.fail(f"'files' names something that is no file's name ({e})")
        there = {p.relative_to(folder) for p in folder.rglob("*") if not p.is_dir()}
        extra = {p.as_posix() for p in there if p.parts[0] != FINISHED} - {MANIFEST, *files}
        if extra:
            manifest.fail(f"'files' does not list {min(extra)}, which is in the folder")
        for required in (PLAN, PROFILE):
            if required not in files:
                manifest.fail(f"'files' does not list {required}")
        plan = Plan.load(folder / PLAN)
        made = cls(
            folder=folder,
            model=manifest.text("model"),
            model_type=manifest.text("model_type"),
            fingerprint=manifest.text("fingerprint"),
            plan=plan,
            sites=_sites(manifest),
            versions={k: manifest.record("versions").text(k) for k in manifest.record("versions").names()},
        )
        if plan.model_fingerprint != made.fingerprint:
            manifest.fail(f"{PLAN} is of another model")
        for site in made.sites.values():
            _check_programs(manifest, site, plan.site(site.path), files)
        return made

    @classmethod
    def find(cls, model: nn.Module, sites: Mapping[ExpertSite, nn.Module]) -> Prepared | None:
        """The cached folder that fits a loaded model best, or None where none fits any layer.

        Normally that is the folder of the model's fingerprint; with an adapter or a changed layer, the base model's.
        """
        fitting: list[tuple[int, Path]] = []
        for folder in cached_folders():
            try:
                manifest = _read_manifest(folder)
                if manifest.text("model_type") == getattr(model, "model_type", None):
                    entries = _sites(manifest)
                    n = sum(s.path in entries and _matches(entries[s.path], s, m) for s, m in sites.items())
                    fitting += [(n, folder)] if n else []
            except PreparedError:
                continue
        damaged: PreparedError | None = None
        for _, folder in sorted(fitting, key=lambda pair: -pair[0]):
            try:
                return cls.open(folder)
            except PreparedError as e:
                damaged = damaged or e
        if damaged is not None:
            raise damaged
        return None

    def require_model(self, sites: Mapping[ExpertSite, nn.Module], name: str) -> None:
        """Raises PreparedError unless at least one site is what was prepared."""
        if not any(s.path in self.sites and _matches(self.sites[s.path], s, m) for s, m in sites.items()):
            raise PreparedError(
                f"{self.folder} was prepared from {self.model}, whose experts differ from those of {name} in every "
                "layer; run mlx_npumoe.prepare on this model."
            )


_AGAIN = "run mlx_npumoe.prepare again"


def program_names(path: str, spec: ProgramSpec) -> tuple[str, ...]:
    """Where the programs of a site lie in the folder, in slot order."""
    if spec.layout == "layer":
        return (f"{PROGRAMS}/{path}.mlpackage",)
    return tuple(f"{PROGRAMS}/{path}.g{i}.mlpackage" for i in range(len(spec.programs)))


def _check_programs(manifest: Record, site: PreparedSite, plan: SitePlan | None, files: Container[str]) -> None:
    """Raises PreparedError where a site has other programs than the plan gives it."""
    planned = program_names(site.path, plan.spec) if plan is not None and plan.spec is not None else ()
    for place, program in enumerate(site.programs):
        if planned[place : place + 1] != (program.path,):
            manifest.fail(f"{program.path} is not the program of {site.path}")
        if f"{program.path}/{MODEL_FILE}" not in files:
            manifest.fail(f"'files' does not list the files of {program.path}")
    if len(site.programs) != len(planned) and not site.reason:
        manifest.fail(f"'programs' does not list {planned[len(site.programs)]}, a program of {site.path}")


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
        if p.is_file() and p.relative_to(folder).parts[0] not in (MANIFEST, FINISHED)
    }
    manifest = {
        "schema_version": SCHEMA,
        "model": model,
        "model_type": model_type,
        "fingerprint": fingerprint,
        "versions": versions,
        "sites": [asdict(s) for s in sites],
        "files": files,
    }
    with whole_file(folder / MANIFEST) as file:
        file.write_text(json.dumps(manifest, indent=1))


def _read_manifest(folder: Path) -> Record:
    path = folder / MANIFEST
    if not path.is_file():
        raise PreparedError(
            f"{folder} is not a Prepared folder (it has no {MANIFEST}); make one with mlx_npumoe.prepare."
        )
    manifest = read(path, "manifest", _AGAIN)
    manifest.schema(SCHEMA)
    return manifest


def _sites(manifest: Record) -> dict[str, PreparedSite]:
    return {site.path: site for site in map(prepared_site, manifest.records("sites"))}


def prepared_site(record: Record) -> PreparedSite:
    """One site out of JSON. Raises PreparedError where it is not one."""
    dtypes, error = record.record("dtypes"), record.optional("error")
    reason = record.get("reason")
    return PreparedSite(
        path=record.text("path"),
        experts=record.integer("experts", least=1),
        hidden=record.integer("hidden", least=1),
        width=record.integer("width", least=1),
        dtypes={name: dtypes.text(name) for name in dtypes.names()},
        sampled_sha256=record.text("sampled_sha256"),
        full_sha256=record.text("full_sha256"),
        programs=tuple(map(_prepared_program, record.records("programs", empty=True))),
        error=None if error is None else _numbers(error),
        reason=None if reason is None else record.text("reason"),
    )


def _prepared_program(record: Record) -> PreparedProgram:
    return PreparedProgram(record.text("path"), record.integer("nbytes"), _numbers(record.record("error")))


def _numbers(record: Record) -> dict[str, float]:
    return {name: record.number(name) for name in record.names()}


def _check_file(folder: Path, name: str, facts: Record, verify: bool) -> None:
    path = folder / name
    inside = path.resolve().is_relative_to(folder.resolve())
    if not inside or Path(name).is_absolute() or path.is_symlink():
        raise PreparedError(f"{folder / MANIFEST} names {name}, which lies outside the folder; {_AGAIN}.")
    if not path.is_file() or path.stat().st_size != facts.integer("bytes"):
        raise PreparedError(f"{path} is missing or has the wrong size; {_AGAIN}.")
    if verify and _sha256(path) != facts.text("sha256"):
        raise PreparedError(f"{path} differs from what was written (its hash does not match); {_AGAIN}.")


def _sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _matches(entry: PreparedSite, site: ExpertSite, module: nn.Module) -> bool:
    same_shape = entry.shape == (site.experts, site.hidden, site.width)
    return same_shape and loaded_hash(module, entry.dtypes) == entry.sampled_sha256
