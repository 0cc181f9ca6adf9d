"""Opens models through mlx-lm: finds the folder, loads lazily or whole, widens half precision where MLX needs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from . import demo
from .errors import ModelError
from .progress import note


def locate(path_or_repo: str | Path, revision: str | None = None) -> Path:
    """The folder of a model: a path, a hub repository (downloaded by mlx-lm where it is not cached), or `demo:NAME`.

    Raises:
        ModelError: it cannot be had.
    """
    from mlx_lm.utils import _download

    name = demo.resolve(str(path_or_repo))
    if Path(name).exists():
        if not (Path(name) / "config.json").is_file():
            raise ModelError(f"{name} is not a model folder (it has no config.json); give a folder mlx-lm can load.")
        return Path(name)
    try:
        return Path(_download(name, revision=revision))
    except Exception as e:  # hub, network and cache errors come from three libraries
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise ModelError(
            f"No model at {name}: it is no folder here and could not be had from the hub ({reason}); check the name, "
            "or download the model first."
        ) from e


def load_lazily(folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The module tree with its shapes; no tensor is read until it is used."""
    from mlx_lm.utils import load_model

    with _readable(folder):
        return load_model(folder, lazy=True)


def load_whole(folder: Path, **options: Any) -> tuple[nn.Module, Any, dict[str, Any]]:
    """Model, tokenizer and config as `mlx_lm.load` gives them, ready to run on this machine's MLX backend.

    MLX's expert kernels on a CPU take float32 activations only: half-precision parameters are widened there, with one
    line saying so. Their content, and so the fingerprint, is that of the stored values.
    """
    from mlx_lm import load

    lazy = options.pop("lazy", False)
    options.pop("return_config", None)
    with _readable(folder):
        model, tokenizer, config = load(str(folder), lazy=True, return_config=True, **options)
    half = {a.dtype for _, a in tree_flatten(model.parameters())} & {mx.float16, mx.bfloat16}
    if half and not mx.metal.is_available():
        names = " and ".join(sorted(str(d).removeprefix("mlx.core.") for d in half))
        note(f"Note: {names} parameters are widened to float32, the only type MLX's CPU expert kernels take.")
        model.set_dtype(mx.float32)
    if not lazy:
        mx.eval(model.parameters())
    return model, tokenizer, config


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Turns what mlx-lm raises for an unreadable model into one sentence."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"The model in {folder} cannot be loaded by mlx-lm ({reason}); check that the folder is complete."
        ) from error
