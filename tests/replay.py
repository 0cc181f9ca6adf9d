"""The exactness harness: replay a stock run's router outputs, and judge free-running flips.

fp16 rounding flips close router decisions, so logits of a free run alone prove nothing. `run` watches every router of
a model, wherever it lies and whatever it returns: it records what goes in and out, or replays recorded outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

import families
from mlx_npumoe.sites import find_sites
from mlx_npumoe.taps import replay as tell_observers


class _Watched(nn.Module):
    """A module that notes each call's first argument, last argument and result; `queue` replaces its results."""

    def __init__(self, inner: nn.Module, queue: list[Any] | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.__dict__["log"] = []  # lists as attributes would become parameters
        self.__dict__["queue"] = queue

    def __call__(self, *args: mx.array) -> Any:
        out = self.inner(*args)
        self.__dict__["log"].append((args[0], args[-1], out))
        queue = self.__dict__["queue"]
        if queue is None:
            return out
        replayed = queue.pop(0)
        tell_observers(self.inner, replayed)
        return replayed


@dataclass
class Run:
    """One pass over a text of T tokens in all. Lists have an entry a site."""

    logits: np.ndarray  # (T, V)
    inputs: list[np.ndarray]  # (T, D) what routers read
    routers: list[np.ndarray | None]  # (T, E) logits where the router returns those
    chosen: list[np.ndarray]  # (T, K) experts as the site saw them
    outputs: list[list[Any]]  # per call, as the block saw them


def run(model: nn.Module, forward: Callable[[], mx.array], replay: Run | None = None) -> Run:
    """Call `forward` with routers and sites watched; `replay` is a run whose router outputs are returned instead."""
    with _watch(model, replay) as (routers, sites):
        logits = forward()
        mx.eval(logits, [a for w in (*routers, *sites) for _, a in tree_flatten(w.__dict__["log"])])
    router_logs = [w.__dict__["log"] for w in routers]
    return Run(
        logits=_rows([logits]),
        inputs=[_rows([x for x, _, _ in log]) for log in router_logs],
        routers=[None if isinstance(log[0][2], tuple) else _rows([out for *_, out in log]) for log in router_logs],
        chosen=[_rows([indices for _, indices, _ in w.__dict__["log"]]).astype(int) for w in sites],
        outputs=[[out for *_, out in log] for log in router_logs],
    )


def _rows(calls: list[mx.array]) -> np.ndarray:
    return np.concatenate([np.array(a.astype(mx.float32)).reshape(-1, a.shape[-1]) for a in calls])


@contextmanager
def _watch(model: nn.Module, replay: Run | None) -> Iterator[tuple[list[_Watched], list[_Watched]]]:
    routers, sites, undo = [], [], []

    def wrap(owner: nn.Module, name: str, queue: list[Any] | None = None) -> _Watched:
        undo.append((owner, name, owner[name]))
        owner[name] = _Watched(owner[name], queue)
        return owner[name]

    paths = [site.path for site in find_sites(model)]
    for i, path in enumerate(paths):
        routers.append(wrap(*families.router(model, path), None if replay is None else list(replay.outputs[i])))
    for path in paths:
        sites.append(wrap(*families.parent(model, path)))
    try:
        yield routers, sites
    finally:
        for owner, name, inner in undo:
            owner[name] = inner


def per_token_error(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Relative L2 of each token's row."""
    return np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)


def first_flips(stock: Run, free: Run) -> list[tuple[int, int]]:
    """Routing decisions that differ with no flip in their causal past: `(site, token)`.

    The causal past of a token at a layer is every token up to it at every layer below.
    """
    flips: list[tuple[int, int]] = []
    earliest = np.inf  # first token that flipped at any layer below
    for site, (a, b) in enumerate(zip(stock.chosen, free.chosen, strict=True)):
        tokens = np.nonzero((np.sort(a, axis=-1) != np.sort(b, axis=-1)).any(axis=-1))[0]
        flips += [(site, int(t)) for t in tokens if t < earliest]
        earliest = min([earliest, *tokens])
    return flips


def require_close_flips(stock: Run, replayed: Run, free: Run) -> int:
    """Assert that first flips come from rounding; their number.

    With no flip in its causal past, what a router reads deviates from stock by no more than in the replayed run. Where
    a router returns logits whose largest are chosen, the decision was also closer than twice their deviation there.
    """
    flips = first_flips(stock, free)
    for site, token in flips:
        bound = 2 * per_token_error(replayed.inputs[site], stock.inputs[site]).max()
        error = per_token_error(free.inputs[site][token], stock.inputs[site][token])
        assert error <= bound, f"site {site}, token {token}: the router's input is {error:.2g} off, over {bound:.2g}"
        logits, other = stock.routers[site], replayed.routers[site]
        if logits is None or other is None or not _largest_are_chosen(logits, stock.chosen[site]):
            continue
        left, came = set(stock.chosen[site][token]), set(free.chosen[site][token])
        gap = max(logits[token, list(left - came)]) - min(logits[token, list(came - left)])
        assert gap <= 2 * np.abs(logits - other).max(), f"site {site}, token {token}: not a close decision"
    return len(flips)


def _largest_are_chosen(logits: np.ndarray, chosen: np.ndarray) -> bool:
    return np.array_equal(np.sort(np.argsort(-logits, axis=-1)[:, : chosen.shape[1]]), np.sort(chosen))
