"""Observers of what mlx-lm's blocks know and do not hand to their experts.

A small registry by block class; a family that is not in it loses only what its tap would tell. With sites this is the
only room that knows mlx-lm's modules.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn


@dataclass(frozen=True)
class _Router:
    """Where a block keeps its router, and how the raw indices `(..., K)` are found in what it returns."""

    name: str
    indices: Callable[[Any], mx.array]


# Blocks whose routers also choose among experts that compute nothing. Those pairs reach the site as expert 0 with
# weight 0; only the router's own indices tell them apart.
_ZERO_EXPERTS = {"mlx_lm.models.longcat_flash.LongcatFlashMoE": _Router("router", lambda result: result[0])}


class PairTap:
    """Tells which (token, expert) pairs of a site's next call are real.

    The router keeps its place, parameters and children; only its class is exchanged for one that notes its result,
    until `close`.
    """

    def __init__(self, router: nn.Module, find: Callable[[Any], mx.array], experts: int) -> None:
        self._router = router
        self._stock = type(router)
        self._find = find
        self._experts = experts
        self._noted = threading.local()  # calls of several threads do not mix
        tap = self

        def observed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            result = tap._stock.__call__(self, *args, **kwargs)
            tap.tell(result)
            return result

        namespace = {"__call__": observed, "_pair_tap": self, "__module__": self._stock.__module__}
        router.__class__ = type(self._stock.__name__, (self._stock,), namespace)

    def tell(self, result: Any) -> None:
        """Note what the router returned to its block."""
        self._noted.raw = self._find(result)

    def take(self, indices: mx.array) -> mx.array | None:
        """`(T, K)` bool for the site's `indices` `(T, K)`; None where the router was not called before this call."""
        raw, self._noted.raw = getattr(self._noted, "raw", None), None
        if raw is None or raw.size != indices.size:
            return None
        return mx.logical_or(raw.reshape(indices.shape) < self._experts, indices != 0)

    def close(self) -> None:
        """Give the router its class back."""
        self._router.__class__ = self._stock


def pair_tap(model: nn.Module, path: str, experts: int) -> PairTap | None:
    """The tap of the site at `path`, None where all pairs of such a block are real."""
    block = dict(model.named_modules()).get(path.rpartition(".")[0])
    entry = _ZERO_EXPERTS.get(f"{type(block).__module__}.{type(block).__qualname__}")
    return PairTap(block[entry.name], entry.indices, experts) if entry is not None and block is not None else None
