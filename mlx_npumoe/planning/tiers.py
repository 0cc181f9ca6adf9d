"""Capacities: how many token rows each expert gets in a program, at most a few levels a site.

Knows loads and rows only; what a row costs on which unit is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..errors import PreparedError, UsageError

GRAIN = 32  # capacities are multiples of it: 64 bytes of fp16 on the last axis
TIER_POLICIES = ("quantile", "uniform", "uniform_paper", "quartile4x", "quartile4x_paper")
TIERS_HELP = (
    "How capacities are chosen: quantile (default), at most three levels of least cost; uniform, one level for the "
    "busiest expert; quartile4x, four times the mean load for the busiest quarter of experts and the mean load for the "
    "rest. With _paper the mean load is taken as chunk / experts, without top-k, as in the NPUMoE paper."
)


@dataclass(frozen=True)
class TierPolicy:
    """How capacities are chosen.

    `quantile` (ours, after papers 1.2): an expert needs the `quantile` of its load samples, rounded up to the
    grain; the needs are clustered to at most `levels` levels of least expected
    `pad_cost * pad rows + spill_cost * spilled rows`, and each expert gets the smallest level that covers
    its need (the paper's tau). `uniform`: one level, the mean load `k*B/E` times `r`, the largest need over
    the mean load (the paper's imbalance ratio with the quantile in place of the count), rounded up to the
    grain; the mean cancels, so the level is the largest need among the hot experts. `quartile4x` (papers 7.1): the
    busiest quarter of a site's experts, by mean load and then by number, gets four times the base, the rest the base,
    both rounded up to the grain. The base is the mean load `k*B/E`.

    `uniform_paper` and `quartile4x_paper` take the paper's base `B/E` instead. It leaves top-k out, so with k over 1
    most of the load spills, or is dropped under overflow policy `prune`.

    The default costs make the quantile itself the best capacity of a lone expert (newsvendor:
    `spill / (pad + spill) = 0.9`).
    """

    name: str = "quantile"
    quantile: float = 0.9
    levels: int = 3
    grain: int = GRAIN
    pad_cost: float = 1.0
    spill_cost: float = 9.0

    @property
    def papers_base(self) -> bool:
        """Whether the base is `B/E`, not the mean load."""
        return self.name.endswith("_paper")

    def __post_init__(self) -> None:
        if self.name not in TIER_POLICIES:
            raise UsageError(f"tiers {self.name!r} is unknown; use one of {', '.join(TIER_POLICIES)}")
        if not 0 < self.quantile <= 1:
            raise UsageError(f"the tier quantile {self.quantile} is outside (0, 1]; use a value like 0.9")
        if self.levels < 1 or self.grain < GRAIN or self.grain % GRAIN:
            raise UsageError(
                f"{self.levels} levels of grain {self.grain} are impossible; "
                f"use at least one level and a multiple of {GRAIN}"
            )
        if min(self.pad_cost, self.spill_cost) < 0:
            raise UsageError("tier costs are negative; use costs of zero or more")


class ExpectedRows(NamedTuple):
    """Rows of one launch, as means over the load samples."""

    rows: float  # computed, pads included: the sum of the capacities
    pads: float  # computed for nothing
    spilled: float  # pairs of hot experts beyond capacity, computed locally


def check_loads(loads: np.ndarray) -> np.ndarray:
    """Loads as float64 `(S, E)`. Raises PreparedError where they are not counts of at least one chunk."""
    loads = np.asarray(loads)
    if loads.ndim != 2 or 0 in loads.shape or loads.dtype.kind not in "biuf":
        raise PreparedError(
            f"expert loads have shape {loads.shape} and type {loads.dtype}, not (samples, experts) numbers; "
            "calibrate again"
        )
    loads = loads.astype(np.float64)
    if not np.isfinite(loads).all() or (loads < 0).any():
        raise PreparedError("expert loads hold negative or non-finite counts; calibrate again")
    return loads


def round_up(rows: int, grain: int = GRAIN) -> int:
    """The least multiple of `grain` that holds `rows`."""
    return -(-rows // grain) * grain


class TierChooser:
    """Chooses capacities for any hot set of one site.

    Args:
        loads: `(S, E)` pairs routed to each expert, S >= 1 samples of one chunk size.
        chunk: tokens a chunk; no capacity exceeds it rounded up to the grain.
        policy: how to choose.

    """

    needs: np.ndarray  # (E,) rows that cover the quantile, multiples of the grain; 0 for experts never routed to

    def __init__(self, loads: np.ndarray, chunk: int, policy: TierPolicy) -> None:
        loads = check_loads(loads)
        if chunk < 1:
            raise UsageError(f"a chunk of {chunk} tokens is impossible; use at least 1")
        self._policy = policy
        # An order statistic, not an interpolation: a load of exactly 32 rows needs 32, never 64.
        typical = np.quantile(loads, policy.quantile, axis=0, method="inverted_cdf")  # (E,)
        needs = np.ceil(typical / policy.grain).astype(np.int64) * policy.grain
        needs = np.clip(needs, policy.grain, round_up(chunk, policy.grain))
        self.needs = np.where(loads.any(axis=0), needs, 0)
        self._chunk = chunk
        self._mean = loads.mean()  # k*B/E
        self._base = chunk / loads.shape[1] if policy.papers_base else self._mean
        self._typical = typical
        busiest = np.argsort(-loads.mean(axis=0), kind="stable")[: max(1, loads.shape[1] // 4)]
        self._busiest = np.isin(np.arange(loads.shape[1]), busiest)  # (E,) the top quarter
        self._levels = np.unique(self.needs[self.needs > 0])  # (L,) ascending
        self._costs = np.empty((loads.shape[1], len(self._levels)))  # (E, L)
        for j, level in enumerate(self._levels):
            pads = np.maximum(level - loads, 0).mean(axis=0)
            spilled = np.maximum(loads - level, 0).mean(axis=0)
            self._costs[:, j] = policy.pad_cost * pads + policy.spill_cost * spilled

    def capacities(self, experts: Sequence[int] | np.ndarray) -> np.ndarray:
        """Capacity of every expert `(E,)`: of `experts` by the policy, 0 (stays local) for all others."""
        chosen = np.zeros_like(self.needs)
        asked = np.asarray(experts, dtype=np.int64)
        hot = asked[self.needs[asked] > 0]
        if len(hot) and self._policy.name.startswith("quartile4x"):
            chosen[hot] = np.where(self._busiest[hot], self._rows(4 * self._base), self._rows(self._base))
        elif len(hot) and self._policy.name == "uniform_paper":
            chosen[hot] = self._rows(self._base * self._typical[hot].max() / self._mean)
        elif len(hot):
            needs = self.needs[hot]
            levels = self._best_levels(hot, needs)
            chosen[hot] = levels[np.searchsorted(levels, needs)]
        return chosen

    def _rows(self, load: float) -> int:
        """A capacity for a load: a multiple of the grain, at least one, that holds no more than a chunk."""
        grain = self._policy.grain
        whole = int(np.ceil(round(load, 6)))  # 32.000000000000004 rows are 32
        return min(max(round_up(whole, grain), grain), round_up(self._chunk, grain))

    def _best_levels(self, experts: np.ndarray, needs: np.ndarray) -> np.ndarray:
        """The cheapest levels, ascending, by exact dynamic programming over the distinct needs.

        Levels other than needs are not tried: with the default costs a row beyond the covered need costs more
        in pads than it saves in spills.
        """
        present = np.unique(needs)  # (n,)
        if self._policy.name == "uniform" or self._policy.levels == 1 or len(present) == 1:
            return present[-1:]
        n = len(present)
        columns = np.searchsorted(self._levels, present)
        by_need = np.zeros((n, n))  # [u, j]: experts of need u placed at level j
        np.add.at(by_need, np.searchsorted(present, needs), self._costs[experts][:, columns])
        total = by_need.cumsum(axis=0)  # [u, j]: experts of need <= u placed at level j
        own = total.diagonal()
        # step[i, j]: needs i+1..j placed at level j, after a lower level i.
        step = np.where(np.arange(n)[:, None] < np.arange(n), own - total, np.inf)
        best = own.copy()  # [j]: needs 0..j covered, j the highest level, with the levels used so far
        ends, parents = [best[-1]], []
        for _ in range(1, min(self._policy.levels, n)):
            through = best[:, None] + step
            parents.append(through.argmin(axis=0))
            best = through.min(axis=0)
            ends.append(best[-1])
        used = int(np.argmin(ends))  # fewest levels on ties
        at, picks = n - 1, [n - 1]
        for parent in reversed(parents[:used]):
            at = int(parent[at])
            picks.append(at)
        return present[picks[::-1]]


def choose_capacities(loads: np.ndarray, chunk: int, policy: TierPolicy | None = None) -> np.ndarray:
    """Capacity of every expert `(E,)` as if all were hot; experts never routed to get 0. See `TierPolicy`."""
    chooser = TierChooser(loads, chunk, policy or TierPolicy())
    return chooser.capacities(np.arange(len(chooser.needs)))


def expected(loads: np.ndarray, capacities: np.ndarray) -> ExpectedRows:
    """Rows, pads and spilled pairs of one launch, means over the samples.

    Experts of capacity 0 are cold: their pairs are local by plan and count in none of the three.
    """
    loads = check_loads(loads)
    capacities = np.asarray(capacities)
    hot = capacities > 0
    surplus = loads[:, hot] - capacities[hot]  # (S, H)
    samples = len(loads)
    return ExpectedRows(
        rows=float(capacities[hot].sum()),
        pads=float(np.maximum(-surplus, 0).sum() / samples),
        spilled=float(np.maximum(surplus, 0).sum() / samples),
    )
