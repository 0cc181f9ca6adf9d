"""The exactness harness: replay a stock run's router outputs, and judge free-running flips.

fp16 rounding flips close router decisions, so logits of a free run alone prove nothing. `Routers` wraps the router
modules of a model: it records their outputs, or replays recorded ones while noting how far the model's own are away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_npumoe.sites import find_sites


class _Watched(nn.Module):
    """A router that notes what it computes and, while replaying, returns what was noted before."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.__dict__["log"] = []  # lists as attributes would become parameters
        self.__dict__["queue"] = None

    def __call__(self, x: mx.array) -> mx.array:
        out = self.inner(x)
        self.__dict__["log"].append(out)
        queue = self.__dict__["queue"]
        return out if queue is None else queue.pop(0)


@dataclass
class Run:
    """One pass over a text: logits `(T, V)`, and per layer the router's own logits `(T, E)`."""

    logits: np.ndarray
    routers: list[np.ndarray] = field(default_factory=list)
    calls: list[list[mx.array]] = field(default_factory=list)  # per layer, per call, as the block saw them


def run(model: nn.Module, forward: Callable[[], mx.array], router: str, replay: Run | None = None) -> Run:
    """Call `forward` with every router watched.

    Args:
        router: the router's path inside a layer, such as `mlp.gate`.
        replay: a run whose router outputs are returned in place of the model's own.
    """
    with _watch(model, router, replay) as watched:
        logits = forward()
        mx.eval(logits, [w.__dict__["log"] for w in watched])
    logs = [w.__dict__["log"] for w in watched]
    rows = [np.concatenate([np.array(a.astype(mx.float32)).reshape(-1, a.shape[-1]) for a in log]) for log in logs]
    return Run(np.array(logits.astype(mx.float32)).reshape(-1, logits.shape[-1]), rows, logs)


@contextmanager
def _watch(model: nn.Module, router: str, replay: Run | None) -> Iterator[list[_Watched]]:
    *owner, name = router.split(".")
    watched, undo = [], []
    for i, site in enumerate(find_sites(model)):
        block = model.layers[site.layer]
        for part in owner:
            block = block[part]
        wrapper = _Watched(block[name])
        if replay is not None:
            wrapper.__dict__["queue"] = list(replay.calls[i])
        undo.append((block, name, block[name]))
        block[name] = wrapper
        watched.append(wrapper)
    try:
        yield watched
    finally:
        for block, name, inner in undo:
            block[name] = inner


def per_token_error(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Relative L2 of each token's logits."""
    return np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)


def first_flips(stock: Run, free: Run, top_k: int) -> list[tuple[int, int, float]]:
    """Router decisions that differ with no flip in their causal past: `(layer, token, gap of the stock logits)`.

    The causal past of a token at a layer is every token up to it at every layer below. The gap is the largest
    difference between an expert that left and one that came, in the stock run.
    """
    flips: list[tuple[int, int, float]] = []
    earliest = np.inf  # first token that flipped at any layer below
    for layer, (a, b) in enumerate(zip(stock.routers, free.routers, strict=True)):
        chosen_a, chosen_b = (np.argsort(-r, axis=-1)[:, :top_k] for r in (a, b))
        here = np.inf
        for t in range(len(a)):
            left, came = set(chosen_a[t]) - set(chosen_b[t]), set(chosen_b[t]) - set(chosen_a[t])
            if not left:
                continue
            if t < earliest:
                gap = max(a[t, i] for i in left) - min(a[t, j] for j in came)
                flips.append((layer, t, float(gap)))
            here = min(here, t)
        earliest = min(earliest, here)
    return flips


def deviations(stock: Run, replayed: Run) -> list[float]:
    """Each layer's largest router-logit deviation in the replayed run."""
    return [float(np.abs(a - b).max()) for a, b in zip(stock.routers, replayed.routers, strict=True)]
