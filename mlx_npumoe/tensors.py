"""The expert tensors of a model that is not loaded, and the model's fingerprint from them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import mlx.nn as nn

from . import loading
from .fingerprint import model_fingerprint, sampled_hash
from .sites import find_sites, require_sites
from .weights import Checkpoint, ExpertWeights


def site_weights(path_or_repo: str) -> tuple[str, list[ExpertWeights]]:
    """Type and expert tensors, site by site, of a model that is not loaded."""
    folder = loading.locate(path_or_repo)
    model, _ = loading.load_lazily(folder)
    checkpoint = Checkpoint(folder)

    def reopened(path: str) -> nn.Module:
        again, _ = loading.load_lazily(folder)
        return next(module for site, module in find_sites(again).items() if site.path == path)

    return model.model_type, [
        ExpertWeights(site, module, checkpoint, partial(reopened, site.path))
        for site, module in require_sites(model, path_or_repo).items()
    ]


def site_fingerprint(tensors: Sequence[ExpertWeights], model_type: str) -> str:
    """The model's fingerprint, from stored values."""
    hashes = {}
    for weights in tensors:
        hashes[weights.site] = sampled_hash(weights)
        weights.release()
    return model_fingerprint(model_type, hashes)
