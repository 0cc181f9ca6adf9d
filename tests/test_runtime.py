"""Attaching, decoding, failing devices, mlx-lm's loops. Run: pytest tests/test_runtime.py"""

from __future__ import annotations

import gc
import inspect
import io
import json
import re
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

import mlx_npumoe
import tiny_models
from mlx_npumoe import phase, routed
from mlx_npumoe.devices import interpreter
from mlx_npumoe.devices.interpreter import Emulation, InterpreterDevice
from mlx_npumoe.devices.null import NullDevice
from mlx_npumoe.errors import ModelError, PreparedError, UsageError
from mlx_npumoe.executors.device import DeviceExecutor
from mlx_npumoe.planning.plan import Plan
from mlx_npumoe.prepared import Prepared
from mlx_npumoe.report import Report
from mlx_npumoe.sites import find_sites
from prepared_models import CHUNK, Maker, prepare_all_hot

PROMPT = "The quick brown fox jumps over the lazy dog, then sleeps. " * 5


def tokens(length: int) -> mx.array:
    return mx.array(np.random.default_rng(length).integers(2, 258, (1, length)))


def _decode_graph(model: Any, cache: list[Any], monkeypatch: pytest.MonkeyPatch) -> str:
    """The graph of one decode step as text, with every evaluation forbidden while it is built."""
    with monkeypatch.context() as patch:
        for name in ("eval", "async_eval"):
            patch.setattr(mx, name, lambda *a: pytest.fail("a decode step evaluated something"))
        logits = model(mx.array([[7]]), cache=cache)
    dot = io.StringIO()
    mx.export_to_dot(dot, logits)
    numbers: dict[str, str] = {}  # nodes are named by address: number them in order of appearance
    return re.sub(r"\b\d{6,}\b", lambda m: numbers.setdefault(m[0], f"n{len(numbers)}"), dot.getvalue())


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
@pytest.mark.parametrize("bits", [None, 4])
def test_a_decode_step_builds_stocks_graph_and_evaluates_nothing(
    family: str, bits: int | None, tiny: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tiny(family, bits)
    graphs = []
    for attached in (False, True):
        cache = make_prompt_cache(made.model)
        mx.eval(made.model(tokens(20), cache=cache))
        if attached:
            with mlx_npumoe.attach(made.model, made.prepared):
                graphs.append(_decode_graph(made.model, cache, monkeypatch))
        else:
            graphs.append(_decode_graph(made.model, cache, monkeypatch))
    assert graphs[0].count("GatherMM" if bits is None else "GatherQMM") == 9
    assert graphs[0] == graphs[1]


@pytest.mark.parametrize(
    ("emulation", "calls"),
    [(Emulation(fail_every=1), 3), (Emulation(nan_output=True), 3), (Emulation(hang_s=30), 1)],
    ids=["fails", "returns NaN", "hangs"],
)
def test_a_sick_device_never_changes_output_and_is_switched_off(
    emulation: Emulation, calls: int, tiny: Maker, capsys: pytest.CaptureFixture[str]
) -> None:
    made, x = tiny("mixtral"), tokens(100)
    want = made.model(x)
    mx.eval(want)
    device = InterpreterDevice(emulation=emulation)
    with mlx_npumoe.attach(made.model, made.prepared, device=device, deadline_s=0.2) as engine:
        for _ in range(2):
            assert mx.array_equal(made.model(x), want)
        report = engine.report()
    assert report.totals.fallbacks == calls and report.totals.launches == report.totals.rows == 0
    assert all("switched off" in (layer.reason or "") for layer in report.layers)
    assert capsys.readouterr().err.count("Warning") == 1


def test_one_failure_in_many_is_a_fallback_and_no_more(tiny: Maker) -> None:
    made, x = tiny("mixtral"), tokens(100)
    device = InterpreterDevice(emulation=Emulation(fail_every=4))
    with mlx_npumoe.attach(made.model, made.prepared, device=device) as engine:
        for _ in range(4):
            mx.eval(made.model(x))
        totals = engine.report().totals
    assert (totals.launches, totals.fallbacks) == (9, 3)
    assert totals.rows + totals.spilled == 9 * 200


def test_a_failing_piece_falls_back_alone_and_counts_alone(tiny: Maker) -> None:
    made, x = tiny("mixtral"), tokens(CHUNK + 100)
    device = InterpreterDevice(emulation=Emulation(fail_every=2))
    with mlx_npumoe.attach(made.model, made.prepared, device=device) as engine:
        mx.eval(made.model(x))
        totals = engine.report().totals
    assert (totals.launches, totals.fallbacks) == (3, 3)
    assert totals.rows + totals.spilled == 3 * 2 * CHUNK


class Recording(InterpreterDevice):
    """Notes when a call starts; poisons what it computed on pads."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def submit(self, lease: Any) -> Any:
        self.events.append("submit")
        future: Future[Any] = Future()

        def ended(inner: Any) -> None:
            for x, y in zip(lease.inputs, lease.outputs, strict=True):
                y.host[:, (x.host == 0).all(axis=0)] = np.nan
            future.set_result(inner.result())

        super().submit(lease).add_done_callback(ended)
        return future


def test_the_device_starts_first_then_our_half_then_we_wait(
    tiny: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tiny("mixtral")

    def tighten(plan: Plan) -> Plan:
        groups = [replace(s.spec, groups=tuple(replace(g, capacity=32) for g in s.spec.groups)) for s in plan.hot_sites]
        return replace(plan, sites=tuple(replace(s, spec=g) for s, g in zip(plan.sites, groups, strict=True)))

    prepared = prepare_all_hot(made.folder, tmp_path / "tight", change=tighten)
    device = Recording()
    started, joined = mx.async_eval, DeviceExecutor.join
    monkeypatch.setattr(mx, "async_eval", lambda *a: (device.events.append("async_eval"), started(*a))[1])
    monkeypatch.setattr(DeviceExecutor, "join", lambda *a: (device.events.append("join"), joined(*a))[1])
    with mlx_npumoe.attach(made.model, prepared, device=device) as engine:
        mx.eval(made.model(tokens(200)))
        assert engine.report().totals.spilled > 0
    assert device.events == ["async_eval", "submit", "async_eval", "join", "async_eval"] * 3


def test_nan_in_pad_columns_of_the_device_never_leaks(tiny: Maker) -> None:
    made, x = tiny("qwen3_moe"), tokens(150)
    with mlx_npumoe.attach(made.model, made.prepared):
        want = made.model(x)
    with mlx_npumoe.attach(made.model, made.prepared, device=Recording()) as engine:
        assert mx.array_equal(made.model(x), want)
        assert engine.report().totals.pads > 0 and engine.report().totals.fallbacks == 0


@pytest.mark.parametrize(
    ("limits", "loaded"),
    [({"programs": 2}, 2), ({"program_bytes": 1000}, 0), ({"total_bytes": 300_000}, 1)],
)
def test_programs_beyond_the_devices_limits_stay_local(limits: dict[str, int], loaded: int, tiny: Maker) -> None:
    made = tiny("mixtral")
    plan = replace(made.prepared.plan, limits=replace(made.prepared.plan.limits, **limits))
    with mlx_npumoe.attach(made.model, replace(made.prepared, plan=plan)) as engine:
        mx.eval(made.model(tokens(100)))
        layers = engine.report().layers
    assert [layer.counters.launches for layer in layers] == [1] * loaded + [0] * (3 - loaded)
    assert all("limit" in (layer.reason or "") for layer in layers[loaded:])


def test_a_refused_attach_and_a_forgotten_engine_leave_no_threads(tiny: Maker) -> None:
    made = tiny("mixtral")
    before = threading.active_count()
    with mlx_npumoe.attach(made.model, made.prepared):
        during = threading.active_count()
        with pytest.raises(ModelError):
            mlx_npumoe.attach(made.model, made.prepared)
        assert threading.active_count() == during > before
    model = tiny_models.build("mixtral")
    mlx_npumoe.attach(model, made.prepared)
    del model
    gc.collect()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_a_prompt_that_is_not_finite_is_no_fault_of_the_device(tiny: Maker) -> None:
    made = tiny("mixtral")
    experts = next(iter(find_sites(made.model)))
    with mlx_npumoe.attach(made.model, made.prepared) as engine:
        stand_in = engine.stand_ins[experts]
        x, chosen = mx.random.normal((64, 64)), mx.tile(mx.array([[0, 1]]), (64, 1))
        bad = mx.where(mx.arange(64)[:, None] == 5, mx.nan, x)
        for _ in range(4):
            assert mx.array_equal(stand_in(bad, chosen), made_stock(stand_in, bad, chosen), equal_nan=True)
        assert engine.report().totals.fallbacks == 4
        mx.eval(stand_in(x, chosen))
        assert engine.report().totals.launches == 1


def made_stock(stand_in: Any, x: mx.array, chosen: mx.array) -> mx.array:
    return stand_in._local.whole(stand_in, x, chosen)


def test_closing_while_a_call_waits_frees_caller_and_threads(tiny: Maker) -> None:
    made, x = tiny("mixtral"), tokens(100)
    want = made.model(x)
    mx.eval(want)
    before = threading.active_count()
    engine = mlx_npumoe.attach(made.model, made.prepared, deadline_s=60)
    got: list[mx.array] = []

    def call() -> None:
        y = made.model(x)
        mx.eval(y)
        got.append(y)

    with interpreter._BLAS:  # as a second attached model would hold it
        thread = threading.Thread(target=call)
        thread.start()
        time.sleep(0.3)
        engine.close()
    thread.join(20)
    assert not thread.is_alive() and mx.array_equal(got[0], want)
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_gradients_through_an_attached_model_are_stocks(tiny: Maker) -> None:
    made = tiny("mixtral")
    x = tokens(80)

    def loss(scale: mx.array) -> mx.array:
        h = made.model.model.embed_tokens(x) * scale
        return made.model.model.layers[0].block_sparse_moe(h).square().sum()

    want = mx.grad(loss)(mx.array(1.0))
    with mlx_npumoe.attach(made.model, made.prepared) as engine:
        assert mx.allclose(mx.grad(loss)(mx.array(1.0)), want, rtol=1e-5)
        assert engine.report().totals.launches == 0
        mx.eval(loss(mx.array(1.0)))
        assert engine.report().totals.launches == 1


def test_rows_have_stocks_type(tiny: Maker) -> None:
    made = tiny("mixtral")
    x, chosen = mx.random.normal((64, 64)), mx.tile(mx.array([[0, 1]]), (64, 1))
    with mlx_npumoe.attach(made.model, made.prepared) as engine:
        stand_in = next(iter(engine.stand_ins.values()))
        assert stand_in(x.astype(mx.float16), chosen).dtype == mx.float32
        assert engine.report().totals.launches == 1


def test_an_activation_set_while_attached_is_computed_and_kept(tiny: Maker) -> None:
    model, x = tiny_models.build("mixtral"), tokens(80)

    def plain(up: mx.array, gate: mx.array) -> mx.array:
        return up * gate

    with mlx_npumoe.attach(model, tiny("mixtral").prepared) as engine:
        for layer in model.layers:
            layer.block_sparse_moe.switch_mlp.activation = plain
        got = model(x)
        assert engine.report().totals.launches == 0
    assert mx.array_equal(got, model(x))
    assert model.layers[0].block_sparse_moe.switch_mlp.activation is plain


def test_the_null_device_returns_at_once(tiny: Maker) -> None:
    made = tiny("mixtral")
    with mlx_npumoe.attach(made.model, made.prepared, device=NullDevice()) as engine:
        mx.eval(made.model(tokens(100)))
        assert engine.report().totals.launches == 3
        assert "not computed" in engine.report().device


def test_generation_prefill_leaves_out_the_layer_nobody_evaluates(tiny: Maker) -> None:
    made = tiny("qwen3_moe")
    model, tokenizer = mlx_npumoe.load(str(made.folder), prepared=made.prepared, progress=False)
    n = len(tokenizer.encode(PROMPT))
    assert n > 200
    stream = mlx_npumoe.stream_generate(model, tokenizer, PROMPT, max_tokens=4)
    assert next(stream).prompt_tokens == n
    assert phase.current() == phase.Phase()
    stream.close()
    report = mlx_npumoe.engine(model).report()
    assert [layer.counters.launches for layer in report.layers] == [1, 1, 0]
    mx.eval(model(tokens(100)))
    report = mlx_npumoe.engine(model).report()
    assert [layer.counters.launches for layer in report.layers] == [2, 2, 1]


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_generate_without_a_device_is_mlx_lms(family: str, tiny: Maker) -> None:
    made = tiny(family)
    stock, tokenizer = mlx_lm.load(str(made.folder))
    model, _ = mlx_npumoe.load(str(made.folder), prepared=made.prepared, device="off")
    want = mlx_lm.generate(stock, tokenizer, PROMPT, max_tokens=20)
    assert mlx_npumoe.generate(model, tokenizer, PROMPT, max_tokens=20) == want
    assert mlx_npumoe.generate(model, tokenizer, PROMPT, max_tokens=20, max_kv_size=64) == mlx_lm.generate(
        stock, tokenizer, PROMPT, max_tokens=20, max_kv_size=64
    )


def test_generate_says_what_the_device_did(tiny: Maker, capsys: pytest.CaptureFixture[str]) -> None:
    made = tiny("mixtral")
    model, tokenizer = mlx_npumoe.load(str(made.folder), prepared=made.prepared, progress=False)
    mlx_npumoe.generate(model, tokenizer, PROMPT, verbose=True, max_tokens=3)
    out = capsys.readouterr().out
    assert "Prompt: " in out and "Peak memory: " in out
    assert "Experts: 2 of 3 layers on interpreter (fp16 programs), 2 launches" in out


def test_padding_of_a_batch_takes_no_rows_and_changes_nothing(tiny: Maker) -> None:
    made = tiny("qwen3_moe")
    prompts = [np.random.default_rng(n).integers(2, 258, n).tolist() for n in (150, 90, 33)]
    stock, tokenizer = mlx_lm.load(str(made.folder))
    want = mlx_lm.batch_generate(stock, tokenizer, prompts, max_tokens=5, return_token_ids=True)
    model, _ = mlx_npumoe.load(str(made.folder), prepared=made.prepared, progress=False)
    got = mlx_npumoe.batch_generate(model, tokenizer, prompts, max_tokens=5, return_token_ids=True)
    assert [len(t) for t in got.token_ids] == [len(t) for t in want.token_ids]
    layers = mlx_npumoe.engine(model).report().layers
    real = sum(len(p) - 1 for p in prompts)
    for layer in layers[:2]:
        assert layer.counters.rows + layer.counters.spilled == real * 2
    assert layers[2].counters.launches == 0
    # The padded rows' own outputs are zeros, so prefill caches of real tokens must still be stock's.
    with mlx_npumoe.attach(stock, made.prepared, device="off"):
        same = mlx_npumoe.batch_generate(stock, tokenizer, prompts, max_tokens=5, return_token_ids=True)
    assert same.token_ids == want.token_ids


def test_experts_changed_after_attaching_are_never_computed_by_old_programs(tiny: Maker) -> None:
    model, other = tiny_models.build("mixtral"), tiny_models.build("mixtral", seed=9)
    x = tokens(80)
    with mlx_npumoe.attach(model, tiny("mixtral").prepared) as engine:
        model.load_weights(tree_flatten(other.parameters()), strict=True)
        assert mx.array_equal(model(x), other(x))
        assert all("changed" in (layer.reason or "") for layer in engine.report().layers)
    assert mx.array_equal(model(x), other(x))


@pytest.mark.parametrize("how", ["assigned", "scaled", "one row"])
def test_experts_written_in_place_are_never_computed_by_old_programs(how: str, tiny: Maker) -> None:
    model, x = tiny_models.build("mixtral"), tokens(80)
    with mlx_npumoe.attach(model, tiny("mixtral").prepared) as engine:
        mx.eval(model(x))
        for layer in model.layers:
            weight = layer.block_sparse_moe.switch_mlp.down_proj.weight
            if how == "assigned":
                weight[:] = 0
            elif how == "scaled":
                weight *= 2
            else:
                weight[1:2] = 0
        got = model(x)
        assert engine.report().totals.launches == 3
    assert mx.array_equal(got, model(x))


def test_adapters_added_while_attached_are_computed(tiny: Maker) -> None:
    from mlx_lm.tuner.utils import linear_to_lora_layers

    model, x = tiny_models.build("mixtral"), tokens(80)
    keys = {"block_sparse_moe.switch_mlp.up_proj"}
    with mlx_npumoe.attach(model, tiny("mixtral").prepared):
        linear_to_lora_layers(model, 1, {"rank": 2, "scale": 5.0, "dropout": 0.0, "keys": keys})
        lora = model.layers[2].block_sparse_moe.switch_mlp.up_proj
        lora.lora_b = mx.ones_like(lora.lora_b)
        got = model(x)
    model.eval()
    with mlx_npumoe.attach(model, tiny("mixtral").prepared):
        assert mx.allclose(got, model(x), atol=1e-4)
    assert type(model.layers[2].block_sparse_moe.switch_mlp.up_proj).__name__ == "LoRASwitchLinear"


def test_a_compiled_call_takes_the_stock_path(tiny: Maker) -> None:
    made, x = tiny("mixtral"), tokens(80)
    want = mx.compile(made.model.__call__)(x)
    with mlx_npumoe.attach(made.model, made.prepared) as engine:
        got = mx.compile(made.model.__call__)(x)
        assert mx.allclose(got, want, atol=1e-5)
        assert engine.report().totals.launches == 0


def test_decoding_a_large_batch_stays_local(tiny: Maker) -> None:
    made = tiny("mixtral")
    x = mx.arange(2, 66)[:, None]
    want = made.model(x)
    with mlx_npumoe.attach(made.model, made.prepared) as engine:
        assert mx.array_equal(made.model(x), want)
        assert engine.report().totals.launches == 0


def test_a_model_can_be_used_from_another_thread(tiny: Maker) -> None:
    made = tiny("mixtral")
    model, tokenizer = mlx_npumoe.load(str(made.folder), prepared=made.prepared, progress=False)
    texts: list[str] = []
    for _ in range(3):
        thread = threading.Thread(
            target=lambda: texts.append(mlx_npumoe.generate(model, tokenizer, PROMPT, max_tokens=4))
        )
        thread.start()
        thread.join()
    assert len(texts) == 3 and len(set(texts)) == 1
    assert mlx_npumoe.engine(model).report().totals.launches == 6


def test_attach_twice_detach_twice(tiny: Maker) -> None:
    made = tiny("mixtral")
    engine = mlx_npumoe.attach(made.model, made.prepared)
    with pytest.raises(ModelError, match="attached already"):
        mlx_npumoe.attach(made.model, made.prepared)
    assert mlx_npumoe.engine(made.model) is engine
    mlx_npumoe.detach(made.model)
    mlx_npumoe.detach(made.model)
    engine.close()
    assert not any(isinstance(m, routed.RoutedExperts) for _, m in made.model.named_modules())


def test_parameter_paths_stay_stocks_while_attached(tiny: Maker) -> None:
    made = tiny("qwen3_moe", 4)
    paths = [p for p, _ in tree_flatten(made.model.parameters())]
    with mlx_npumoe.attach(made.model, made.prepared):
        assert [p for p, _ in tree_flatten(made.model.parameters())] == paths
        made.model.load_weights(tree_flatten(made.model.parameters()), strict=True)


def test_programs_of_other_experts_are_refused(tiny: Maker) -> None:
    fine_tune = tiny_models.build("mixtral", seed=1)
    with pytest.raises(PreparedError, match="differ"):
        mlx_npumoe.attach(fine_tune, tiny("mixtral").prepared)
    assert mlx_npumoe.engine(fine_tune) is None
    with pytest.raises(PreparedError):
        mlx_npumoe.attach(tiny("qwen3_moe").model, tiny("mixtral").prepared)


def test_a_layer_whose_experts_changed_stays_local_with_the_reason(tiny: Maker) -> None:
    model = tiny_models.build("mixtral")
    experts = model.layers[1].block_sparse_moe.switch_mlp
    experts.up_proj.weight = experts.up_proj.weight * 1.01
    x = tokens(64)
    with mlx_npumoe.attach(model, tiny("mixtral").prepared) as engine:
        mx.eval(model(x))
        reasons = [layer.reason for layer in engine.report().layers]
        assert [layer.counters.launches for layer in engine.report().layers] == [1, 0, 1]
    assert reasons[0] is None and reasons[2] is None and "differ" in (reasons[1] or "")


def test_adapters_keep_their_layer_local(tiny: Maker) -> None:
    from mlx_lm.tuner.utils import linear_to_lora_layers

    model = tiny_models.build("mixtral")
    keys = {"block_sparse_moe.switch_mlp.up_proj"}
    linear_to_lora_layers(model, 1, {"rank": 2, "scale": 1.0, "dropout": 0.0, "keys": keys})
    with mlx_npumoe.attach(model, tiny("mixtral").prepared) as engine:
        mx.eval(model(tokens(80)))
        reasons = [layer.reason for layer in engine.report().layers]
    assert reasons[:2] == [None, None] and "LoRA" in (reasons[2] or "")


def test_an_adapted_model_finds_its_base_models_folder(tiny: Maker, private_cache: Path) -> None:
    made = tiny("mixtral")
    (private_cache / "prepared").mkdir(parents=True)
    (private_cache / "prepared" / "base").symlink_to(made.prepared.folder)
    model = tiny_models.build("mixtral")
    experts = model.layers[0].block_sparse_moe.switch_mlp
    experts.up_proj.weight = experts.up_proj.weight * 1.01
    found = Prepared.find(model, find_sites(model))
    assert found is not None and found.fingerprint == made.prepared.fingerprint


@pytest.mark.parametrize(
    "wrong",
    [{"device": "tpu"}, {"overflow": "guess"}, {"prune_renormalise": True}, {"saliency": "luck"}, {"device": 5}],
)
def test_wrong_values_are_usage_errors(wrong: dict[str, Any], tiny: Maker) -> None:
    with pytest.raises(UsageError):
        mlx_npumoe.attach(tiny("mixtral").model, tiny("mixtral").prepared, **wrong)
    assert mlx_npumoe.engine(tiny("mixtral").model) is None


def test_load_checks_its_arguments_even_with_nothing_prepared(tiny: Maker) -> None:
    with pytest.raises(UsageError, match="overflow"):
        mlx_npumoe.load(str(tiny("mixtral").folder), overflow="guess")
    with pytest.raises(PreparedError):
        mlx_npumoe.attach(tiny_models.build("mixtral", seed=5), tiny("mixtral").prepared, device="off")


def test_half_precision_is_widened_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_models.save(tiny_models.build("mixtral"), tmp_path / "m", "mixtral", dtype=mx.bfloat16)
    model, _ = mlx_npumoe.load(str(folder), prepared=None)
    assert capsys.readouterr().err.count("widened to float32") == 1
    assert {a.dtype for _, a in tree_flatten(model.parameters())} == {mx.float32}


def test_the_contract_of_the_public_face() -> None:
    def names(function: Any) -> list[str]:
        return [str(p) if p.kind is p.VAR_KEYWORD else p.name for p in inspect.signature(function).parameters.values()]

    def defaults(function: Any) -> dict[str, Any]:
        return {n: p.default for n, p in inspect.signature(function).parameters.items() if p.default is not p.empty}

    assert names(mlx_npumoe.load)[:4] == ["path_or_repo", "prepared", "device", "overflow"]
    assert {"prepared": "auto", "device": "auto", "overflow": "spill"}.items() <= defaults(mlx_npumoe.load).items()
    assert names(mlx_npumoe.attach)[:5] == ["model", "prepared", "device", "overflow", "saliency"]
    assert {"device": "auto", "overflow": "spill", "saliency": "attention_norm"}.items() <= defaults(
        mlx_npumoe.attach
    ).items()
    assert {
        "text": None,
        "out": None,
        "chunk": 2048,
        "tiers": "quantile",
        "weights": "int8",
        "layout": "layer",
        "body": "split",
        "profile": None,
        "plan": None,
        "progress": True,
    }.items() <= defaults(mlx_npumoe.prepare).items()
    report = json.loads(Report("m", "off", None, ()).to_json())
    assert {"model", "device", "totals", "layers"} <= set(report)
    assert set(report["totals"]) == {
        "launches",
        "rows",
        "pads",
        "spilled",
        "dropped",
        "fallbacks",
        "unpruned",
        "gate_mass",
        "dropped_gate_mass",
        "dropped_gate_share",
        "device_s",
        "join_wait_s",
    }


def test_load_finds_what_was_prepared_and_hints_otherwise(
    tiny: Maker, private_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tiny("mixtral")
    model, _ = mlx_npumoe.load(str(made.folder))
    assert mlx_npumoe.engine(model) is None
    assert "mlx_npumoe.prepare --model" in capsys.readouterr().err
    (private_cache / "prepared").mkdir(parents=True)
    (private_cache / "prepared" / "mine").symlink_to(made.prepared.folder)
    model, _ = mlx_npumoe.load(str(made.folder), progress=False)
    assert mlx_npumoe.engine(model).report().device == "interpreter"
    other = tiny("qwen3_moe")
    model, _ = mlx_npumoe.load(str(other.folder))
    assert mlx_npumoe.engine(model) is None
