"""Finding and swapping sites, reading expert weights, fingerprints. Run: pytest tests/test_sites.py"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

import tiny_models
from mlx_npumoe import loading
from mlx_npumoe.activations import SILU
from mlx_npumoe.errors import ModelError
from mlx_npumoe.fingerprint import full_hash, loaded_hash, sampled_hash, stored_dtypes
from mlx_npumoe.routed import RoutedExperts
from mlx_npumoe.sites import find_sites, require_sites, swap
from mlx_npumoe.weights import Checkpoint, ExpertWeights

FAMILIES = tiny_models.FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_sites_in_layer_order_with_their_shapes(family: str, bits: int | None) -> None:
    sites = list(find_sites(tiny_models.build(family, quantize=bits)))
    assert [s.layer for s in sites] == [0, 1, 2]
    E, F = (8, 64) if family == "qwen3_moe" else (4, 96)
    assert {(s.experts, s.hidden, s.width, s.activation) for s in sites} == {(E, 64, F, SILU)}
    assert all(s.local_reason is None for s in sites)
    assert sites[0].format == ("float32" if bits is None else f"affine {bits}-bit g32")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stand_in_changes_neither_paths_nor_numbers(family: str) -> None:
    model = tiny_models.build(family)
    tokens = mx.array([[3, 9, 27, 81, 243 % 300, 7]])
    before, paths = model(tokens), [p for p, _ in tree_flatten(model.parameters())]
    stock = {s: m for s, m in find_sites(model).items()}
    stand_ins = {s.path: RoutedExperts(m) for s, m in stock.items()}
    swap(model, stand_ins)
    assert [p for p, _ in tree_flatten(model.parameters())] == paths
    assert list(find_sites(model)) == list(stock)
    assert mx.array_equal(model(tokens), before)
    model.load_weights(tree_flatten(model.parameters()), strict=True)
    swap(model, {p: s.unwrapped() for p, s in stand_ins.items()})
    assert all(a is b for a, b in zip(find_sites(model).values(), stock.values(), strict=True))
    assert mx.array_equal(model(tokens), before)


def test_quantising_an_attached_model_reaches_the_experts_and_stays_after_detach() -> None:
    model = tiny_models.build("mixtral")
    stand_ins = {s.path: RoutedExperts(m) for s, m in find_sites(model).items()}
    swap(model, stand_ins)
    nn.quantize(model, group_size=32, bits=4)
    swap(model, {p: s.unwrapped() for p, s in stand_ins.items()})
    assert all(s.format == "affine 4-bit g32" for s in find_sites(model))
    want = tiny_models.build("mixtral", quantize=4)
    tokens = mx.array([[5, 6, 7]])
    assert mx.array_equal(model(tokens), want(tokens))


def test_a_dense_model_is_refused_in_one_sentence() -> None:
    with pytest.raises(ModelError, match="dense model"):
        require_sites(nn.Sequential(nn.Linear(4, 4)), "tiny-dense")


# mlx-lm stacks quantised tensors stored one an expert for mixtral only.
STORED = [(f, b, p) for f in FAMILIES for b in (None, 4, 8) for p in (False, True) if not (p and b and f != "mixtral")]


@pytest.mark.parametrize(("family", "bits", "per_expert"), STORED)
def test_expert_matrices_by_offset_are_the_modules(
    family: str, bits: int | None, per_expert: bool, tmp_path: Path
) -> None:
    model = tiny_models.build(family, quantize=bits)
    folder = tiny_models.save(model, tmp_path / "m", family, quantize=bits, per_expert=per_expert)
    lazy, _ = loading.load_lazily(folder)
    checkpoint = Checkpoint(folder)
    for (site, module), stock in zip(find_sites(lazy).items(), find_sites(model).values(), strict=True):
        weights = ExpertWeights(site, module, checkpoint)
        assert weights.by_offset
        for e in (0, site.experts - 1):
            for got, name in zip(weights.matrices(e)[:3], ("gate_proj", "up_proj", "down_proj"), strict=True):
                np.testing.assert_array_equal(got, np.array(_dense(stock[name])[e]))


def _dense(linear: nn.Module) -> mx.array:
    if "scales" not in linear:
        return linear["weight"]
    return mx.dequantize(linear["weight"], linear["scales"], linear["biases"], linear.group_size, linear.bits)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("bits", [None, 4])
def test_a_widened_model_has_the_fingerprint_of_the_stored_one(
    dtype: mx.Dtype, bits: int | None, tmp_path: Path
) -> None:
    model = tiny_models.build("mixtral", quantize=bits)
    folder = tiny_models.save(model, tmp_path / "m", "mixtral", quantize=bits, dtype=dtype)
    lazy, _ = loading.load_lazily(folder)
    loaded, _, _ = loading.load_whole(folder)
    checkpoint = Checkpoint(folder)
    for (site, module), whole in zip(find_sites(lazy).items(), find_sites(loaded).values(), strict=True):
        weights = ExpertWeights(site, module, checkpoint)
        assert loaded_hash(whole, stored_dtypes(weights)) == sampled_hash(weights)
        assert sampled_hash(ExpertWeights(site, module)) == sampled_hash(weights)
        assert full_hash(ExpertWeights(site, module)) == full_hash(weights)


def test_fine_tunes_of_equal_shape_have_other_fingerprints(tmp_path: Path) -> None:
    hashes = set()
    for seed in (0, 1):
        model = tiny_models.build("mixtral", seed=seed)
        site, module = next(iter(find_sites(model).items()))
        hashes.add(sampled_hash(ExpertWeights(site, module)))
    assert len(hashes) == 2


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 64, b"\x10\0\0\0\0\0\0\0{not json at all}"])
def test_a_damaged_checkpoint_is_one_sentence(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="not a readable safetensors file"):
        Checkpoint(tmp_path)


def test_a_missing_model_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No model at"):
        loading.locate(str(tmp_path / "absent"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no config\.json"):
        loading.locate(str(tmp_path / "empty"))
