"""mlx-lm's loading and generation loops, with the experts attached and the phase set around each step."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm

from . import loading
from .devices import resolve
from .errors import PreparedError
from .phase import phase
from .policies import OVERFLOWS, SALIENCIES
from .prepared import Prepared
from .progress import note
from .runtime import attach, choose, engine, require_lossy
from .sites import find_sites

_loops: Any = importlib.import_module("mlx_lm.generate")  # the package's attribute of that name differs


def load(
    path_or_repo: str,
    *,
    prepared: Prepared | str | Path | None = "auto",
    device: str = "auto",
    overflow: str = "spill",
    saliency: str = "attention_norm",
    prune_renormalise: bool = False,
    return_config: bool = False,
    progress: bool = True,
    **as_mlx_lm_load: Any,
) -> Any:
    """Load a model and tokenizer as `mlx_lm.load` does, with its hot experts on a second device.

    Args:
        path_or_repo: folder, hub repository or `demo:NAME`.
        prepared: `auto` looks for the cached folder of this model's fingerprint and otherwise runs plain MLX with one
            hint; a folder or Prepared is used or refused; None never attaches.
        device: `auto`, `interpreter` or `off`.
        overflow: `spill`, the exact policy, or `prune`, which drops pairs (see `attach`).
        saliency, prune_renormalise: what `prune` keeps, and how it weighs that.
        return_config: also return the config.
        as_mlx_lm_load: everything else `mlx_lm.load` takes.

    Raises:
        ModelError, PreparedError, UsageError.
    """
    resolve(device)
    choose("overflow", overflow, OVERFLOWS)
    choose("saliency", saliency, SALIENCIES)
    require_lossy(overflow, prune_renormalise)
    if prepared is not None and prepared != "auto" and not isinstance(prepared, Prepared):
        prepared = Prepared.open(prepared)  # before the model, which takes longer
    folder = loading.locate(path_or_repo, as_mlx_lm_load.pop("revision", None))
    model, tokenizer, config = loading.load_whole(folder, **as_mlx_lm_load)
    model._npumoe_name = str(path_or_repo)
    found = _find(model, path_or_repo, device) if prepared == "auto" else prepared
    if isinstance(found, Prepared):
        attach(
            model,
            found,
            device=device,
            overflow=overflow,
            saliency=saliency,
            prune_renormalise=prune_renormalise,
            progress=progress,
        )
    return (model, tokenizer, config) if return_config else (model, tokenizer)


def _find(model: nn.Module, name: str, device: str) -> Prepared | None:
    """The cached folder of a model; one hint where there is none, or where it is damaged."""
    if resolve(device) is None:
        return None
    sites = find_sites(model)
    if not sites:
        _plain(model, f"{name} has no experts that can move to a second device; running plain MLX.")
        return None
    try:
        found = Prepared.find(model, sites)
    except PreparedError as e:
        _plain(model, f"running plain MLX. {e}")
        return None
    if found is None:
        _plain(model, f"running plain MLX; `mlx_npumoe.prepare --model {name}` would move its hot experts.")
    return found


def _plain(model: nn.Module, reason: str) -> None:
    """Say why nothing is attached, and keep it for the report."""
    note(f"Note: {reason}")
    model._npumoe_reason = reason


def generate(model: nn.Module, tokenizer: Any, prompt: str | list[int], verbose: bool = False, **kwargs: Any) -> str:
    """As `mlx_lm.generate`; with `verbose` one more line says what the second device did."""
    text = plain_generate(model, tokenizer, prompt, verbose, **kwargs)
    made = engine(model)
    if verbose and made is not None:
        print(made.report().line())
    return text


def plain_generate(model: nn.Module, tokenizer: Any, prompt: Any, verbose: bool = False, **kwargs: Any) -> str:
    """As `mlx_lm.generate`, to the letter of what it prints."""
    with phase(generating=True):
        return mlx_lm.generate(model, tokenizer, prompt, verbose, **kwargs)


def stream_generate(
    model: nn.Module, tokenizer: Any, prompt: Any, *args: Any, **kwargs: Any
) -> Generator[Any, None, None]:
    """As `mlx_lm.stream_generate`."""
    return _in_phase(mlx_lm.stream_generate(model, tokenizer, prompt, *args, **kwargs))


def generate_step(prompt: mx.array, model: nn.Module, *args: Any, **kwargs: Any) -> Generator[Any, None, None]:
    """As `mlx_lm.generate.generate_step`."""
    return _in_phase(_loops.generate_step(prompt, model, *args, **kwargs))


def _in_phase(loop: Any) -> Generator[Any, None, None]:
    """The steps of a loop, each run under the phase of a generation, which its reader does not see."""
    try:
        while True:
            with phase(generating=True):
                try:
                    step = next(loop)
                except StopIteration:
                    return
            yield step
    finally:
        loop.close()


def batch_generate(model: nn.Module, tokenizer: Any, prompts: list[list[int]], *args: Any, **kwargs: Any) -> Any:
    """As `mlx_lm.batch_generate`. Padding of shorter prompts takes no device rows."""
    with phase(generating=True, decoding=True), padding_known:  # prompts set a phase of their own
        return mlx_lm.batch_generate(model, tokenizer, prompts, *args, **kwargs)


class _PaddingKnown:
    """While any thread runs a batch of ours, mlx-lm's prompt batches tell the phase which rows are padding."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._stock: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                self._stock = _loops.PromptProcessingBatch
                _loops.PromptProcessingBatch = _padded(self._stock)
            self._users += 1

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                _loops.PromptProcessingBatch = self._stock


padding_known = _PaddingKnown()


def _padded(stock: Any) -> type:
    class PaddedPromptBatch(stock):
        """mlx-lm's prompt batch, running its model under a padding mask."""

        def prompt(self, tokens: list[list[int]]) -> None:
            model: Any = self.model
            self.model: Any = _MaskedCalls(model, [len(t) for t in tokens])
            try:
                super().prompt(tokens)
            finally:
                self.model = model

    return PaddedPromptBatch


class BatchGenerator(_loops.BatchGenerator):
    """As `mlx_lm.generate.BatchGenerator`. Run it under `padding_known`, or padding takes device rows."""

    def next(self) -> Any:
        """Responses of prompts and of generations."""
        with phase(generating=True, decoding=True):  # prompts set a phase of their own
            return super().next()

    def next_generated(self) -> Any:
        """Responses of generations."""
        with phase(generating=True, decoding=True):
            return super().next_generated()


class _MaskedCalls:
    """Calls a model chunk by chunk over right-padded prompts, with the mask of each chunk in the phase."""

    def __init__(self, model: nn.Module, lengths: Sequence[int]) -> None:
        self._model = model
        self._lengths = mx.array(list(lengths))[:, None]  # (B, 1)
        self._padded = len(set(lengths)) > 1
        self._start = 0

    def __call__(self, tokens: mx.array, **kwargs: Any) -> mx.array:
        stop = self._start + tokens.shape[1]
        valid = mx.arange(self._start, stop)[None] < self._lengths if self._padded else None  # (B, T)
        self._start = stop
        with phase(generating=True, valid=valid, unpadded=valid is None):
            return self._model(tokens, **kwargs)
