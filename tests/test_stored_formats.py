"""Experts stored in every format mlx-lm writes, end to end. Run: pytest tests/test_stored_formats.py"""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

import families
from family_runs import run_family
from mlx_npumoe.loading import load_lazily
from mlx_npumoe.sites import find_sites
from mlx_npumoe.tensors import site_weights
from mlx_npumoe.weights import ExpertWeights
from stored_formats import SCALED, STORED, store

FAMILY = "qwen3_moe"


def rows_of(module: nn.Module, projection: str, expert: int, columns: int) -> np.ndarray:
    """The expert's matrix `(out, in)` as mlx-lm's own layer computes with it, column by column."""
    unit = mx.eye(columns)[:, None, None]  # (in, 1, 1, in)
    return np.array(module[projection](unit, mx.full((columns, 1), expert, mx.uint32))).reshape(columns, -1).T


@pytest.mark.parametrize("stored", list(STORED))
def test_a_model_stored_so_is_stock_with_its_experts_on_the_device(stored: str, tmp_path: Path) -> None:
    outcome = run_family(FAMILY, tmp_path, stored)
    assert outcome.reasons == [None] * len(outcome.reasons) and outcome.offloaded[0] > 0
    assert outcome.error < 2e-3
    model, _ = load_lazily(tmp_path)
    stored_by_name, weights = site_weights(str(tmp_path))
    assert stored_by_name == FAMILY
    for w, module in zip(weights, find_sites(model).values(), strict=True):
        assert w.by_offset
        module.set_dtype(mx.float32)  # the layer that computes, as load gives it here
        for expert in (0, w.site.experts - 1):
            matrices = w.matrices(expert)
            for name in ("gate", "up", "down"):
                want = rows_of(module, f"{name}_proj", expert, w.site.width if name == "down" else w.site.hidden)
                np.testing.assert_allclose(getattr(matrices, name), want, rtol=0, atol=1e-6 * np.abs(want).max())


def test_the_mixed_model_is_mixed() -> None:
    model = families.build(FAMILY)
    store(model, "mixed")
    modes = [getattr(module.gate_proj, "mode", None) for module in find_sites(model).values()]
    assert len(set(modes)) > 1 and None in modes


def test_a_scale_an_expert_is_applied(tmp_path: Path) -> None:
    model = families.build(FAMILY)
    config = families.config(FAMILY) | store(model, SCALED)
    (tmp_path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    for w, module in zip(site_weights(str(tmp_path))[1], find_sites(model).values(), strict=True):
        assert any(t.name == "up_proj.global_scale" for t in w.tensors)
        up = module.up_proj
        for expert in range(w.site.experts):
            parts = (up.weight[expert], up.scales[expert], None, up.group_size, up.bits, up.mode)
            want = mx.dequantize(*parts, global_scale=up.global_scale[expert], dtype=mx.float32)
            np.testing.assert_array_equal(w.matrices(expert).up, np.array(want))
            np.testing.assert_array_equal(ExpertWeights(w.site, module).matrices(expert).up, np.array(want))


@pytest.mark.soak
@pytest.mark.parametrize("stored", [name for name in STORED if name != "float32"])
@pytest.mark.parametrize("name", list(families.FAMILIES))
def test_every_family_stored_in_every_format(name: str, stored: str, tmp_path: Path) -> None:
    outcome = run_family(name, tmp_path, stored)
    assert outcome.error < 2e-3
    assert outcome.reasons == [None] * len(outcome.reasons)
