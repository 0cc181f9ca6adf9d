"""Tells two models apart by the content of their experts, not by name or size.

Two fine-tunes of one base share config and shapes, so each expert tensor is hashed: in full when a model is prepared,
by fixed sampled blocks of every expert when it is loaded. Half precision widened at load hashes as it was stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .sites import ExpertSite, projection_names
from .weights import ExpertWeights, as_stored, sample_positions

DTYPES = {str(d).removeprefix("mlx.core."): d for d in (mx.float32, mx.float16, mx.bfloat16, mx.uint32, mx.uint8)}


def stored_dtypes(weights: ExpertWeights) -> dict[str, str]:
    """Stored dtype of each tensor of a site, by name; kept in the manifest."""
    return {t.name: str(t.dtype).removeprefix("mlx.core.") for t in weights.tensors}


def full_hash(weights: ExpertWeights) -> str:
    """SHA-256 over every byte of a site's experts as stored."""
    digest = hashlib.sha256()
    for tensor in weights.tensors:
        digest.update(f"{tensor.name} {tensor.shape} {tensor.dtype}\n".encode())
        for block in weights.blocks(tensor):
            digest.update(block.data)
    return digest.hexdigest()


def sampled_hash(weights: ExpertWeights) -> str:
    """SHA-256 over the fixed sampled blocks of a site's experts, read expert by expert."""
    digest = hashlib.sha256()
    for tensor in weights.tensors:
        digest.update(f"{tensor.name} {tensor.shape} {tensor.dtype}\n".encode())
        for block, at in zip(weights.blocks(tensor), sample_positions(tensor.shape), strict=True):
            digest.update(np.ascontiguousarray(block.reshape(-1)[at]).data)
    return digest.hexdigest()


def loaded_hash(module: nn.Module, dtypes: Mapping[str, str]) -> str | None:
    """The sampled hash of a loaded module whose tensors were stored with `dtypes`; None if they cannot have been."""
    digest = hashlib.sha256()
    for projection in projection_names(module):
        for parameter, array in sorted(module[projection].items()):
            if not isinstance(array, mx.array):
                continue
            name = f"{projection}.{parameter}"
            dtype = DTYPES.get(dtypes.get(name, ""))
            if dtype is None:
                return None
            at = sample_positions(array.shape)
            view = np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
            values = np.take_along_axis(view.reshape(view.shape[0], -1), at, axis=1)
            stored = values if array.dtype == dtype else as_stored(values, dtype)
            if stored is None:
                return None
            digest.update(f"{name} {tuple(array.shape)} {dtype}\n".encode())
            for row in stored:
                digest.update(np.ascontiguousarray(row).data)
    return digest.hexdigest()


def model_fingerprint(model_type: str, site_hashes: Mapping[ExpertSite, str]) -> str:
    """Key of a model's Prepared folder: its type, and each site's shape and sampled hash."""
    digest = hashlib.sha256(model_type.encode())
    for site, value in site_hashes.items():
        digest.update(f"{site.path} {site.experts} {site.hidden} {site.width} {site.activation} {value}\n".encode())
    return digest.hexdigest()
