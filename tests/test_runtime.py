"""Attaching, decoding, failing devices, mlx-lm's loops. Run: pytest tests/test_runtime.py"""

from __future__ import annotations

import io
import re
import threading
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
from mlx_npumoe.devices.interpreter import Emulation, InterpreterDevice
from mlx_npumoe.devices.null import NullDevice
from mlx_npumoe.errors import ModelError, PreparedError, UsageError
from prepared_models import Maker

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
    "emulation",
    [Emulation(fail_every=1), Emulation(nan_output=True), Emulation(hang_s=30)],
    ids=["fails", "returns NaN", "hangs"],
)
def test_a_sick_device_never_changes_output_and_is_switched_off(
    emulation: Emulation, tiny: Maker, capsys: pytest.CaptureFixture[str]
) -> None:
    made, x = tiny("mixtral"), tokens(100)
    want = made.model(x)
    mx.eval(want)
    device = InterpreterDevice(emulation=emulation)
    with mlx_npumoe.attach(made.model, made.prepared, device=device, deadline_s=0.2) as engine:
        for _ in range(2):
            assert mx.array_equal(made.model(x), want)
        report = engine.report()
    assert report.totals.fallbacks == 3 and report.totals.rows == 0
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
        reasons = [layer.reason for layer in engine.report().layers]
    assert reasons[:2] == [None, None] and "LoRA" in (reasons[2] or "")


@pytest.mark.parametrize("wrong", [{"device": "tpu"}, {"overflow": "prune"}, {"saliency": "luck"}])
def test_wrong_values_are_usage_errors(wrong: dict[str, Any], tiny: Maker) -> None:
    with pytest.raises(UsageError, match="choose from"):
        mlx_npumoe.attach(tiny("mixtral").model, tiny("mixtral").prepared, **wrong)
    assert mlx_npumoe.engine(tiny("mixtral").model) is None


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
