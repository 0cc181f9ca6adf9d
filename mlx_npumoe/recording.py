"""Records the routing profile of a model's experts: on a text it is run on, or in normal use."""

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
from .calibration import SCHEMA, Recorder, RoutingProfile, SiteProfile, largest_magnitudes, sequences
from .data import calibration_documents, own_seeds
from .errors import ModelError, PreparedError, UsageError
from .own_text import SELF, own_text, writes_itself
from .program import DEFAULT_CHUNK, DEFAULT_TOKENS
from .progress import Progress, note
from .routed import RoutedExperts
from .runtime import Engine, engine
from .sites import require_sites, swap
from .taps import SiteTaps, pair_tap, prove
from .tensors import site_fingerprint, site_weights
from .usage import UseRecorder


def calibrate(
    path_or_repo: str,
    *,
    text: Sequence[str | Path] | str | None = None,
    max_tokens: int = DEFAULT_TOKENS,
    sequence: int = DEFAULT_CHUNK,
    seed: int = 0,
    progress: bool = True,
) -> RoutingProfile:
    """Record how a model's experts are used on a text.

    Args:
        path_or_repo: folder, hub repository or `demo:NAME`.
        text: UTF-8 files; the corpus shipped in the package where None; `self`, what the model writes from short seeds.
        max_tokens: tokens to record.
        sequence: tokens a call.
        seed: of the sampling of `self`.

    Raises:
        ModelError, UsageError: the model or a text cannot be used.
    """
    own = writes_itself(text)
    documents, source = ([], SELF) if own else read_documents(text)
    model_type, tensors = site_weights(path_or_repo)
    fingerprint = site_fingerprint(tensors, model_type)
    model, tokenizer, _ = loading.load_whole(loading.locate(path_or_repo))
    if own:
        tokens = own_text(model, tokenizer, max_tokens, sequence, seed=seed, progress=progress)
    else:
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
    sites = require_sites(model, "The model")
    proofs = prove(model, list(sites))
    stand_ins = {
        site: RoutedExperts(module, tap=pair_tap(model, site.path, site.experts)) for site, module in sites.items()
    }
    for site, stand_in in stand_ins.items():
        stand_in._recorder = Recorder(site, stand_in, proofs[site.path].gates_reason)
        stand_in._taps = SiteTaps(model, site, proofs[site.path])
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
    path_or_repo: str,
    *,
    text: Sequence[str | Path] | str | None,
    max_tokens: int,
    sequence: int,
    progress: bool,
    seed: int = 0,
) -> RoutingProfile:
    """As `calibrate`, but what was recorded of the same experts on the same text before is taken from the cache."""
    documents: list[object] = [SELF, seed, own_seeds()] if writes_itself(text) else [*read_documents(text)[0]]
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
    profile = calibrate(path_or_repo, text=text, max_tokens=max_tokens, sequence=sequence, seed=seed, progress=progress)
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


def read_documents(text: Sequence[str | Path] | str | None) -> tuple[list[str], str]:
    """Documents to calibrate on, and where they come from."""
    if not text:
        return calibration_documents(), "shipped corpus"
    documents = []
    for file in [text] if isinstance(text, str) else text:
        try:
            documents.append(Path(file).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as e:
            raise UsageError(f"The text {file} cannot be read as UTF-8 ({e}); give another file with --text.") from e
        if not documents[-1].strip():
            raise UsageError(f"The text {file} is empty; give another file with --text.")
    return documents, ", ".join(Path(f).name for f in ([text] if isinstance(text, str) else text))


class RoutingLog:
    """Records how a model's experts are used, in whatever it is used for, and adds that to a file.

    A context manager: leaving it saves. The model's output is bit-identical. Largest magnitudes are those of the sample
    rows of prompts.

    Args:
        model: a loaded model, attached or not.
        file: a `.safetensors` file; what it holds of the same model is kept and added to.
        path_or_repo: where the model came from; what `mlx_npumoe.load` was given where None.

    Raises:
        PreparedError: the file is of another model, or no routing profile. ModelError: no experts, or not known whence.
    """

    def __init__(self, model: nn.Module, file: str | Path, *, path_or_repo: str | None = None) -> None:
        name = path_or_repo or getattr(model, "_npumoe_name", None)
        if name is None:
            raise ModelError("The model does not know where it was loaded from; give path_or_repo to RoutingLog.")
        self._file = Path(file)
        if self._file.suffix != ".safetensors":
            raise UsageError(f"{file} must end in .safetensors.")
        model_type, tensors = site_weights(str(name))
        self._new = RoutingProfile(site_fingerprint(tensors, model_type), model_type, "use", "use", 1, {})
        self._model = model
        self._stored()  # refuses another model's file before anything is recorded
        self._engine = engine(model)
        self._own = None if self._engine is not None else Engine(model, str(name))
        made = self._engine = self._engine or self._own
        assert made is not None
        with made.paused():
            proofs = prove(model, list(made.sites))
        self._taps: list[RoutedExperts] = []
        for site, stand_in in made.stand_ins.items():
            stand_in._usage = UseRecorder(site, proofs[site.path].gates_reason)
            if stand_in._taps is None:
                stand_in._taps = SiteTaps(model, site, proofs[site.path])
                self._taps.append(stand_in)

    def _stored(self) -> RoutingProfile | None:
        """What the file holds already."""
        if not self._file.exists():
            return None
        stored = RoutingProfile.load(self._file)
        if stored.fingerprint != self._new.fingerprint:
            raise PreparedError(
                f"{self._file} holds the routing of a model with other experts ({stored.model_type}); give another "
                "file."
            )
        return stored

    @property
    def missed(self) -> int:
        """Calls that could not be read."""
        made = self._engine
        return 0 if made is None else sum(s._usage.missed for s in made.stand_ins.values() if s._usage is not None)

    def close(self) -> RoutingProfile | None:
        """Stop recording and save; what was recorded with what the file held, None where nothing was seen."""
        made, self._engine = self._engine, None
        if made is None:
            return None
        for site, stand_in in made.stand_ins.items():
            recorder, stand_in._usage = stand_in._usage, None
            if recorder is not None:
                profile = self._new.sites[site.path] = recorder.finish()
                recorder.stretch(largest_magnitudes(site, stand_in, profile.rows, profile.chosen))
        for stand_in in self._taps:
            if stand_in._taps is not None:
                stand_in._taps.close()
                stand_in._taps = None
        if self._own is not None:
            self._own.close()
        if not self._new.tokens:
            return None
        stored = self._stored()
        profile_now = self._new if stored is None else stored.merged(self._new)
        profile_now.save(self._file)
        return profile_now

    def __enter__(self) -> RoutingLog:
        """The log itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Save."""
        self.close()
