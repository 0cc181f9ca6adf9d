"""Compressed weights of a program: what Core ML's `constexpr` operations make of their constants.

Reads the three kinds our formats use, in every form coremltools writes (macOS 13 and macOS 15), blocks along any axis
and tables of vectors included. Knows operations and arrays, not formats, experts or devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mlx_npumoe.errors import ProgramError

from . import bits
from .mil import Constant, Graph, Operation

Part = Callable[[str], np.ndarray]


def decompressed(graph: Graph, op: Operation) -> np.ndarray:
    """The weight `op` stands for, computed in float32 and not yet rounded to its own type.

    Raises ProgramError where a part is missing or the parts do not fit together.
    """

    def part(name: str) -> np.ndarray:
        found: Any = op.constants.get(name) or next(iter(op.inputs.get(name, ())), None)
        if found is None:
            raise ValueError(f"it has no {name}")
        constant = graph.find_constant(found)
        if constant is not None:
            return constant.array()
        source = graph.producers.get(found)
        if source is None or source.kind not in KINDS:
            raise ValueError(f"its {name} is not a constant")
        inner = decompressed(graph, source)
        return inner.astype(np.float16) if source.outputs[0].type.dtype == "FLOAT16" else inner

    try:
        values = KINDS[op.kind](op, part)
        wanted = op.outputs[0].type.shape
        if values.shape != wanted:
            raise ValueError(f"it has the shape {values.shape} where {wanted} is declared")
    except (ValueError, IndexError) as error:
        raise ProgramError(f"the weight {op.name} of {graph.source} is damaged: {error}; prepare it again") from error
    return values


def _has(op: Operation, name: str) -> bool:
    return name in op.constants or name in op.inputs


def _affine(op: Operation, part: Part) -> np.ndarray:
    """`(data - zero_point) * scale`, each of them one number or one per channel of `axis`."""
    values = part("quantized_data").astype(np.float32)
    shape = [1] * values.ndim
    shape[int(part("axis"))] = -1

    def along_axis(name: str) -> np.ndarray:
        array = part(name).astype(np.float32)
        return array.reshape(shape) if array.ndim else array

    values -= along_axis("zero_point")
    values *= along_axis("scale")
    return values


def _lut(op: Operation, part: Part) -> np.ndarray:
    """A value of a table for every index: one table and packed indices (macOS 13), or tables by block (macOS 15)."""
    return _flat_lut(part) if _has(op, "shape") else _blocked_lut(op, part)


def _flat_lut(part: Part) -> np.ndarray:
    table = part("lut").astype(np.float32)
    shape = tuple(int(d) for d in np.atleast_1d(part("shape")))
    count, width = int(np.prod(shape)), (table.size - 1).bit_length()
    packed = part("indices")
    if table.ndim != 1 or table.size not in (2, 4, 16, 64, 256):
        raise ValueError(f"its table has the shape {table.shape}")
    if packed.shape != (bits.packed_bytes(width, count),):
        raise ValueError(f"it has {packed.size} bytes of indices where {bits.packed_bytes(width, count)} are due")
    return np.asarray(table[bits.unpack(packed, width, count)]).reshape(shape)


def _blocked_lut(op: Operation, part: Part) -> np.ndarray:
    indices, tables = part("indices"), part("lut").astype(np.float32)
    if tables.ndim != indices.ndim + 2:
        raise ValueError(f"its tables have the shape {tables.shape} for indices of {indices.shape}")
    *counts, size, length = tables.shape
    if indices.size and int(indices.max()) >= size:
        raise ValueError(f"an index of {int(indices.max())} is beyond its table of {size} values")
    split, across = _in_blocks(indices.shape, tuple(counts), "tables")
    which = np.arange(int(np.prod(counts))).reshape(across)
    found = tables.reshape(-1, size, length)[which, indices.reshape(split)].reshape(*indices.shape, length)
    if length == 1:
        return np.asarray(found[..., 0])
    axis = int(part("vector_axis")) % indices.ndim
    shape = list(indices.shape)
    shape[axis] *= length
    return np.moveaxis(found, -1, axis + 1).reshape(shape)


def _blockwise(op: Operation, part: Part) -> np.ndarray:
    """`scale * (data - offset)`, a scale and an offset per block; blocks divide every axis evenly."""
    data, scale = part("data"), part("scale").astype(np.float32)
    split, across = _in_blocks(data.shape, scale.shape, "scales")
    values = data.astype(np.float32).reshape(split)
    if _has(op, "offset"):
        offset = part("offset").astype(np.float32)
        if offset.shape != scale.shape:
            raise ValueError(f"its offsets have the shape {offset.shape}, its scales {scale.shape}")
        values -= offset.reshape(across)
    values *= scale.reshape(across)
    return values.reshape(data.shape)


def _in_blocks(shape: tuple[int, ...], counts: tuple[int, ...], what: str) -> tuple[list[int], list[int]]:
    """`shape` with every axis cut in (blocks, size of a block), and the shape of one value a block to go with it."""
    if len(shape) != len(counts) or any(count < 1 or size % count for size, count in zip(shape, counts, strict=True)):
        raise ValueError(f"{what} of the shape {counts} do not divide {shape} evenly")
    split = [n for size, count in zip(shape, counts, strict=True) for n in (count, size // count)]
    return split, [n for count in counts for n in (count, 1)]


KINDS: dict[str, Callable[[Operation, Part], np.ndarray]] = {
    "constexpr_affine_dequantize": _affine,
    "constexpr_lut_to_dense": _lut,
    "constexpr_blockwise_shift_scale": _blockwise,
}


def is_compressed(op: Operation) -> bool:
    """Whether `op` decompresses a weight."""
    return op.kind in KINDS


def table_size(op: Operation) -> int | None:
    """Values of a `constexpr_lut_to_dense` table; None for other operations."""
    found: Any = op.constants.get("lut") or next(iter(op.inputs.get("lut", ())), None)
    if op.kind != "constexpr_lut_to_dense" or not isinstance(found, Constant):
        return None
    return found.type.shape[-2 if len(found.type.shape) > 1 else -1]
