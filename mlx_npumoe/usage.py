"""Records routing in normal use: what a site's calls carry is noted as they pass, and read when it is computed anyway.

Nothing of the model's output depends on it. Knows no files and no models; see `recording.RoutingLog`.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import numpy as np

from .calibration import BLOCK, SAMPLES, SiteProfile, SiteStatistics
from .sites import ExpertSite

PENDING = 64  # calls noted before they are read


class _Noted(NamedTuple):
    """One call, lazy. `rows` are some of its inputs, `at` their places; None in a decode step."""

    chosen: mx.array  # (T, K), -1 for pairs that stand for no expert's work
    gates: mx.array | None  # (T, K)
    rows: mx.array | None  # (N, D)
    at: np.ndarray  # (N - 1,) the last row is the largest
    lots: np.ndarray  # (N - 1,)
    largest: mx.array | None  # () place of the last row
    valid: np.ndarray | None  # (T,) bool


class UseRecorder:
    """Notes the calls of one site and fills its profile. `missed` counts calls that could not be read.

    Prompts are started on at once, so that no graph is held; decode steps are only noted, and read `PENDING` calls
    later.
    """

    def __init__(self, site: ExpertSite, gates_reason: str | None = None) -> None:
        self.site = site
        self.missed = 0
        self._statistics = SiteStatistics(site)
        self.profile.gates_reason = gates_reason
        self._pending: list[_Noted] = []
        self._rest = np.zeros((0, 0), np.int64)  # choices of tokens that do not fill a block yet

    @property
    def profile(self) -> SiteProfile:
        """What was read so far."""
        return self._statistics.profile

    def note(
        self,
        x: mx.array,
        indices: mx.array,
        valid: mx.array | None,
        real: mx.array | None = None,
        gates: mx.array | None = None,
    ) -> None:
        """Note a call on `x` `(T, D)` with experts `indices` `(T, K)`; `valid` `(T,)`, `real` and `gates` `(T, K)`."""
        chosen = indices.astype(mx.int32)
        if real is not None:
            chosen = mx.where(real, chosen, -1)
        if len(indices) == 1:
            self._pending.append(_Noted(chosen, gates, None, np.zeros(0, int), np.zeros(0), None, None))
        else:
            try:
                noted = self._prompt(x, chosen, gates, valid)
                mx.async_eval([a for a in (noted.chosen, noted.gates, noted.rows, noted.largest) if a is not None])
            except (RuntimeError, ValueError):  # traced by mx.compile or another transformation
                self.missed += 1
                return
            self._pending.append(noted)
        if len(self._pending) >= PENDING:
            self.read()

    def _prompt(self, x: mx.array, chosen: mx.array, gates: mx.array | None, valid: mx.array | None) -> _Noted:
        rows = np.ones(len(x), bool) if valid is None else np.array(valid).reshape(-1)
        lots = self._statistics.draw(len(x))
        lots[~rows] = np.inf
        at = np.argsort(lots)[: min(SAMPLES, int(rows.sum()))]
        size = mx.where(mx.array(rows), mx.abs(x).max(axis=-1), -1)
        largest = mx.argmax(size)
        places = mx.concatenate([mx.array(at.astype(np.int32)), largest.astype(mx.int32)[None]])
        return _Noted(chosen, gates, x[places].astype(mx.float32), at, lots[at], largest, rows)

    def read(self) -> None:
        """Take what was noted into the profile."""
        pending, self._pending = self._pending, []
        for noted in pending:
            try:
                chosen = np.array(noted.chosen, np.int64)
                gates = None if noted.gates is None else np.array(noted.gates.astype(mx.float32))
                rows = None if noted.rows is None else np.array(noted.rows)
            except (RuntimeError, ValueError):  # traced, or left unevaluated by a thread that has ended
                self.missed += 1
                continue
            if rows is not None:
                largest = int(np.array(noted.largest))
                last = [] if largest in noted.at else [-1]
                places = np.r_[noted.at, [largest] * len(last)].astype(int)
                keep = np.r_[np.arange(len(noted.at)), last].astype(int)
                lots = np.r_[noted.lots, [np.inf] * len(last)]
                if not len(noted.at):  # nothing but padding
                    continue
                self._statistics.sample(rows[keep], chosen[places], lots)
            if noted.valid is not None:
                chosen = chosen[noted.valid]
                gates = None if gates is None else gates[noted.valid]
            self._statistics.weigh(chosen, gates)
            self._count(chosen)

    def _count(self, chosen: np.ndarray) -> None:
        """Count full blocks; tokens follow each other over calls."""
        together = np.concatenate([self._rest, chosen]) if len(self._rest) else chosen
        full = len(together) - len(together) % BLOCK
        if full:
            self._statistics.count(together[:full])
        self._rest = together[full:]

    def finish(self) -> SiteProfile:
        """Read everything, tails too; the profile."""
        self.read()
        if len(self._rest):
            self._statistics.count(self._rest)
            self._rest = self._rest[:0]
        return self.profile

    def stretch(self, maxima: list[float]) -> None:
        """Take up largest magnitudes."""
        self._statistics.stretch(maxima)
