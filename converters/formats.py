"""Weight formats: how one matrix of an expert becomes a constant of a program.

One small function per format; `emit` picks it by name. Knows matrices and the MIL builder, not experts or groups.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mlx_npumoe.errors import ProgramError
from mlx_npumoe.program import LOWEST_MACOS

from . import bits, blockwise, palettes

INT8_MAX = 127  # symmetric: -128 is not used, so that the zero point is 0


class Int8Matrix(NamedTuple):
    """A matrix as `scale[:, None] * values`, one scale per output channel."""

    values: np.ndarray  # (out, in) int8
    scale: np.ndarray  # (out,) float16


def to_float16(matrix: np.ndarray, name: str) -> np.ndarray:
    """`matrix` as float16. Raises ProgramError where a weight is not finite or out of range."""
    with np.errstate(over="ignore"):
        half = matrix.astype(np.float16)
    if not np.isfinite(half).all():
        raise ProgramError(
            f"{name} has weights that are not finite or lie beyond the float16 range (65504): leave this expert local"
        )
    return half


def quantize_int8(matrix: np.ndarray, name: str) -> Int8Matrix:
    """Symmetric int8 per output channel: `scale = max|w| / 127`, stored as float16.

    The scale is rounded to float16 first and the integers follow from the rounded scale, so that its rounding adds
    no error. Raises ProgramError where a weight is not finite or out of range.
    """
    largest = np.abs(matrix).max(axis=1)  # (out,)
    exact = largest / np.float32(INT8_MAX)
    scale = to_float16(exact, name)
    short = scale.astype(np.float32) < exact  # rounded down: the largest weight would fall outside the range
    scale[short] = np.nextafter(scale[short], np.float16(np.inf))
    scale[scale == 0] = 1  # a channel of zeros
    values = np.rint(matrix / scale.astype(np.float32)[:, None])  # (out, in)
    to_float16(values.max(axis=1) * scale.astype(np.float32), name)
    return Int8Matrix(np.clip(values, -INT8_MAX, INT8_MAX).astype(np.int8), scale)


def _kernel(matrix: np.ndarray) -> np.ndarray:
    """A linear layer's `(out, in)` as the weight of a 1x1 convolution, `(out, in, 1, 1)`."""
    return np.ascontiguousarray(matrix)[:, :, None, None]


def _emit_fp16(mb: Any, matrix: np.ndarray, name: str) -> Any:
    return mb.const(val=_kernel(to_float16(matrix, name)), name=name)


def _emit_int8(mb: Any, matrix: np.ndarray, name: str) -> Any:
    values, scale = quantize_int8(matrix, name)
    return mb.constexpr_affine_dequantize(
        quantized_data=_kernel(values), zero_point=np.int8(0), scale=scale, axis=0, name=name
    )


def _emit_lut(mb: Any, matrix: np.ndarray, name: str, width: int) -> Any:
    from coremltools.converters.mil.mil import types
    from coremltools.converters.mil.mil.block import curr_opset_version

    indices, table = palettes.palette(to_float16(matrix, name), width)
    if (
        curr_opset_version().name == "iOS18"
    ):  # the operation of that name changed: numbers of few bits, one table a block
        dtypes = {8: np.uint8, 6: types.np_uint6_dtype, 4: types.np_uint4_dtype}
        return mb.constexpr_lut_to_dense(
            indices=_kernel(indices).astype(dtypes[width]), lut=table.reshape(1, 1, 1, 1, -1, 1), name=name
        )
    return mb.constexpr_lut_to_dense(
        indices=bits.pack(indices, width), lut=table, shape=np.array([*matrix.shape, 1, 1], np.uint32), name=name
    )


def _emit_int4(mb: Any, matrix: np.ndarray, name: str) -> Any:
    from coremltools.converters.mil.mil import types

    to_float16(matrix, name)
    codes, scale, offset = blockwise.blocks_of(matrix)
    return mb.constexpr_blockwise_shift_scale(
        data=_kernel(codes).astype(types.np_uint4_dtype), scale=_kernel(scale), offset=_kernel(offset), name=name
    )


EMITTERS: dict[str, Callable[[Any, np.ndarray, str], Any]] = {
    "fp16": _emit_fp16,
    "int8": _emit_int8,
    "lut8": partial(_emit_lut, width=8),
    "lut6": partial(_emit_lut, width=6),
    "lut4": partial(_emit_lut, width=4),
    "int4": _emit_int4,
}

# The operation a weight of each format comes from, and the values of its table where it has one.
OPERATIONS: dict[str, tuple[str, int | None]] = {
    "fp16": ("const", None),
    "int8": ("constexpr_affine_dequantize", None),
    "lut8": ("constexpr_lut_to_dense", 256),
    "lut6": ("constexpr_lut_to_dense", 64),
    "lut4": ("constexpr_lut_to_dense", 16),
    "int4": ("constexpr_blockwise_shift_scale", None),
}

# The coremltools deployment target that stands for each lowest macOS. Float16 ports, constexpr_affine_dequantize and
# constexpr_lut_to_dense came with macOS 13, constexpr_blockwise_shift_scale and numbers of 4 bits with macOS 15.
_TARGET_OF = {"13.0": "iOS16", "15.0": "iOS18"}
TARGETS: dict[str, tuple[str, str]] = {weights: (_TARGET_OF[macos], macos) for weights, macos in LOWEST_MACOS.items()}


def lowest_macos(weights: str) -> str:
    """Lowest macOS that loads programs of this weight format."""
    return TARGETS[weights][1]


def emit(mb: Any, weights: str, matrix: np.ndarray, name: str) -> Any:
    """A weight of a 1x1 convolution, `(out, in, 1, 1)`, as a variable of the program under construction.

    `matrix` is `(out, in)` float32. Raises ProgramError where it cannot be represented.
    """
    return EMITTERS[weights](mb, matrix, name)
