"""Blockwise int4: a matrix as `scale * (code - offset)`, codes 0 to 15, a scale and an offset per block of a row.

A matrix that was quantised in steps already (MLX affine of 4 bits and fewer) is recognised by its values alone: where
the values of every block lie on up to 16 evenly spaced numbers, their places are the codes. So the model's own
quantisation is reused whichever way the matrix came here, scaled by a power of two included. Any other block is
quantised by least squares. Knows matrices, not programs.

The arithmetic is float32, rounded to float16 at the end. How near that comes depends on what the model's scales were
stored in:

* bfloat16: bit for bit the float16 nearest to MLX's weight, in blocks with values on both sides of zero (the steps of a
  product of 8-bit numbers are wide enough that float32 reaches what MLX computes, ties included);
* float16, and blocks on one side of zero: as near to MLX's weight as the nearest float16, up to 2**-22 of the block's
  largest weight; of two that are equally near it may be the other;
* float32: the scale has to be rounded to float16; weights are within one step of float16.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

LEVELS = 16
STORED_SIZES = (128, 64, 32)  # group sizes of MLX's affine quantisation
OWN_SIZE = 32  # block size of a matrix that we quantise ourselves
LARGEST_SIZE = 64
_SAMPLE = 256  # blocks looked at before a whole matrix is searched for steps
_EVEN = 2e-3  # how far from even steps values may lie, in steps
_RANGES = (1.0, 0.95, 0.9, 0.85, 0.8)  # shares of a block's range that are tried
_EXACT_OFFSET = 11  # bits of `code - offset`, so that float16 holds it


class Blocks(NamedTuple):
    """A matrix as `scale * (code - offset)`; n blocks a row, of `in / n` columns each."""

    codes: np.ndarray  # (out, in) uint8, 0 to 15
    scale: np.ndarray  # (out, n) float16
    offset: np.ndarray  # (out, n) float16, or float32 where that is nearer


def blocks_of(matrix: np.ndarray) -> Blocks:
    """The blocks of a finite float32 matrix `(out, in)` within float16's range."""
    for size in STORED_SIZES:
        if matrix.shape[1] % size == 0:
            rows = matrix.reshape(-1, size)
            if _even_steps(rows[:: -(-len(rows) // _SAMPLE)])[1].mean() > 0.5:
                return _stored(matrix, size)
    rows = matrix.reshape(-1, block_size(matrix.shape[1]))
    return _assembled(matrix, *_least_squares(rows), np.dtype(np.float16))


def block_size(columns: int) -> int:
    """Block size of an input width: 32 where it divides it, else its largest divisor that is a multiple of 8 and at
    most 64, else the whole row.
    """
    if columns % OWN_SIZE == 0:
        return OWN_SIZE
    return next((size for size in range(LARGEST_SIZE, 0, -8) if columns % size == 0), columns)


def dequantize(blocks: Blocks) -> np.ndarray:
    """The matrix in float32, not yet rounded to float16."""
    out, count = blocks.scale.shape
    codes = blocks.codes.reshape(out, count, -1)
    values = codes - blocks.offset[..., None].astype(np.float32)
    values *= blocks.scale[..., None].astype(np.float32)
    return np.asarray(values.reshape(out, -1), np.float32)


def _assembled(matrix: np.ndarray, codes: np.ndarray, scale: np.ndarray, offset: np.ndarray, dtype: np.dtype) -> Blocks:
    shape = (len(matrix), -1)
    return Blocks(
        codes.reshape(matrix.shape), scale.astype(np.float16).reshape(shape), offset.astype(dtype).reshape(shape)
    )


# ------------------------------------------------------------------------------------- matrices quantised before


def _stored(matrix: np.ndarray, size: int) -> Blocks:
    """Blocks of a matrix whose values lie on even steps; single blocks that do not are quantised anew."""
    rows = matrix.reshape(-1, size)
    (codes, scale, offset), found = _even_steps(rows)
    if not found.all():
        codes[~found], scale[~found], offset[~found] = _least_squares(rows[~found])
    scale = scale.astype(np.float16).astype(np.float32)
    half, full = offset.astype(np.float16), offset.astype(np.float32)
    misses = _misses(rows, codes, scale, half.astype(np.float32))
    if misses.any():
        misses_of_full = _nudge(rows, codes, scale, full)
        if misses_of_full.sum() < misses.sum():
            return _assembled(matrix, codes, scale, full, np.dtype(np.float32))
    return _assembled(matrix, codes, scale, half, np.dtype(np.float16))


def _misses(rows: np.ndarray, codes: np.ndarray, scale: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Weights of each block that are not the nearest float16, `(n,)`."""
    got = (codes - offset[:, None]) * scale[:, None]
    return np.asarray((got.astype(np.float16) != rows.astype(np.float16)).sum(axis=1))


def _nudge(rows: np.ndarray, codes: np.ndarray, scale: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Move offsets to a neighbouring float32 where blocks get better by it, in place; their misses then."""
    misses = _misses(rows, codes, scale, offset)
    at = np.flatnonzero(misses)
    middle = offset[at]
    for side in (np.float32(-np.inf), np.float32(np.inf)):
        moved = np.nextafter(middle, side)
        now = _misses(rows[at], codes[at], scale[at], moved)
        better = now < misses[at]
        offset[at[better]], misses[at[better]] = moved[better], now[better]
    return misses


def _even_steps(rows: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
    """`(codes (n, size), scale (n,), offset (n,))` of blocks on even steps, in float64, and which blocks `(n,)` are.

    The step is the least distance between two values, or a fraction of it where not all of them are multiples.
    """
    n = len(rows)
    ordered = np.sort(rows, axis=1)
    gaps = np.diff(ordered, axis=1)
    least = np.where(gaps > 0, gaps, np.inf).min(axis=1, initial=np.inf).astype(np.float64)
    low = ordered[:, 0].astype(np.float64)
    span = ordered[:, -1] - low
    codes, scale, found = np.zeros(rows.shape, np.uint8), np.ones(n), span == 0
    constant = found & (low != 0)  # a block of one value: code 1 of an offset of 0
    codes[constant], scale[constant] = 1, low[constant]
    left = np.flatnonzero(~found)
    for divisor in range(1, LEVELS):
        levels = np.rint(span[left] / least[left] * divisor)
        left, levels = left[levels < LEVELS], levels[levels < LEVELS]
        if not left.size:
            break
        step = span[left] / levels
        places = (rows[left] - low[left, None]) / step[:, None]
        whole = np.rint(places)
        even = np.abs(places - whole).max(axis=1) < _EVEN
        hits = left[even]
        codes[hits], scale[hits], found[hits] = whole[even], step[even], True
        left = left[~even]
    _finer(codes, scale, found & (span > 0))
    offset = np.where(constant, 0.0, -low / scale)
    return (codes, scale, offset), found


def _finer(codes: np.ndarray, scale: np.ndarray, which: np.ndarray) -> None:
    """Divide steps that float16 does not hold, where a fraction is held: two codes 15 apart look like 1 apart."""
    left = np.flatnonzero(which & (scale.astype(np.float16) != scale))
    highest = codes[left].max(axis=1, initial=0).astype(np.int64)
    for divisor in range(2, LEVELS):
        fits = (highest * divisor < LEVELS) & ((scale[left] / divisor).astype(np.float16) == scale[left] / divisor)
        codes[left[fits]] *= np.uint8(divisor)
        scale[left[fits]] /= divisor
        left, highest = left[~fits], highest[~fits]


# --------------------------------------------------------------------------------------------- all other matrices


def _least_squares(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`(codes (n, size), scale (n,), offset (n,))` of least squared error, among a few ranges for every block.

    For each range the codes give scale and offset by linear regression, and those give the codes. An offset is rounded
    so that float16 holds `code - offset`: float16 and float32 arithmetic then agree.
    """
    low, high = rows.min(axis=1), rows.max(axis=1)
    best = np.full(len(rows), np.inf, np.float32)
    codes, scale, offset = (
        np.zeros(rows.shape, np.uint8),
        np.ones(len(rows), np.float32),
        np.zeros(len(rows), np.float32),
    )
    for share in _RANGES:
        centre, reach = (low + high) / 2, (high - low) * np.float32(share / 2)
        tried = _codes(rows, *_rounded(2 * reach / (LEVELS - 1), centre - reach))
        fitted = _rounded(*_regression(rows, tried))
        tried = _codes(rows, *fitted)
        error = np.square((tried - fitted[1][:, None]) * fitted[0][:, None] - rows).sum(axis=1)
        better = error < best
        best[better], codes[better] = error[better], tried[better]
        scale[better], offset[better] = fitted[0][better], fitted[1][better]
    constant = low == high
    codes[constant], scale[constant], offset[constant] = (low[constant] != 0)[:, None], low[constant], 0
    scale[scale == 0] = 1
    return codes, scale, offset


def _codes(rows: np.ndarray, scale: np.ndarray, offset: np.ndarray) -> np.ndarray:
    places = rows / scale[:, None]
    places += offset[:, None]
    return np.asarray(np.clip(np.rint(places, out=places), 0, LEVELS - 1, out=places))


def _regression(rows: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale and base of `rows = base + scale * codes` by least squares, `(n,)` each."""
    codes_mean, rows_mean = codes.mean(axis=1), rows.mean(axis=1)
    centred = codes - codes_mean[:, None]
    scale = (centred * rows).sum(axis=1) / np.maximum(np.square(centred).sum(axis=1), np.float32(1e-12))
    return scale, rows_mean - scale * codes_mean


def _rounded(scale: np.ndarray, base: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale and offset `-base / scale` as a program holds them, in float32."""
    tiny = np.float32(2.0**-24)  # the smallest float16
    scale = np.maximum(scale, tiny).astype(np.float16).astype(np.float32)
    offset = -base / scale
    furthest = np.maximum(np.abs(offset), np.abs(LEVELS - 1 - offset))
    step = np.exp2(np.ceil(np.log2(furthest)) - _EXACT_OFFSET).astype(np.float32)
    return scale, np.clip(np.rint(offset / step) * step, -60000, 60000).astype(np.float32)
