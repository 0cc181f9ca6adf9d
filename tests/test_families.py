"""Every family of mlx-lm with expert layers, through the exactness harness. Run: pytest tests/test_families.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

import families
import mlx_npumoe
from family_runs import CHUNK, SHAPES, prepare_family, run_family, tokens
from mlx_npumoe.activations import Activation
from mlx_npumoe.commands import inspect
from mlx_npumoe.data import family_taps
from mlx_npumoe.families import EXCEPTIONS, find_families
from mlx_npumoe.phase import phase
from mlx_npumoe.recording import record
from mlx_npumoe.sites import find_sites, last_cached_layer
from replay import first_flips, per_token_error, require_close_flips, run


@pytest.mark.parametrize("name", [*families.FAMILIES, *families.WRAPPERS])
def test_an_attached_family_is_stock_with_its_experts_on_the_device(name: str, tmp_path: Path) -> None:
    outcome = run_family(name, tmp_path)
    assert outcome.error < 2e-3
    assert outcome.reasons == [None] * len(outcome.reasons) and len(outcome.reasons) >= 2
    for launches in outcome.launches:
        assert launches == dict(zip(SHAPES, (0, 1, 2, 1), strict=True))
    assert all(Activation.parse(a) for a in outcome.activations)
    assert outcome.taps == family_taps()[name]


@pytest.mark.parametrize("name", ["gpt_oss", "phixtral", "nemotron_h"])  # biases, biases without a gate, neither
def test_quantised_experts_of_other_forms(name: str, tmp_path: Path) -> None:
    outcome = run_family(name, tmp_path, "affine4")
    assert outcome.error < 2e-3 and outcome.reasons == [None] * len(outcome.reasons)


def test_every_file_with_switch_layers_is_here_or_has_its_reason() -> None:
    found = {family.name: family for family in find_families()}
    assert set(found) == set(families.switch_files())
    assert set(found) - set(families.FAMILIES) == set(EXCEPTIONS) and len(EXCEPTIONS) <= 3
    assert {name for name, family in found.items() if family.reason is not None} == set(EXCEPTIONS)
    assert all(family.forms and family.activations for family in found.values())


def test_inspect_shows_the_families(capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect.main(["--families", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [f["name"] for f in shown["families"]] == sorted(families.switch_files())
    assert inspect.main(["--families"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[:4] == ["nemotron_h", "SwitchMLP", "ReLU2", "no"] for line in lines)
    assert any("muse_spark" in line and "Metal" in line for line in lines)


# Fewer caches than layers: shared keys, and blocks without anything to cache.
SHORT_CACHES = {
    "gemma4_text with shared keys": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "nemotron_h with experts at the end": {
        "num_hidden_layers": 5,
        "hybrid_override_pattern": ["M", "E", "*", "E", "E"],
    },
    "nemotron_h with a dense end": {"num_hidden_layers": 5, "hybrid_override_pattern": ["M", "E", "*", "E", "-"]},
}
LAST = {"gemma4_text with shared keys": 1, "nemotron_h with experts at the end": 2, "nemotron_h with a dense end": 4}


def spoil(model: nn.Module, layers: range) -> None:
    """Make the experts of these layers return NaN."""
    for site, module in find_sites(model).items():
        if site.layer in layers:
            nan = [(path, mx.full(a.shape, np.nan)) for path, a in tree_flatten(module.parameters())]
            module.load_weights(nan, strict=False)


def caches_are_finite(model: nn.Module) -> bool:
    cache = make_prompt_cache(model)
    model(tokens(1, 40), cache=cache)
    state = [a for c in cache for _, a in tree_flatten(c.state) if isinstance(a, mx.array)]
    mx.eval(state)
    return all(bool(mx.isfinite(a).all()) for a in state if mx.issubdtype(a.dtype, mx.floating))


@pytest.mark.parametrize("name", [*families.FAMILIES, *SHORT_CACHES])
def test_experts_skipped_in_a_prefill_reach_no_cache(name: str) -> None:
    model = families.build(name.partition(" ")[0], **SHORT_CACHES.get(name, {}))
    last = last_cached_layer(model)
    if name != "nemotron_h":  # ends in experts as it is
        assert last == LAST.get(name, len(model.layers) - 1)
    spoil(model, range(last, len(model.layers)))
    assert caches_are_finite(model)


@pytest.mark.parametrize("name", ["olmoe", "minimax_m3_vl"])
def test_decode_of_a_flattened_batch_stays_local(name: str, tmp_path: Path) -> None:
    model = families.build(name)
    prepared = prepare_family(model, name, tmp_path)
    step = tokens(40, 1)
    want = model(step)
    with mlx_npumoe.attach(model, prepared) as engine:
        model(tokens(1, 1))
        with phase(generating=True, decoding=True):
            assert mx.array_equal(model(step), want)
        assert engine.report().totals.launches == 0
        with phase(generating=True):
            mx.eval(model(tokens(2, 40)))
        assert engine.report().totals.launches > 0


def test_pairs_of_zero_experts_take_no_place(tmp_path: Path) -> None:
    model = families.build("longcat_flash")
    zero = families.config("longcat_flash")["n_routed_experts"]
    stock_class = type(model.layers[0].mlp.router)
    x = tokens(1, CHUNK)
    seen = run(model, lambda: model(x))
    raw = [np.array(site[0][0]) for site in seen.outputs]
    profile = record(model, x.tolist(), progress=False)
    for indices, site in zip(raw, profile.values(), strict=True):
        assert (indices >= zero).any()
        np.testing.assert_array_equal(site.totals, np.bincount(indices[indices < zero], minlength=zero))
        assert site.tokens == CHUNK
    prepared = prepare_family(model, "longcat_flash", tmp_path)
    with mlx_npumoe.attach(model, prepared) as engine:
        run(model, lambda: model(x), seen)
        totals = engine.report().totals
    assert totals.rows + totals.spilled == sum((indices < zero).sum() for indices in raw)
    assert type(model.layers[0].mlp.router) is stock_class


def test_another_activation_than_prepared_stays_local(tmp_path: Path) -> None:
    model = families.build("step3p5")
    prepared = prepare_family(model, "step3p5", tmp_path)
    changed: Any = next(m for s, m in find_sites(model).items() if s.activation != Activation("silu"))
    changed.activation.limit = 0.5
    with mlx_npumoe.attach(model, prepared) as engine:
        mx.eval(model(tokens(1, 40)))
        reasons = [layer.reason for layer in engine.report().layers]
    assert reasons[0] is None and "limit=0.5" in str(reasons[1])


def test_another_form_of_experts_is_one_sentence() -> None:
    from mlx_lm.models import dbrx

    from mlx_npumoe.errors import ModelError
    from mlx_npumoe.sites import require_sites

    args = dbrx.ModelArgs(
        model_type="dbrx", vocab_size=64, d_model=32, n_layers=1, n_heads=4,
        ffn_config={"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        attn_config={"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
    )  # fmt: skip
    with pytest.raises(ModelError, match="another form of Mixture-of-Experts"):
        require_sites(dbrx.Model(args), "dbrx")


def test_the_harness_notices_experts_that_are_not_stocks() -> None:
    model = families.build("dots1")
    x = tokens(1, 200)
    stock = run(model, lambda: model(x))
    replayed = run(model, lambda: model(x), stock)
    assert per_token_error(replayed.logits, stock.logits).max() == 0
    for _, module in find_sites(model).items():
        module.down_proj.weight = module.down_proj.weight * 1.05
    other = run(model, lambda: model(x))
    assert first_flips(stock, other)
    with pytest.raises(AssertionError, match="the router's input"):
        require_close_flips(stock, replayed, other)
