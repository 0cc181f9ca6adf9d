"""Small unsigned numbers packed into bytes, as Core ML keeps them: little-endian, without gaps.

The lowest bit comes first; a number that does not fit into what is left of a byte goes on in the lowest bits of the
next (coremltools' `pack_elements_into_bits`, ours is a hundred times faster). Knows nothing of programs.
"""

from __future__ import annotations

import numpy as np


def packed_bytes(bits: int, count: int) -> int:
    """Bytes that `count` numbers of `bits` bits take."""
    return -(-bits * count // 8)


def pack(values: np.ndarray, bits: int) -> np.ndarray:
    """`values`, any shape of uint8 below `2**bits`, as `(packed_bytes,)` uint8. Eight numbers fill `bits` bytes."""
    flat = np.ascontiguousarray(values, np.uint8).reshape(-1)
    if bits == 8:
        return flat
    eights = np.zeros((-(-flat.size // 8), 8), np.uint8)
    eights.reshape(-1)[: flat.size] = flat
    words = np.zeros(len(eights), "<u8")
    for i in range(8):
        words |= eights[:, i].astype("<u8") << np.uint64(bits * i)
    packed = words.view(np.uint8).reshape(-1, 8)[:, :bits]
    return packed.reshape(-1)[: packed_bytes(bits, flat.size)]


def unpack(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The `(count,)` uint8 numbers in `packed`, `(packed_bytes,)` uint8."""
    if bits == 8:
        return np.asarray(packed)[:count]
    groups = -(-count // 8)
    padded = np.zeros(groups * bits, np.uint8)
    padded[: packed.size] = packed
    words = np.zeros((groups, 8), np.uint8)
    words[:, :bits] = padded.reshape(groups, bits)
    whole = words.reshape(-1).view("<u8")
    values = np.empty((groups, 8), np.uint8)
    for i in range(8):
        values[:, i] = (whole >> np.uint64(bits * i)) & np.uint64((1 << bits) - 1)
    return values.reshape(-1)[:count]


def signed(values: np.ndarray, bits: int) -> np.ndarray:
    """Unsigned numbers of `bits` bits read as two's complement, int8."""
    shift = 8 - bits
    return (values << shift).astype(np.uint8).view(np.int8) >> shift
