"""What observers see, against the block itself called with one-hot experts. Run: pytest tests/test_taps.py"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import families
from family_runs import TAPS, taps_of, tokens
from mlx_npumoe import taps
from mlx_npumoe.sites import ExpertSite, find_sites
from mlx_npumoe.taps import SiteTaps, observe, prove

T = 24
# One of each kind: logits to softmax before and after the choice, sigmoid, pairs returned, pairs given, sparse mixer,
# zero experts, and a block that is not given whole.
SOME = [
    "mixtral", "qwen2_moe", "gpt_oss", "lfm2_moe", "deepseek_v3", "gemma4_text", "deepseek_v41", "phimoe",
    "longcat_flash",
]  # fmt: skip


class _Rows(nn.Module):
    """Calls the experts, or returns the rows it is told to."""

    def __init__(self, inner: Any, tap: SiteTaps) -> None:
        super().__init__()
        self.inner = inner
        self.__dict__.update(tap=tap, rows=None, seen=[], indices=[])

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        if self.rows is not None:
            return self.rows.reshape(*indices.shape, -1)
        self.seen.append(self.tap.take(indices.reshape(-1, indices.shape[-1])))
        self.indices.append(indices)
        return self.inner(x, indices)


def one_hot_gates(model: nn.Module, site: ExpertSite, x: mx.array) -> tuple[taps.Seen, np.ndarray]:
    """What the taps saw of a call, and `(T, K)` gates by the block called with one-hot minus zero experts."""
    block, name = families.parent(model, site.path)
    calls: list[taps.Call] = []
    stop = observe(block, calls.append, before=True)
    tap = SiteTaps(model, site, prove(model, [site])[site.path])
    calls.clear()
    stock = block[name]
    block[name] = watch = _Rows(stock, tap)
    try:
        mx.eval(model(x))
        stop()
        seen, indices = watch.seen[0], watch.indices[0]
        K, n = indices.shape[-1], indices.size // indices.shape[-1]

        def out(rows: np.ndarray) -> np.ndarray:
            watch.__dict__["rows"] = mx.array(rows.astype(np.float32))
            return np.array(block(*calls[0].args, **calls[0].kwargs)).reshape(n, -1)

        zero = np.zeros((n, K, site.hidden))
        hot = zero.copy()
        hot[:, np.arange(K), np.arange(K)] = 1
        return seen, (out(hot) - out(zero))[:, :K]
    finally:
        block[name] = stock
        tap.close()


@pytest.mark.parametrize("name", SOME)
def test_gates_seen_are_the_blocks_own(name: str) -> None:
    model = families.build(name)
    before = [type(m) for _, m in model.named_modules()]
    scale = families.config(name).get("routed_scaling_factor", 1.0)
    for site in find_sites(model):
        seen, gates = one_hot_gates(model, site, tokens(1, T))
        assert seen.gates is not None and seen.batch == 1
        tapped = np.array(seen.gates)
        factor = gates.sum() / tapped.sum()  # they are known up to one
        np.testing.assert_allclose(tapped * factor, gates, rtol=2e-3, atol=2e-5)
        assert factor == pytest.approx(1, abs=1e-4) or factor == pytest.approx(scale, rel=1e-4)
        assert gates.std() > 0.01  # they differ, so agreeing says something
    assert [type(m) for _, m in model.named_modules()] == before


@pytest.mark.parametrize("name", ["mixtral", "qwen3_next", "lfm2_moe", "phixtral", "granitemoehybrid"])
def test_attention_norms_are_those_of_the_layers_mixer(name: str) -> None:
    model = families.build(name)
    for site in find_sites(model):
        proof = prove(model, [site])[site.path]
        assert proof.layer is not None and proof.attention is not None
        mixer = proof.attention.rpartition(".")[2]
        assert mixer in ("self_attn", "linear_attn", "conv", "mamba", "mixer")
        owner, last = families.parent(model, proof.attention)
        outputs: list[Any] = []
        close = observe(owner[last], lambda call, outputs=outputs: outputs.append(call.result))
        seen, _ = one_hot_gates(model, site, tokens(1, T))
        close()
        want = np.linalg.norm(np.array(outputs[-1]).reshape(T, -1), axis=1)
        np.testing.assert_allclose(np.array(seen.attention_norm), want, rtol=1e-5)


class _Squared(nn.Module):
    """mixtral's block, but with gates squared."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.gate, self.switch_mlp = block.gate, block.switch_mlp

    def __call__(self, x: mx.array) -> mx.array:
        logits = self.gate(x)
        indices = mx.argpartition(-logits, kth=1, axis=-1)[..., :2]
        scores = mx.softmax(mx.take_along_axis(logits, indices, axis=-1), axis=-1) ** 2
        return (self.switch_mlp(x, indices) * scores[..., None]).sum(axis=-2)


def test_a_router_used_in_another_way_is_not_believed() -> None:
    model = families.build("mixtral")
    model.layers[1].block_sparse_moe = _Squared(model.layers[1].block_sparse_moe)
    proofs = list(prove(model, list(find_sites(model))).values())
    assert [p.gates is None for p in proofs] == [False, True, False]
    assert "no gate weights were found" in str(proofs[1].gates_reason) and proofs[1].logits is None


def test_a_module_that_mixes_no_tokens_is_no_attention() -> None:
    model = families.build("mixtral")

    class Pointwise(nn.Module):
        def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
            return x * 2

    model.layers[2].self_attn = Pointwise()
    proofs = list(prove(model, list(find_sites(model))).values())
    assert [p.attention is None for p in proofs] == [False, False, True]


def test_a_model_that_fails_in_a_trial_has_no_taps_and_a_reason() -> None:
    model = families.build("mixtral")

    class Broken(nn.Module):
        def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
            raise ValueError("not today")

    model.layers[1].self_attn = Broken()
    before = [type(m) for _, m in model.named_modules()]
    for proof in prove(model, list(find_sites(model))).values():
        assert proof.gates is None and "not today" in str(proof.gates_reason)
        assert proof.attention is None and proof.batch_reason is not None
    assert [type(m) for _, m in model.named_modules()] == before


def test_observers_of_one_module_are_apart() -> None:
    module, stock = nn.Linear(4, 4), nn.Linear
    seen: dict[str, int] = {"a": 0, "b": 0}

    def count(name: str) -> taps.Listener:
        def note(call: taps.Call) -> None:
            seen[name] += 1

        return note

    first, second = observe(module, count("a")), observe(module, count("b"), before=True)
    module(mx.zeros((1, 4)))
    assert isinstance(module, stock) and type(module) is not stock and seen == {"a": 1, "b": 1}
    first()
    first()
    module(mx.zeros((1, 4)))
    assert seen == {"a": 1, "b": 2}
    second()
    assert type(module) is stock
    module(mx.zeros((1, 4)))
    assert seen == {"a": 1, "b": 2}


@pytest.mark.parametrize("name", ["mixtral", "llama4", "nemotron_h", "Klear", "deepseek"])
def test_the_shipped_table_says_what_a_trial_shows(name: str) -> None:
    shipped = json.loads(files("mlx_npumoe.data").joinpath("taps.json").read_text())
    assert shipped["families"][name] == taps_of(families.build(name))
    assert set(shipped["families"][name]) == set(TAPS)
