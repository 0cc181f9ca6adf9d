"""Prepare a model: calibrate on text, plan, emit and check the programs of each site, write a Prepared folder.

The whole model is in memory only while it is calibrated; programs are made one site at a time, expert by expert.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import unfinished
from .cache import resumable, staged
from .calibration import RoutingProfile, up_shift
from .converters import lint
from .errors import ModelError, PreparedError, ProgramError, UsageError
from .fingerprint import full_hash, sampled_hash, stored_dtypes
from .machine import device_profile as find_device_profile
from .planning.cost import SiteLoads
from .planning.device_profile import DeviceProfile
from .planning.placement import Hot
from .planning.plan import Plan, SitePlan, make_plan
from .planning.tiers import TIER_POLICIES
from .prepared import (
    MANIFEST,
    PLAN,
    PROFILE,
    PROGRAMS,
    Prepared,
    PreparedProgram,
    PreparedSite,
    prepared_root,
    program_names,
    write_manifest,
)
from .program import BODIES, DEFAULT_CHUNK, DEFAULT_TOKENS, LAYOUTS, WEIGHT_FORMATS
from .programs import emit_program, measure_error, random_rows, require_accuracy, together
from .progress import Progress, note
from .recording import calibrated
from .sites import ExpertSite, require_formula
from .tensors import site_fingerprint, site_weights
from .weights import ExpertWeights


def plan_for(
    profile: RoutingProfile,
    sites: Sequence[ExpertSite],
    *,
    chunk: int = DEFAULT_CHUNK,
    tiers: str = "quantile",
    weights: str = "int8",
    layout: str = "layer",
    body: str = "split",
    device: DeviceProfile | None = None,
    hot: Hot = "auto",
    min_chunk: int | None = None,
) -> Plan:
    """Decide groups, capacities and placement from a profile.

    Args:
        hot: `auto` by the cost rule, `all` experts with load, or that many a site.
        min_chunk: overrides the least number of tokens worth a launch.

    Raises:
        PreparedError: the profile is of another model.
    """
    loads = []
    for site in sites:
        seen = profile.sites.get(site.path)
        if seen is None or seen.experts != site.experts:
            raise PreparedError(
                f"The routing profile knows nothing of {site.path} with {site.experts} experts; calibrate this model."
            )
        loads.append(
            SiteLoads(
                path=site.path,
                layer=site.layer,
                experts=site.experts,
                hidden=site.hidden,
                width=site.width,
                top_k=seen.top_k,
                activation=site.activation,
                loads=seen.loads(chunk),
                up_shift=up_shift(seen.maxima),
                reason=site.local_reason,
            )
        )
    return make_plan(
        loads,
        model_fingerprint=profile.fingerprint,
        model_type=profile.model_type,
        chunk=chunk,
        profile=device or find_device_profile(),
        tiers=tiers,
        weights=weights,
        layout=layout,
        body=body,
        hot=hot,
        min_chunk=min_chunk,
    )


def prepare(
    path_or_repo: str,
    *,
    text: Sequence[str | Path] | str | None = None,
    out: str | Path | None = None,
    chunk: int = DEFAULT_CHUNK,
    tiers: str = "quantile",
    weights: str = "int8",
    layout: str = "layer",
    body: str = "split",
    profile: RoutingProfile | str | Path | None = None,
    plan: Plan | str | Path | None = None,
    max_tokens: int = DEFAULT_TOKENS,
    seed: int = 0,
    device_profile: DeviceProfile | str | Path | None = None,
    progress: bool = True,
) -> Prepared:
    """Make everything a model needs to run its hot experts on a second device.

    Args:
        path_or_repo: folder, hub repository or `demo:NAME`.
        text: UTF-8 files to calibrate on; the shipped corpus where None; `self`, what the model writes itself.
        out: folder to write; the cache folder of the model's fingerprint where None.
        chunk: tokens a launch at most; give generate's prefill step.
        tiers: how capacities are chosen (see `planning.tiers.TierPolicy`).
        weights: format of the programs' weights: `int8` (per channel), `fp16`, `lut8`, `lut6`, `lut4` (a table a
            matrix), `int4` (in blocks; the model's own 4-bit weights as they are).
        layout: `layer`, one program a site, or `groups`, one for each group of experts.
        body: `split`, dense convolutions between a split and a concat; `grouped`, grouped convolutions; or `separate`,
            ports for each expert, for compilers that take neither.
        profile: a routing profile made before; the model is then never loaded whole.
        plan: a plan made before, for this model; chunk, tiers, weights, layout and body are then the plan's.
        max_tokens: tokens to calibrate on. seed: of the sampling of the text `self`.
        device_profile: figures of the device to plan for; this machine's where None.

    Raises:
        UsageError, ModelError, PreparedError, ProgramError: one sentence each; nothing is left half-written.
    """
    for name, value, known in (
        ("tiers", tiers, TIER_POLICIES),
        ("weights", weights, WEIGHT_FORMATS),
        ("layout", layout, LAYOUTS),
        ("body", body, BODIES),
    ):
        if value not in known:
            raise UsageError(f"{name}={value!r} is not known; choose from {', '.join(known)}.")
    if chunk < 1 or max_tokens < 1:
        raise UsageError(f"chunk and max_tokens must be positive, not {chunk} and {max_tokens}.")
    if profile is not None and not isinstance(profile, RoutingProfile):
        profile = RoutingProfile.load(Path(profile))
    if plan is not None:
        plan = plan if isinstance(plan, Plan) else Plan.load(Path(plan))
        asked: dict[str, tuple[object, object]] = {
            "chunk": (chunk, DEFAULT_CHUNK),
            "tiers": (tiers, "quantile"),
            "weights": (weights, "int8"),
            "layout": (layout, "layer"),
            "body": (body, "split"),
        }
        for name, (given, default) in asked.items():
            if given != default and given != getattr(plan, name):
                raise UsageError(f"{name}={given!r} contradicts the plan's {getattr(plan, name)!r}; leave it out.")
    if not isinstance(device_profile, DeviceProfile):
        device_profile = find_device_profile(device_profile)
    final = _free_to_write(Path(out)) if out is not None else None

    if profile is None:
        profile = calibrated(
            path_or_repo, text=text, max_tokens=max_tokens, sequence=chunk, seed=seed, progress=progress
        )
    model_type, tensors = site_weights(path_or_repo)
    fingerprint = site_fingerprint(tensors, model_type)
    for what, found in (("routing profile", profile.fingerprint), ("plan", plan and plan.model_fingerprint)):
        if found is not None and found != fingerprint:
            raise PreparedError(
                f"The {what} was made from a model with other experts than {path_or_repo}; make a new one."
            )
    if plan is not None:
        _require_fit(plan, profile, tensors)
    else:
        plan = plan_for(
            profile,
            [w.site for w in tensors],
            chunk=chunk,
            tiers=tiers,
            weights=weights,
            layout=layout,
            body=body,
            device=device_profile,
        )
    return _write(
        final or prepared_root() / fingerprint[:24],
        path_or_repo,
        model_type,
        fingerprint,
        plan,
        profile,
        tensors,
        progress,
    )


def emit_programs(path_or_repo: str, plan: Plan, out: Path, *, progress: bool = True) -> list[dict[str, Any]]:
    """Write only the programs of a plan into a new folder, each compared with MLX on random rows.

    Returns one `{"program", "bytes", "relative_l2", ...}` a program.
    """
    model_type, tensors = site_weights(path_or_repo)
    if site_fingerprint(tensors, model_type) != plan.model_fingerprint:
        raise PreparedError(f"The plan was made from a model with other experts than {path_or_repo}; make a new one.")
    if out.exists():
        raise UsageError(f"{out} exists; give a new folder with --out.")
    rows: list[dict[str, Any]] = []
    with staged(out.absolute()) as folder, Progress("Emitting programs", len(tensors), "layers", show=progress) as bar:
        for weights in tensors:
            site = plan.site(weights.site.path)
            if site is not None and site.spec is not None:
                names = program_names(weights.site.path, site.spec)
                for name, spec in zip([Path(n).name for n in names], site.programs, strict=True):
                    nbytes = emit_program(spec, weights.matrices, folder / name)
                    error = measure_error(folder / name, spec, weights.matrices, *random_rows(spec.hidden))
                    require_accuracy(error, spec, weights.site.path)
                    rows.append({"program": name, "bytes": nbytes, **error})
            weights.release()
            bar.advance()
    return rows


def check_programs(
    prepared: Prepared, path_or_repo: str | None = None, *, progress: bool = True
) -> list[dict[str, Any]]:
    """Lint every program of a Prepared folder and compare it with MLX again, and the model with its full hashes.

    Args:
        path_or_repo: where the model is now; where it was prepared from if None.

    Returns:
        One `{"program", "bytes", "relative_l2", ...}` a program.

    Raises:
        PreparedError, ProgramError: the model is another one, or a program breaks a rule or computes something else.
    """
    profile = RoutingProfile.load(prepared.folder / PROFILE)
    _, tensors = site_weights(path_or_repo or prepared.model)
    if {w.site.path for w in tensors} != set(prepared.sites):
        raise PreparedError(f"{path_or_repo or prepared.model} has other expert layers than {prepared.folder}.")
    rows: list[dict[str, Any]] = []
    with Progress("Checking programs", len(tensors), "layers", show=progress) as bar:
        for weights in tensors:
            path = weights.site.path
            entry, site = prepared.sites.get(path), prepared.plan.site(path)
            if entry is not None and full_hash(weights) != entry.full_sha256:
                raise PreparedError(f"The experts of {path} differ from those that were prepared; prepare again.")
            if entry is not None and entry.programs and site is not None:
                seen = profile.sites[path]
                for program, spec in zip(entry.programs, site.programs, strict=True):
                    package = prepared.folder / program.path
                    lint.check(package, spec)
                    error = measure_error(package, spec, weights.matrices, seen.rows, seen.chosen)
                    require_accuracy(error, spec, path)
                    rows.append({"program": program.path, "bytes": program.nbytes, **error})
            weights.release()
            bar.advance()
    return rows


def _write(
    final: Path,
    model: str,
    model_type: str,
    fingerprint: str,
    plan: Plan,
    profile: RoutingProfile,
    tensors: Sequence[ExpertWeights],
    progress: bool,
) -> Prepared:
    """Emit programs beside `final` and put the finished folder in place, whatever stood there before.

    A run that is interrupted or killed leaves what it had finished to the next one of the same model, plan and profile.
    """
    with tempfile.TemporaryDirectory() as place:
        profile.save(Path(place) / PROFILE)
        key = unfinished.work_key(fingerprint, plan, Path(place) / PROFILE)
    with resumable(final, key) as folder:
        unfinished.sweep(folder)
        plan.save(folder / PLAN)
        profile.save(folder / PROFILE)
        entries = []
        with Progress("Emitting programs", len(tensors), "layers", show=progress) as bar:
            for weights in tensors:
                path = weights.site.path
                entry = unfinished.finished(folder, path, full_hash(weights))
                if entry is None:
                    entry = _prepare_site(weights, plan.site(path), profile, folder)
                    unfinished.keep(folder, entry)
                entries.append(entry)
                weights.release()
                bar.advance()
        write_manifest(
            folder,
            model=model,
            model_type=model_type,
            fingerprint=fingerprint,
            sites=entries,
            versions=unfinished.versions(),
        )
        Prepared.open(folder)
    unfinished.forget(final)
    return Prepared.open(final, verify=False)


def _prepare_site(weights: ExpertWeights, plan: SitePlan | None, profile: RoutingProfile, folder: Path) -> PreparedSite:
    """Emit and check one site's programs, if the plan has some, and describe the site for the manifest."""
    site = weights.site
    entry = PreparedSite(
        path=site.path,
        experts=site.experts,
        hidden=site.hidden,
        width=site.width,
        dtypes=stored_dtypes(weights),
        sampled_sha256=sampled_hash(weights),
        full_sha256=full_hash(weights),
    )
    if plan is None or plan.spec is None:
        return entry
    try:
        require_formula(weights.module, plan.spec.activation)
    except ModelError as e:
        note(f"Note: layer {site.layer} stays local. {e}")
        return replace(entry, reason=str(e))
    (folder / PROGRAMS).mkdir(exist_ok=True)
    seen = profile.sites[site.path]
    programs = []
    for name, spec in zip(program_names(site.path, plan.spec), plan.programs, strict=True):
        nbytes = emit_program(spec, weights.matrices, folder / name)
        error = measure_error(folder / name, spec, weights.matrices, seen.rows, seen.chosen)
        programs.append(PreparedProgram(name, nbytes, error))
    error = together([p.error for p in programs], [len(spec.experts) for spec in plan.programs])
    try:
        require_accuracy(error, plan.spec, site.path)
    except ProgramError as e:
        for program in programs:
            shutil.rmtree(folder / program.path)
        note(f"Note: layer {site.layer} stays local. {e}")
        return replace(entry, error=error, reason=str(e))
    return replace(entry, programs=tuple(programs), error=error)


def _require_fit(plan: Plan, profile: RoutingProfile, tensors: Sequence[ExpertWeights]) -> None:
    """Raises PreparedError where a plan or profile does not speak of this model's layers."""
    sites = {w.site.path: w.site for w in tensors}
    for planned in plan.sites:
        site = sites.get(planned.path)
        if site is None or planned.experts != site.experts or max(planned.hot, default=0) >= site.experts:
            raise PreparedError(f"The plan's {planned.path} is not a layer of this model; make a new plan.")
        seen = profile.sites.get(planned.path)
        if planned.spec is not None and (seen is None or not len(seen.rows)):
            raise PreparedError(f"The routing profile has no rows of {planned.path}; calibrate this model.")


def _free_to_write(out: Path) -> Path:
    """The folder `out` names if it is new, empty or a Prepared folder; links are followed."""
    out = out.resolve()
    if out == Path.cwd() or out.parent == out:
        raise UsageError("out is the current folder or a root; give the name of a new folder.")
    if out.exists() and not (out.is_dir() and (not any(out.iterdir()) or (out / MANIFEST).is_file())):
        raise UsageError(f"{out} exists and is no Prepared folder; give another --out.")
    return out
