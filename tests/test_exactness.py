"""An attached model computes what stock does, up to the programs' arithmetic. Run: pytest tests/test_exactness.py"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import mlx_npumoe
import tiny_models
from mlx_npumoe.planning.plan import Plan
from mlx_npumoe.recording import record
from prepared_models import CHUNK, MIN_CHUNK, Maker, prepare_all_hot
from replay import Run, per_token_error, require_close_flips

TOP_K = 2
LENGTHS = (1, 2, 31, 32, 33, 300, 512, 513, 530, 1100, 3000)
QUANTISED_LENGTHS = LENGTHS[:-2]  # longer inputs take the same path
MODELS = [(f, b) for f in tiny_models.FAMILIES for b in (None, 4, 8)]
CASES = [(f, b, n) for f, b in MODELS for n in (QUANTISED_LENGTHS if b else LENGTHS)]


def tokens(length: int) -> mx.array:
    return mx.array(np.random.default_rng(length).integers(2, 258, (1, length)))


@pytest.mark.parametrize(("family", "bits", "length"), CASES)
def test_with_routing_replayed_each_tokens_logits_are_stocks(
    family: str, bits: int | None, length: int, tiny: Maker, replay_router: Callable[..., Run]
) -> None:
    made = tiny(family, bits)
    model, prepared = made.model, made.prepared
    x = tokens(length)
    stock = replay_router(model, lambda: model(x))
    with mlx_npumoe.attach(model, prepared) as engine:
        replayed = replay_router(model, lambda: model(x), stock)
        free = replay_router(model, lambda: model(x))
        report = engine.report()
    assert per_token_error(replayed.logits, stock.logits).max() < 2e-3
    require_close_flips(stock, replayed, free)
    assert report.totals.fallbacks == 0
    assert (report.totals.launches > 0) == (length >= MIN_CHUNK)
    whole, rest = divmod(length, CHUNK)
    assert report.totals.launches == 2 * 3 * (whole + (rest >= MIN_CHUNK))


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_chunks_that_spill_stay_exact(
    family: str, tiny: Maker, replay_router: Callable[..., Run], tmp_path: Path
) -> None:
    made = tiny(family)
    model = made.model

    def tighten(plan: Plan) -> Plan:
        return replace(
            plan,
            sites=tuple(
                replace(s, spec=replace(s.spec, groups=tuple(replace(g, capacity=32) for g in s.spec.groups)))
                for s in plan.sites
                if s.spec is not None
            ),
        )

    tight = prepare_all_hot(made.folder, tmp_path / "tight", change=tighten)
    x = tokens(700)
    stock = replay_router(model, lambda: model(x))
    with mlx_npumoe.attach(model, tight) as engine:
        replayed = replay_router(model, lambda: model(x), stock)
        totals = engine.report().totals
    assert per_token_error(replayed.logits, stock.logits).max() < 2e-3
    assert totals.spilled > 0 and totals.dropped == 0
    assert totals.rows + totals.spilled == 3 * 700 * TOP_K


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("bits", [4, 8])
def test_half_precision_scales_are_not_rounded_again(
    dtype: mx.Dtype, bits: int, tmp_path: Path, replay_router: Callable[..., Run]
) -> None:
    folder = tiny_models.save(
        tiny_models.build("mixtral", quantize=bits), tmp_path / "m", "mixtral", quantize=bits, dtype=dtype
    )
    prepared = prepare_all_hot(folder, tmp_path / "p")
    model, _ = mlx_npumoe.load(str(folder), prepared=None)
    x = tokens(200)
    stock = replay_router(model, lambda: model(x))
    with mlx_npumoe.attach(model, prepared):
        replayed = replay_router(model, lambda: model(x), stock)
    assert per_token_error(replayed.logits, stock.logits).max() < 2e-3


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_int8_programs_stay_near(family: str, tiny: Maker, replay_router: Callable[..., Run]) -> None:
    made = tiny(family, weights="int8")
    model, prepared = made.model, made.prepared
    x = tokens(300)
    stock = replay_router(model, lambda: model(x))
    with mlx_npumoe.attach(model, prepared):
        replayed = replay_router(model, lambda: model(x), stock)
    error = per_token_error(replayed.logits, stock.logits).max()
    assert 1e-4 < error < 4e-2


@pytest.mark.parametrize(("family", "bits"), MODELS)
def test_device_off_is_bit_identical_and_so_is_the_model_after_detach(
    family: str, bits: int | None, tiny: Maker, replay_router: Callable[..., Run]
) -> None:
    made = tiny(family, bits)
    model, prepared = made.model, made.prepared
    x = tokens(200)
    before = model(x)
    with mlx_npumoe.attach(model, prepared, device="off") as engine:
        assert mx.array_equal(model(x), before)
        assert engine.report().totals.launches == 0
    mlx_npumoe.attach(model, prepared)
    assert not mx.array_equal(model(x), before)
    mlx_npumoe.detach(model)
    assert mlx_npumoe.engine(model) is None
    assert mx.array_equal(model(x), before)


def test_a_batch_is_offloaded_as_its_rows(tiny: Maker, replay_router: Callable[..., Run]) -> None:
    model, prepared = tiny("qwen3_moe").model, tiny("qwen3_moe").prepared
    x = mx.array(np.random.default_rng(5).integers(2, 258, (3, 150)))
    stock = replay_router(model, lambda: model(x))
    with mlx_npumoe.attach(model, prepared) as engine:
        replayed = replay_router(model, lambda: model(x), stock)
        assert engine.report().totals.launches == 3
    assert per_token_error(replayed.logits, stock.logits).max() < 2e-3


def test_permuting_the_experts_of_a_model_changes_nothing(
    tiny: Maker, replay_router: Callable[..., Run], tmp_path: Path
) -> None:
    model = tiny_models.build("mixtral")
    order = mx.array([2, 0, 3, 1])
    for layer in model.layers:
        moe = layer.block_sparse_moe
        moe.gate.weight = moe.gate.weight[order]
        for projection in ("gate_proj", "up_proj", "down_proj"):
            moe.switch_mlp[projection].weight = moe.switch_mlp[projection].weight[order]
    folder = tiny_models.save(model, tmp_path / "m", "mixtral")
    permuted = prepare_all_hot(folder, tmp_path / "p")
    plain, prepared = tiny("mixtral").model, tiny("mixtral").prepared
    x = tokens(300)
    with mlx_npumoe.attach(plain, prepared), mlx_npumoe.attach(model, permuted):
        assert mx.array_equal(plain(x), model(x))


def test_the_profile_is_the_same_by_numpy_and_by_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlx_npumoe import calibration

    model = tiny_models.build("qwen3_moe", quantize=4)
    text = [np.random.default_rng(1).integers(2, 258, 300).tolist()]
    by_numpy = record(model, text, progress=False)
    monkeypatch.setattr(calibration, "_experts_numpy", calibration._experts_mlx)
    by_mlx = record(model, text, progress=False)
    assert by_numpy.keys() == by_mlx.keys()
    for a, b in zip(by_numpy.values(), by_mlx.values(), strict=True):
        np.testing.assert_array_equal(a.counts, b.counts)
        np.testing.assert_array_equal(a.totals, b.totals)
        assert a.tokens == b.tokens == 300 and len(a.counts) == 2 and a.totals.sum() == 600
        for name in calibration.MAXIMA:
            assert a.maxima[name] == pytest.approx(b.maxima[name], rel=1e-4)


def in_chunks(model: Any, x: mx.array, cache: list[Any], step: int) -> mx.array:
    """Logits of all tokens, a prefill in steps as mlx-lm's loop runs it."""
    return mx.concatenate([model(x[:, at : at + step], cache=cache) for at in range(0, x.shape[1], step)], axis=1)


@pytest.mark.parametrize("kind", ["rotating", "quantised"])
def test_every_cache_of_mlx_lm_sees_stocks_values(kind: str, tmp_path: Path, replay_router: Callable[..., Run]) -> None:
    model = tiny_models.build("qwen3_moe", head_dim=32)  # MLX quantises keys in groups of 32
    folder = tiny_models.save(model, tmp_path / "m", "qwen3_moe", head_dim=32)
    prepared = prepare_all_hot(folder, tmp_path / "p")
    x = tokens(300)
    caches: list[list[Any]] = []

    def forward() -> mx.array:
        cache = make_prompt_cache(model, max_kv_size=96 if kind == "rotating" else None)
        if kind == "quantised":
            cache = [c.to_quantized(group_size=32, bits=8) for c in cache]
        caches.append(cache)
        return in_chunks(model, x, cache, 64)

    stock = replay_router(model, forward)
    with mlx_npumoe.attach(model, prepared) as engine:
        replayed = replay_router(model, forward, stock)
        assert engine.report().totals.launches == 3 * 5
    assert per_token_error(replayed.logits, stock.logits).max() < (2e-3 if kind == "rotating" else 2e-2)  # 8-bit keys
    if kind == "rotating":
        for a, b in zip(*caches, strict=True):
            assert a.keys.shape[2] < 300
            for want, got in ((a.keys, b.keys), (a.values, b.values)):
                assert mx.allclose(want, got, rtol=0, atol=2e-3 * mx.abs(want).max().item())


def test_a_draft_model_makes_mlx_lm_prefill_in_steps_of_512(tiny: Maker) -> None:
    made = tiny("mixtral")
    model, draft = tiny_models.build("mixtral"), tiny_models.build("mixtral", seed=1)
    prompt = tokens(1100)[0].tolist()
    tokenizer = mlx_lm.utils.load_tokenizer(made.folder)
    with mlx_npumoe.attach(model, made.prepared) as engine:
        answer = mlx_npumoe.stream_generate(model, tokenizer, prompt, draft_model=draft, max_tokens=4)
        assert len(list(answer)) == 4
        totals = engine.report().totals
    assert totals.fallbacks == 0
    # 512 + 512 + 75 tokens of 1099 (the last one starts decoding); the last layer is not computed in a prefill
    assert totals.launches == 2 * 3
