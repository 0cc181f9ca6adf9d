"""A model beside itself on plain MLX. Run: pytest tests/test_comparison.py"""

from __future__ import annotations

import json
import math
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_npumoe.__main__ import run
from mlx_npumoe.comparison import RESAMPLES, compare
from mlx_npumoe.errors import UsageError
from mlx_npumoe.evaluate import perplexity
from prepared_models import Maker

VOCABULARY = 12


class Bigram:
    """Logits that depend on the last token only."""

    def __init__(self, table: np.ndarray) -> None:
        self.table = mx.array(table.astype(np.float32))

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.table[tokens]


def documents(count: int, length: int, seed: int = 0) -> list[list[int]]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, (count, length)).tolist()


def tables(noise: float) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    table = random.standard_normal((VOCABULARY, VOCABULARY)) * 2
    return table, table + noise * random.standard_normal(table.shape)


def test_a_model_beside_itself_shows_no_difference() -> None:
    table, _ = tables(0)
    found = compare(Bigram(table), Bigram(table), documents(10, 50), progress=False)
    assert found.tokens == 10 * 49 and found.unit == "documents" and found.units == 10
    assert found.agreement == 1 and found.divergence.value == 0
    assert not found.perplexity_change.differs and not found.accuracy_change.differs
    assert found.table().count("no difference") == 2


@pytest.mark.parametrize(("count", "length", "window"), [(10, 300, 512), (3, 500, 64), (1, 400, 33)])
def test_the_numbers_are_numpys(count: int, length: int, window: int) -> None:
    reference, model = tables(0.5)
    texts = documents(count, length)
    found = compare(Bigram(model), Bigram(reference), texts, window=window, progress=False)
    before = np.concatenate([t[:-1] for t in texts])
    after = np.concatenate([t[1:] for t in texts])
    q, p = (t - np.log(np.exp(t).sum(axis=1, keepdims=True)) for t in (model, reference))
    losses = [-side[before, after].mean() for side in (q, p)]
    assert math.isclose(found.perplexity, math.exp(losses[0]), rel_tol=1e-5)
    assert math.isclose(found.reference_perplexity, math.exp(losses[1]), rel_tol=1e-5)
    assert math.isclose(found.perplexity_change.value, math.exp(losses[0] - losses[1]) - 1, rel_tol=1e-3)
    assert found.accuracy == (q.argmax(axis=1)[before] == after).mean()
    assert found.reference_accuracy == (p.argmax(axis=1)[before] == after).mean()
    assert found.agreement == (q.argmax(axis=1) == p.argmax(axis=1))[before].mean()
    assert math.isclose(found.divergence.value, (np.exp(p) * (p - q)).sum(axis=1)[before].mean(), rel_tol=1e-4)
    units = count if count >= 8 else count * -(-(length - 1) // window)
    assert (found.units, found.unit) == (units, "documents" if count >= 8 else "windows")
    for estimate in (found.perplexity_change, found.accuracy_change, found.divergence):
        assert estimate.low <= estimate.value <= estimate.high
    if count == 1:
        assert math.isclose(perplexity(Bigram(model), texts[0], window), found.perplexity, rel_tol=1e-6)


def test_a_real_loss_is_seen_and_the_interval_is_the_sampling_error() -> None:
    reference, model = tables(1.5)
    random = np.random.default_rng(5)
    p = np.exp(reference) / np.exp(reference).sum(axis=1, keepdims=True)
    texts = []
    for _ in range(40):
        text = [0]
        for _ in range(60):
            text.append(int(random.choice(VOCABULARY, p=p[text[-1]])))
        texts.append(text)
    found = compare(Bigram(model), Bigram(reference), texts, progress=False)
    assert found.perplexity_change.differs and found.perplexity_change.low > 0
    q, logp = (t - np.log(np.exp(t).sum(axis=1, keepdims=True)) for t in (model, reference))
    each = [np.mean((logp - q)[t[:-1], t[1:]]) for t in texts]
    error = np.std(each) / math.sqrt(len(texts))  # of the mean difference, documents of one length
    width = math.log1p(found.perplexity_change.high) - math.log1p(found.perplexity_change.low)
    assert 0.8 < width / (2 * 1.96 * error) < 1.2 and RESAMPLES >= 1000


def test_what_cannot_be_compared_is_refused() -> None:
    table, _ = tables(0)
    for texts, window in (([], 8), ([[1]], 8), ([[1, 2]], 0)):
        with pytest.raises(UsageError):
            compare(Bigram(table), Bigram(table), texts, window=window, progress=False)


def test_the_command(
    tiny: Maker, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tiny("mixtral")
    text = tmp_path / "t.txt"
    text.write_text("The judge of my vow is black quartz. " * 20)
    argv = ["--model", str(made.folder), "--prepared", str(made.prepared.folder), "--text", str(text), "--window", "96"]
    assert run("evaluate", [*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["report"]["totals"]["launches"] == 3 * -(-(found["tokens"]) // 96)  # none by the reference
    assert abs(found["perplexity_change"]["value"]) < 0.005 and found["agreement"] > 0.95
    assert 0 < found["divergence"]["value"] < 1e-3
    assert run("evaluate", [*argv, "--max-tokens", "100"]) == 0
    out = capsys.readouterr().out
    assert "99 tokens of 1 documents" in out and "Experts: 3 of 3 layers" in out
    monkeypatch.setattr("mlx_npumoe.generation.resolve", lambda name: None)  # as on a Mac, today
    assert run("evaluate", argv[:2]) == 2
    assert "nothing to compare" in capsys.readouterr().err
    assert run("evaluate", [*argv[:4], "--text", str(tmp_path / "absent.txt")]) == 2
