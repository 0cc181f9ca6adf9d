"""Palettes: a matrix as indices into one table of float16 values, the table by weighted k-means in one dimension.

A matrix of no more distinct float16 values than the table holds is kept exactly. Otherwise the table comes from
dynamic programming over the sorted values (optimal where there are at most POINTS distinct ones, else over POINTS
bins of them), improved by Lloyd's iteration over all values. Nothing is random: the same matrix gives the same
palette. Knows matrices, not programs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

POINTS = 1024  # values or bins the dynamic programming sees; twice as many lower the error by 0.3 % at most (8 bits)
_SPARE = 8  # bins a level may take, in times the average
_LLOYD_STEPS = 200
_NEGATIVE_ZERO = 0x8000


class Palette(NamedTuple):
    """A matrix as `table[indices]`."""

    indices: np.ndarray  # (out, in) uint8
    table: np.ndarray  # (2**bits,) float16, ascending, its last value repeated where fewer are needed


def palette(half: np.ndarray, bits: int) -> Palette:
    """The palette of `half`, `(out, in)` finite float16, with the least squared error we find."""
    patterns = np.ascontiguousarray(half).view(np.uint16)
    counts = np.bincount(patterns.reshape(-1), minlength=1 << 16)
    counts[0] += counts[_NEGATIVE_ZERO]
    counts[_NEGATIVE_ZERO] = 0
    present = np.flatnonzero(counts).astype(np.uint16)
    values = present.view(np.float16).astype(np.float64)
    order = np.argsort(values)
    present, values = present[order], values[order]
    weights = counts[present].astype(np.float64)
    size = 1 << bits
    levels = values if values.size <= size else _levels(values, weights, size)
    table = np.unique(levels.astype(np.float16))
    middles = _middles(table.astype(np.float64))
    lookup = np.zeros(1 << 16, np.uint8)  # by float16 pattern
    lookup[present] = np.searchsorted(middles, values)
    lookup[_NEGATIVE_ZERO] = lookup[0]
    return Palette(lookup[patterns], np.pad(table, (0, size - table.size), mode="edge"))


def _middles(levels: np.ndarray) -> np.ndarray:
    return (levels[1:] + levels[:-1]) / 2


def _levels(values: np.ndarray, weights: np.ndarray, size: int) -> np.ndarray:
    """`size` levels for ascending distinct `values`."""
    centre = np.average(values, weights=weights)  # sums of squares about it lose least
    x = values - centre
    sums = np.pad(np.cumsum([weights, weights * x, weights * x * x], axis=1), ((0, 0), (1, 0)))  # (3, n+1)
    exact = values.size <= POINTS
    points = np.arange(values.size + 1) if exact else _bins(values, weights)
    longest = points.size if exact else _SPARE * POINTS // size
    starts = points[_best_cuts(sums[:, points], size, longest)]  # (size,) where each level's values begin
    for _ in range(_LLOYD_STEPS):
        moved = np.append(0, np.searchsorted(x, _middles(_means(sums, starts))))
        if np.array_equal(moved, starts) or (np.diff(moved, append=x.size) == 0).any():
            break
        starts = moved
    return centre + _means(sums, starts)


def _means(sums: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Mean of each run that begins at `starts`."""
    weight, first, _ = np.diff(sums[:, np.append(starts, sums.shape[1] - 1)], axis=1)
    return np.asarray(first / weight)


def _bins(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Borders of at most POINTS bins, as fine as levels should lie: by the cube root of the density (Panter and Dite).

    Every level of a good table then takes about as many bins as any other. No value counts for more than four bins, so
    that the gap before an outlier takes none from the rest; a quarter of the bins goes evenly over the values.
    """
    root = np.cbrt(weights) * np.gradient(values) ** (2 / 3)
    for _ in range(8):
        root = np.minimum(root, 4 * root.sum() / POINTS)
    share = (np.cumsum(root) - root / 2) / root.sum()
    place = 0.75 * share + 0.25 * np.arange(values.size) / values.size
    return np.append(np.flatnonzero(np.diff(np.floor(place * POINTS), prepend=-1)), values.size)


def _best_cuts(sums: np.ndarray, size: int, longest: int) -> np.ndarray:
    """Where to cut n sorted points into `size` runs with the least squared error: the `(size,)` starts of the runs.

    Dynamic programming: `best[k][j]`, the error of the first j points in k+1 runs, is the least of
    `best[k-1][i] + cost(i, j)` over i. No run is longer than `longest` points.
    """
    n = sums.shape[1] - 1
    size = min(size, n)
    longest = min(longest, n)
    ends = np.arange(n + 1)[:, None]
    begins = ends - np.arange(1, longest + 1)  # (n+1, longest) where a run that ends at j may begin
    cost = np.where(begins < 0, np.inf, _cost(sums, np.maximum(begins, 0), ends))
    best = np.where(ends[:, 0] > longest, np.inf, _cost(sums, np.zeros(n + 1, np.int64), ends[:, 0]))
    lengths = np.zeros((size, n + 1), np.int64)
    for k in range(1, size):
        padded = np.concatenate([np.full(longest, np.inf), best])
        totals = np.lib.stride_tricks.sliding_window_view(padded[:-1], longest)[:, ::-1] + cost[: n + 1]
        lengths[k] = totals.argmin(axis=1)
        best = np.take_along_axis(totals, lengths[k][:, None], 1)[:, 0]
    starts = np.zeros(size, np.int64)
    end = n
    for k in range(size - 1, 0, -1):
        end -= int(lengths[k, end]) + 1
        starts[k] = end
    return starts


def _cost(sums: np.ndarray, i: np.ndarray, j: np.ndarray) -> np.ndarray:
    """Squared error of points i to j-1 about their mean."""
    weight, first, second = (part[j] - part[i] for part in sums)
    return np.asarray(second - first * first / np.maximum(weight, 1e-300))
