"""The formats a model's experts may be stored in: what mlx-lm's convert and quantize make of a float32 model."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from mlx_npumoe.sites import find_sites

Parameters = dict[str, Any]


class Stored(NamedTuple):
    """How a model is stored: a floating-point type, or a quantisation of the experts, by site (cycled)."""

    dtype: mx.Dtype = mx.float32
    layers: tuple[Parameters | None, ...] = (None,)


def _affine(bits: int, group_size: int = 32) -> Parameters:
    return {"group_size": group_size, "bits": bits, "mode": "affine"}


_MXFP4 = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
_MXFP8 = {"group_size": 32, "bits": 8, "mode": "mxfp8"}
_NVFP4 = {"group_size": 16, "bits": 4, "mode": "nvfp4"}

STORED: dict[str, Stored] = {
    "float32": Stored(),
    "float16": Stored(mx.float16),
    "bfloat16": Stored(mx.bfloat16),
    **{f"affine{bits}": Stored(layers=(_affine(bits),)) for bits in (2, 3, 4, 5, 6, 8)},
    "affine4 in bfloat16": Stored(mx.bfloat16, (_affine(4),)),
    "affine4 in float16": Stored(mx.float16, (_affine(4),)),
    "mxfp4": Stored(layers=(_MXFP4,)),
    "mxfp8": Stored(layers=(_MXFP8,)),
    "nvfp4": Stored(layers=(_NVFP4,)),
    "mixed": Stored(mx.bfloat16, (_affine(4), None, _affine(8), _MXFP4)),
}

SCALED = Stored(layers=({**_NVFP4, "global_scale": True},))  # a scale an expert: MLX computes with it on Metal only


def store(model: nn.Module, stored: str | Stored) -> dict[str, Any]:
    """Give a float32 model a format, by its name in STORED or in full; the entries of `config.json` that say so.

    Only experts are quantised: what the rest of a model is stored in does not concern us.
    """
    if isinstance(stored, str):
        stored = STORED[stored]
    entries: dict[str, Any] = {}
    experts = {site.path: stored.layers[i % len(stored.layers)] for i, site in enumerate(find_sites(model))}
    model.set_dtype(stored.dtype)

    def chosen(path: str, module: nn.Module) -> bool | Parameters:
        site = next((site for site in experts if path.startswith(site + ".")), None)
        parameters = experts[site] if site is not None else None
        if parameters is None or module.weight.shape[-1] % parameters["group_size"]:
            return False
        entries[path] = parameters
        return parameters

    if any(stored.layers):
        nn.quantize(model, class_predicate=lambda p, m: hasattr(m, "to_quantized") and chosen(p, m))
    mx.eval(model.parameters())
    if not entries:
        return {}
    left = {path: False for path, module in model.named_modules() if hasattr(module, "to_quantized")}
    first = next(iter(entries.values()))
    return {"quantization": {k: first[k] for k in ("group_size", "bits", "mode")} | left | entries}
