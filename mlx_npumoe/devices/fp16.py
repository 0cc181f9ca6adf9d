"""float16 rounding and conversion of float32 arrays, fast enough to happen at every operation border.

NumPy's own float16 conversions go one number at a time. What is here does the same with integer and float32 passes,
bit for bit: round half to even, subnormals, signed zeros, overflow to infinity.
"""

from __future__ import annotations

import numpy as np

BLOCK = 1 << 16  # elements rounded at a time, so that value and scratch stay in the cache
_HUGE = 142 << 23  # exponent of 2**15: from here on numbers may overflow, or be infinite or NaN
_NEVER_ZERO = 103 << 23  # exponent of 2**-24: from here on nothing rounds to zero
_EXPONENT = np.int32(0x7F800000)
_SIGN = np.int32(-(1 << 31))
_MAGNITUDE = np.int32(0x7FFFFFFF)
_SMALLEST = np.int32(113 << 23)  # exponent of 2**-14, the smallest normal float16
_MAGIC = np.int32((13 << 23) | (1 << 22))  # 2**e -> 1.5 * 2**(e+13)


class RoundingScratch:
    """Blocks of working memory for what is below. Not to be shared between threads."""

    def __init__(self) -> None:
        self.magic = np.empty(BLOCK, np.float32)
        self.sign = np.empty(BLOCK, np.int32)
        self.smallest = np.full(BLOCK, _SMALLEST)  # NumPy's maximum with a scalar is 3 times slower


def round_to_fp16(values: np.ndarray, scratch: RoundingScratch) -> None:
    """Round `values`, a contiguous `(n,)` float32 array, to the nearest float16 numbers, in place.

    Adding and taking away `1.5 * 2**(e+13)` rounds a number of exponent e to the 11 bits of float16 (ours; the trick
    is the classic magic-number rounding with the magic number chosen per element). Exponents below -14 share the
    spacing of -14, which makes subnormals right. Blocks with numbers of 2**15 and over, or NaN, go through NumPy.
    """
    for start in range(0, values.size, BLOCK):
        x = values[start : start + BLOCK]
        bits = x.view(np.int32)
        magic = scratch.magic[: x.size]
        sign = scratch.sign[: x.size]
        exponent = magic.view(np.int32)
        np.bitwise_and(bits, _EXPONENT, out=exponent)
        if exponent.max() >= _HUGE:
            x[:] = x.astype(np.float16)
            continue
        zeros = exponent.min() < _NEVER_ZERO
        if zeros:
            np.bitwise_and(bits, _SIGN, out=sign)
        np.maximum(exponent, scratch.smallest[: x.size], out=exponent)
        np.add(exponent, _MAGIC, out=exponent)
        np.add(x, magic, out=x)
        np.subtract(x, magic, out=x)
        if zeros:
            np.bitwise_or(bits, sign, out=bits)  # a negative number that rounds to zero keeps its sign


def narrow(values: np.ndarray, out: np.ndarray, scratch: RoundingScratch) -> None:
    """Write `values`, a contiguous `(n,)` float32 array, into `out`, `(n,)` float16, rounded; `values` is used up.

    As above, with the magic number `2**(e+13)` on magnitudes: what the sum's lowest bits then hold is the float16's
    significand, hidden bit included, and only exponent and sign are to be put in front of it.
    """
    for start in range(0, values.size, BLOCK):
        x = values[start : start + BLOCK]
        bits = x.view(np.int32)
        magic = scratch.magic[: x.size]
        place = magic.view(np.int32)
        sign = scratch.sign[: x.size]
        np.bitwise_and(bits, _EXPONENT, out=place)
        if place.max() >= _HUGE:
            np.copyto(out[start : start + BLOCK], x, casting="same_kind")
            continue
        np.right_shift(bits, 16, out=sign)
        np.bitwise_and(sign, np.int32(0x8000), out=sign)
        np.maximum(place, scratch.smallest[: x.size], out=place)
        np.add(place, np.int32(13 << 23), out=place)
        np.bitwise_and(bits, _MAGNITUDE, out=bits)
        np.add(x, magic, out=x)
        np.subtract(bits, place, out=bits)  # the significand, 0 to 2048
        np.right_shift(place, 13, out=place)
        np.add(bits, place, out=bits)
        np.subtract(bits, np.int32(126 << 10), out=bits)  # exponent e + 140 becomes e + 14: the hidden bit adds 1
        np.bitwise_or(bits, sign, out=bits)
        np.copyto(out[start : start + BLOCK].view(np.int16), bits, casting="unsafe")


def widen(half: np.ndarray, out: np.ndarray) -> None:
    """Write `half` (float16) into `out` (float32, contiguous, same shape), exactly."""
    if half.flags.c_contiguous:
        source, target = half.reshape(-1), out.reshape(-1)
        for start in range(0, source.size, BLOCK):
            _widen_block(source[start : start + BLOCK], target[start : start + BLOCK])
    else:
        _widen_block(half, out)


def _widen_block(half: np.ndarray, out: np.ndarray) -> None:
    if half.size and (half.view(np.int16).max() >= 0x7C00 or half.view(np.uint16).max() >= 0xFC00):
        np.copyto(out, half)  # infinity and NaN have no place in the arithmetic below
        return
    bits = out.view(np.int32)
    np.copyto(bits, half.view(np.int16))
    np.left_shift(bits, 13, out=bits)
    np.bitwise_and(bits, np.int32(-0x70002000), out=bits)  # sign, and the 15 bits in their float32 places
    np.multiply(out, np.float32(2.0**112), out=out)  # from float16's exponent bias to float32's
