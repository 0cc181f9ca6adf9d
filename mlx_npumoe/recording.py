"""Runs a model on a text and records the routing profile of its experts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from . import loading
from .cache import cache_root
from .calibration import SCHEMA, Recorder, RoutingProfile, SiteProfile, sequences
from .data import calibration_documents
from .errors import PreparedError, UsageError
from .program import DEFAULT_CHUNK, DEFAULT_TOKENS
from .progress import Progress, note
from .routed import RoutedExperts
from .sites import require_sites, swap
from .taps import pair_tap
from .tensors import site_fingerprint, site_weights


def calibrate(
    path_or_repo: str,
    *,
    text: Sequence[str | Path] | None = None,
    max_tokens: int = DEFAULT_TOKENS,
    sequence: int = DEFAULT_CHUNK,
    progress: bool = True,
) -> RoutingProfile:
    """Record how a model's experts are used on a text.

    Args:
        path_or_repo: folder, hub repository or `demo:NAME`.
        text: UTF-8 files; the corpus shipped in the package where None.
        max_tokens: tokens to record.
        sequence: tokens a call.

    Raises:
        ModelError, UsageError: the model or a text cannot be used.
    """
    documents, source = read_documents(text)
    model_type, tensors = site_weights(path_or_repo)
    fingerprint = site_fingerprint(tensors, model_type)
    model, tokenizer, _ = loading.load_whole(loading.locate(path_or_repo))
    tokens = sequences(documents, tokenizer.encode, sequence, max_tokens)
    if not tokens:
        raise UsageError(f"The calibration text ({source}) holds no tokens; give another file with --text.")
    return RoutingProfile(
        fingerprint=fingerprint,
        model_type=model_type,
        source=source,
        phase="prefill",
        sequence=sequence,
        sites=record(model, tokens, progress=progress),
    )


def record(model: nn.Module, tokens: Sequence[Sequence[int]], *, progress: bool = True) -> dict[str, SiteProfile]:
    """Run token sequences through a loaded model; the profile of each site, by path. The model is unchanged."""
    stand_ins = {
        site: RoutedExperts(module, tap=pair_tap(model, site.path, site.experts))
        for site, module in require_sites(model, "The model").items()
    }
    for site, stand_in in stand_ins.items():
        stand_in._recorder = Recorder(site, stand_in)
    swap(model, {site.path: stand_in for site, stand_in in stand_ins.items()})
    try:
        with Progress("Calibrating", sum(map(len, tokens)), "tokens", show=progress) as bar:
            for ids in tokens:
                model(mx.array(list(ids))[None])  # the recorders evaluate what they need, logits are never computed
                bar.advance(len(ids))
    finally:
        swap(model, {site.path: stand_in.unwrapped() for site, stand_in in stand_ins.items()})
    return {site.path: s._recorder.profile for site, s in stand_ins.items() if s._recorder is not None}


def profiles_root() -> Path:
    """Where calibrations are kept."""
    return cache_root() / "profiles"


def calibrated(
    path_or_repo: str, *, text: Sequence[str | Path] | None, max_tokens: int, sequence: int, progress: bool
) -> RoutingProfile:
    """As `calibrate`, but what was recorded of the same experts on the same text before is taken from the cache."""
    documents, _ = read_documents(text)
    model_type, tensors = site_weights(path_or_repo)
    model = [site_fingerprint(tensors, model_type), _files_key(loading.locate(path_or_repo))]
    same = [SCHEMA, version("mlx_npumoe"), version("mlx-lm"), model, documents, max_tokens, sequence]
    key = hashlib.sha256(json.dumps(same).encode()).hexdigest()
    file = profiles_root() / f"{key[:24]}.safetensors"
    if file.is_file():
        with suppress(PreparedError):  # a damaged one is recorded again
            profile = RoutingProfile.load(file)
            note(f"Note: using the calibration of {profile.tokens} tokens recorded before ({file}).")
            return profile
    profile = calibrate(path_or_repo, text=text, max_tokens=max_tokens, sequence=sequence, progress=progress)
    with suppress(OSError):  # a cache that cannot be written only costs time
        file.parent.mkdir(parents=True, exist_ok=True)
        profile.save(file)
    return profile


def _files_key(folder: Path) -> list[tuple[str, ...]]:
    """What tells a model's folder apart without reading its weights: small files by content, large ones by age."""
    key: list[tuple[str, ...]] = []
    for file in sorted(p for p in folder.iterdir() if p.is_file()):
        facts = file.stat()
        if file.suffix == ".safetensors":
            key.append((file.name, str(facts.st_size), str(facts.st_mtime_ns)))
        else:
            key.append((file.name, hashlib.sha256(file.read_bytes()).hexdigest()))
    return key


def read_documents(text: Sequence[str | Path] | None) -> tuple[list[str], str]:
    """Documents to calibrate on, and where they come from."""
    if not text:
        return calibration_documents(), "shipped corpus"
    documents = []
    for file in text:
        try:
            documents.append(Path(file).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as e:
            raise UsageError(f"The text {file} cannot be read as UTF-8 ({e}); give another file with --text.") from e
        if not documents[-1].strip():
            raise UsageError(f"The text {file} is empty; give another file with --text.")
    return documents, ", ".join(Path(f).name for f in text)
