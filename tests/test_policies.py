"""Overflow policy prune: what is dropped, what is refused, what is reported. Run: pytest tests/test_policies.py"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import families
import mlx_npumoe
import tiny_models
from family_runs import prepare_family
from mlx_npumoe.commands import generate
from mlx_npumoe.devices.interpreter import Emulation, InterpreterDevice
from mlx_npumoe.errors import ModelError, UsageError
from mlx_npumoe.phase import phase
from mlx_npumoe.planning.plan import Plan
from mlx_npumoe.policies import SALIENCIES, Pruning
from mlx_npumoe.prepared import PROFILE, Prepared
from mlx_npumoe.program import Group, ProgramSpec
from mlx_npumoe.routing import SlotTable, most_salient, renormalised
from mlx_npumoe.sites import find_sites
from prepared_models import CHUNK, Made, Maker

CAPACITY = 32  # of every expert in the tight programs
ODD = np.array([0.0, -0.0, 1.0, 1.0, -1.0, 2.5, np.inf, -np.inf, np.nan, -np.nan, 1e-40, -1e-40], np.float32)


def tokens(length: int, batch: int = 1) -> mx.array:
    return mx.array(np.random.default_rng(length).integers(2, 258, (batch, length)))


# --- which pairs are kept --------------------------------------------------------------------------------


def reference(indices: np.ndarray, capacities: dict[int, int], saliency: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Kept pairs `(T, K)`, by sorting each expert's pairs in plain Python; False for padding."""
    kept = valid.copy()
    for expert, capacity in capacities.items():
        pairs = [(t, k) for t, k in zip(*np.nonzero((indices == expert) & valid), strict=True)]

        def rank(pair: tuple[int, int]) -> tuple[bool, float, tuple[int, int]]:
            value = float(saliency[pair])
            return (True, 0.0, pair) if np.isnan(value) else (False, -value, pair)

        for pair in sorted(pairs, key=rank)[capacity:]:
            kept[pair] = False
    return kept


@st.composite
def _cases(draw: st.DrawFn) -> tuple[np.ndarray, SlotTable, dict[int, int], np.ndarray, np.ndarray | None]:
    E = draw(st.integers(1, 9))
    K = draw(st.integers(1, min(4, E)))
    T = draw(st.integers(1, 60))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    indices = np.array([rng.choice(E, K, replace=False) for _ in range(T)])
    hot = [int(e) for e in rng.permutation(E)[: draw(st.integers(1, E))]]
    groups = tuple(Group((e,), int(rng.choice([1, 3, 8, 64]))) for e in hot)
    per_token = draw(st.booleans())
    values = draw(st.sampled_from(["odd", "few", "real"]))
    shape = (T,) if per_token else (T, K)
    saliency = {
        "odd": lambda: rng.choice(ODD, shape),
        "few": lambda: rng.integers(0, 3, shape).astype(np.float32),
        "real": lambda: rng.normal(size=shape).astype(np.float32),
    }[values]()
    mask = draw(st.sampled_from([None, "tokens", "pairs"]))
    valid = None if mask is None else rng.random((T,) if mask == "tokens" else (T, K)) < 0.6
    table = SlotTable.of(ProgramSpec(4, 8, groups), E)
    return indices, table, {g.experts[0]: g.capacity for g in groups}, saliency, valid


@settings(max_examples=250, deadline=None)
@given(_cases())
def test_the_least_salient_pairs_are_dropped_ties_by_token(case: Any) -> None:
    indices, table, capacities, saliency, valid = case
    T, K = indices.shape
    kept = most_salient(mx.array(indices), table, mx.array(saliency), None if valid is None else mx.array(valid))
    real = np.ones((T, K), bool) if valid is None else np.broadcast_to(valid.reshape(T, -1), (T, K))
    values = np.broadcast_to(saliency.reshape(T, -1), (T, K))
    np.testing.assert_array_equal(np.array(kept) & real, reference(indices, capacities, values, real))
    for expert, capacity in capacities.items():
        n = int(((indices == expert) & real).sum())
        assert int((np.array(kept) & real & (indices == expert)).sum()) == min(n, capacity)


def test_the_order_of_odd_saliencies() -> None:
    indices = np.zeros((len(ODD), 1), int)
    order = []
    for capacity in range(1, len(ODD) + 1):
        table = SlotTable.of(ProgramSpec(4, 8, (Group((0,), capacity),)), 1)
        kept = np.array(most_salient(mx.array(indices), table, mx.array(ODD))).ravel()
        order += [int(t) for t in np.nonzero(kept)[0] if t not in order]
    assert order == [6, 5, 2, 3, 10, 0, 1, 11, 4, 7, 8, 9]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_remaining_gates_get_the_sum_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    gates = rng.random((20, 4)).astype(np.float32)
    kept, real = rng.random((2, 20, 4)) < 0.6
    factors = np.array(renormalised(mx.array(gates), mx.array(real), mx.array(kept)))
    ours, rest = np.where(real, gates, 0).sum(1), np.where(real & kept, gates, 0).sum(1)
    whole = ~(real & ~kept).any(1)
    assert (factors[whole] == 1).all() and (factors[rest == 0] == 1).all()
    np.testing.assert_allclose((factors * rest)[rest > 0], ours[rest > 0], rtol=1e-5)


def test_a_prune_too_large_for_its_key_is_refused() -> None:
    table = SlotTable.of(ProgramSpec(4, 8, (Group((0,), 32),)), 2**16)
    with pytest.raises(UsageError, match="smaller chunk"):
        most_salient(mx.zeros((2**15, 1), mx.int32), table, mx.zeros((2**15,)))


# --- a model ---------------------------------------------------------------------------------------------


def tight(plan: Plan) -> Plan:
    """The same plan with little room an expert, and the last expert of each layer cold."""
    sites = []
    for site in plan.hot_sites:
        assert site.spec is not None
        last = site.experts - 1
        groups = tuple(Group(tuple(e for e in g.experts if e != last), CAPACITY) for g in site.spec.groups)
        sites.append(replace(site, spec=replace(site.spec, groups=tuple(g for g in groups if g.experts))))
    return replace(plan, sites=tuple(sites))


@pytest.fixture(scope="module")
def narrow(tiny: Maker, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Made, Prepared]]:
    """A tiny model with programs that hold few of its pairs."""
    root, done = tmp_path_factory.mktemp("narrow"), {}

    def make(family: str) -> tuple[Made, Prepared]:
        if family not in done:
            made = tiny(family)
            profile, plan = made.prepared.folder / PROFILE, tight(made.prepared.plan)
            prepared = mlx_npumoe.prepare(
                str(made.folder), profile=profile, plan=plan, out=root / family, progress=False
            )
            done[family] = made, prepared
        return done[family]

    return make


Narrow = Callable[[str], tuple[Made, Prepared]]


class _Watch(nn.Module):
    """A module that notes its calls, and hands its rows to `change` where given."""

    def __init__(self, inner: Any, change: Callable[..., mx.array] | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.__dict__["calls"] = []
        self.__dict__["change"] = change

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self.inner(*args, **kwargs)
        if self.__dict__["change"] is not None:
            out = self.__dict__["change"](out, *args)
        self.__dict__["calls"].append((args, out))
        return out


def parts(model: nn.Module, family: str) -> list[tuple[Any, str, str]]:
    """Each layer, and the names of its block and of the block's router."""
    block = "mlp" if family == "qwen3_moe" else "block_sparse_moe"
    return [(layer, block, "gate") for layer in model.layers]


def pruned_stock(
    model: nn.Module, family: str, x: mx.array, pruning: Pruning, capacity: int = CAPACITY
) -> tuple[mx.array, list[int], list[float]]:
    """Logits of stock with the pairs removed that the policy drops, by NumPy, piece by piece.

    Also the number of pairs dropped at each layer, and their share of the gate weights.
    """
    dropped, shares, undo = [], [], []
    experts = next(iter(find_sites(model))).experts
    capacities = dict.fromkeys(range(experts - 1), capacity)
    for layer, block_name, router_name in parts(model, family):
        block = layer[block_name]
        attention = _Watch(layer["self_attn"])
        router = _Watch(block[router_name])

        def change(rows: mx.array, x: mx.array, indices: mx.array, attention: Any = attention, router: Any = router):  # type: ignore[no-untyped-def]
            chosen = np.array(indices).reshape(-1, indices.shape[-1])
            logits = np.array(router.calls[-1][1], np.float64).reshape(len(chosen), -1)
            scores = np.exp(np.take_along_axis(logits, chosen, 1))
            gates = scores / scores.sum(1, keepdims=True)  # both families normalise
            norm = np.linalg.norm(np.array(attention.calls[-1][1]).reshape(len(chosen), -1), axis=1)[:, None]
            inputs = np.linalg.norm(np.array(x).reshape(len(chosen), -1), axis=1)[:, None]
            saliency = {"attention_norm": norm + 0 * gates, "gate": gates, "gate_norm": gates * inputs}
            kept = np.ones(chosen.shape, bool)
            for at in range(0, len(chosen), CHUNK):
                piece = slice(at, at + CHUNK)
                every = np.ones(chosen[piece].shape, bool)
                if len(every) >= 32:  # the plan's least chunk
                    kept[piece] = reference(
                        chosen[piece], capacities, saliency[pruning.saliency][piece].astype(np.float32), every
                    )
            dropped.append(int((~kept).sum()))
            shares.append(float(gates[~kept].sum() / gates.sum()))
            factor = np.ones(len(chosen))
            if pruning.renormalise:
                rest = (gates * kept).sum(1)
                factor = np.where(rest > 0, 1 / np.where(rest > 0, rest, 1), 1)
            weights = mx.array((kept * factor[:, None]).astype(np.float32)).reshape(*indices.shape, 1)
            return rows * weights

        experts_name = "switch_mlp"
        for owner, name, new in (
            (layer, "self_attn", attention),
            (block, router_name, router),
            (block, experts_name, _Watch(block[experts_name], change)),
        ):
            undo.append((owner, name, owner[name]))
            owner[name] = new
    try:
        out = model(x)
        mx.eval(out)
    finally:
        for owner, name, stock in undo:
            owner[name] = stock
    return out, dropped, shares


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("saliency", SALIENCIES)
def test_a_pruned_model_is_stock_with_those_pairs_removed(
    family: str, saliency: str, renormalise: bool, narrow: Narrow
) -> None:
    made, prepared = narrow(family)
    x = tokens(200)
    want, dropped, shares = pruned_stock(made.model, family, x, Pruning(saliency, renormalise))
    with mlx_npumoe.attach(
        made.model, prepared, overflow="prune", saliency=saliency, prune_renormalise=renormalise
    ) as engine:
        got = made.model(x)
        report = engine.report()
    counted = [layer.counters.dropped for layer in report.layers]
    assert counted[0] == dropped[0] > 0
    assert np.abs(np.array(counted) - dropped).max() <= 4  # float16 moves later layers' decisions
    assert report.totals.spilled == report.totals.fallbacks == report.totals.unpruned == 0
    for layer, share in zip(report.layers, shares, strict=True):
        assert layer.counters.dropped_gate_share == pytest.approx(share, abs=0.01)
    error = np.linalg.norm(np.array(got - want), axis=-1) / np.linalg.norm(np.array(want), axis=-1)
    assert np.median(error) < 2e-3
    stock = made.model(x)
    off = np.linalg.norm(np.array(stock - want), axis=-1) / np.linalg.norm(np.array(want), axis=-1)
    assert np.median(off) > 0.02  # what was dropped is seen


@pytest.mark.parametrize("saliency", SALIENCIES)
def test_one_layer_drops_exactly_what_the_reference_says(saliency: str, narrow: Narrow) -> None:
    """The first layer's experts see stock's inputs, so each row is either stock's up to float16 or zero."""
    made, prepared = narrow("qwen3_moe")
    x = tokens(300)
    layer = made.model.layers[0]
    rows: dict[str, np.ndarray] = {}

    def run(name: str) -> None:
        stock, watch = layer.mlp["switch_mlp"], _Watch(layer.mlp["switch_mlp"])
        layer.mlp["switch_mlp"] = watch
        try:
            mx.eval(made.model(x))
            rows[name] = np.array(watch.calls[0][1])[0]
            rows["indices"] = np.array(watch.calls[0][0][1])[0]
        finally:
            layer.mlp["switch_mlp"] = stock

    run("stock")
    with mlx_npumoe.attach(made.model, prepared, overflow="prune", saliency=saliency):
        run("pruned")
    _, dropped, _ = pruned_stock(made.model, "qwen3_moe", x, Pruning(saliency))
    zero = (rows["pruned"] == 0).all(-1)
    assert zero.sum() == dropped[0] > 0
    kept = ~zero
    assert np.abs(rows["pruned"] - rows["stock"])[kept].max() < 2e-3 * np.abs(rows["stock"]).max()
    for expert in range(7):
        assert kept[rows["indices"] == expert].sum() == min(CAPACITY, (rows["indices"] == expert).sum())
    assert kept[rows["indices"] == 7].all()  # cold


@pytest.mark.parametrize("renormalise", [False, True])
def test_with_room_for_all_prune_is_spill_to_the_bit(renormalise: bool, tiny: Maker) -> None:
    made, x = tiny("mixtral"), tokens(32)  # no expert has room for less
    with mlx_npumoe.attach(made.model, made.prepared) as engine:
        want = made.model(x)
        spilled = engine.report().totals.spilled
    with mlx_npumoe.attach(
        made.model, made.prepared, overflow="prune", saliency="gate", prune_renormalise=renormalise
    ) as engine:
        assert mx.array_equal(made.model(x), want)
        totals = engine.report().totals
    assert spilled == totals.dropped == 0 and totals.launches == 3 and totals.dropped_gate_share == 0


def test_nothing_of_a_pruned_model_is_left_after_it_is_detached(narrow: Narrow) -> None:
    made, prepared = narrow("mixtral")
    before = [type(m) for _, m in made.model.named_modules()]
    want = made.model(tokens(64))
    with mlx_npumoe.attach(made.model, prepared, overflow="prune", saliency="gate_norm"):
        mx.eval(made.model(tokens(200)))
        assert [type(m) for _, m in made.model.named_modules()] != before
    assert [type(m) for _, m in made.model.named_modules()] == before
    assert mx.array_equal(made.model(tokens(64)), want)


def test_decode_and_traced_calls_are_stocks(narrow: Narrow) -> None:
    made, prepared = narrow("mixtral")
    x = tokens(80)
    step, whole = made.model(tokens(1)), mx.compile(made.model.__call__)(x)
    with mlx_npumoe.attach(made.model, prepared, overflow="prune", saliency="gate") as engine:
        assert mx.array_equal(made.model(tokens(1)), step)
        assert mx.allclose(mx.compile(made.model.__call__)(x), whole, atol=1e-5)
        assert engine.report().totals.launches == engine.report().totals.dropped == 0


def test_a_failing_device_drops_nothing(narrow: Narrow) -> None:
    made, prepared = narrow("mixtral")
    x = tokens(150)
    want = made.model(x)
    device = InterpreterDevice(emulation=Emulation(fail_every=1))
    with mlx_npumoe.attach(made.model, prepared, device=device, overflow="prune") as engine:
        assert mx.array_equal(made.model(x), want)
        totals = engine.report().totals
    assert totals.dropped == 0 and totals.gate_mass == 0 and totals.fallbacks == 3


# --- padding ---------------------------------------------------------------------------------------------


def test_a_batch_of_unknown_padding_is_refused_in_one_sentence(narrow: Narrow) -> None:
    for family in ("mixtral", "qwen3_moe"):
        made, prepared = narrow(family)
        with mlx_npumoe.attach(made.model, prepared, overflow="prune") as engine:
            with pytest.raises(UsageError, match="which rows of a batch are padding"):
                made.model(tokens(60, 2))
            with phase(unpadded=True):
                mx.eval(made.model(tokens(60, 2)))
            assert engine.report().totals.launches == 3
        with mlx_npumoe.attach(made.model, prepared):
            mx.eval(made.model(tokens(60, 2)))


def test_a_flattening_blocks_batch_is_refused_too(tmp_path: Path) -> None:
    model = families.build("olmoe")
    prepared = prepare_family(model, "olmoe", tmp_path)
    with mlx_npumoe.attach(model, prepared, overflow="prune", saliency="gate") as engine:
        with pytest.raises(UsageError, match="padding"):
            model(tokens(60, 2))
        mx.eval(model(tokens(120)))
        assert engine.report().totals.launches == 3


def test_padding_takes_no_place_from_real_tokens(narrow: Narrow) -> None:
    made, prepared = narrow("mixtral")
    x, valid = tokens(100, 2), mx.arange(100)[None] < mx.array([[100], [40]])
    pairs = 2 * 140
    with mlx_npumoe.attach(made.model, prepared, overflow="prune", saliency="gate") as engine:
        with phase(valid=valid):
            mx.eval(made.model(x))
        first = engine.report().layers[0].counters
    logits = made.model.layers[0].block_sparse_moe.gate
    watch = _Watch(logits)
    made.model.layers[0].block_sparse_moe["gate"] = watch
    try:
        mx.eval(made.model(x))
    finally:
        made.model.layers[0].block_sparse_moe["gate"] = logits
    router = np.array(watch.calls[0][1])[np.array(valid)]
    chosen = np.sort(np.argsort(-router, -1)[:, :2])
    counts = np.bincount(chosen.ravel(), minlength=4)
    assert counts.sum() == pairs
    assert first.dropped == np.maximum(counts[:3] - CAPACITY, 0).sum() > 0
    assert first.rows == np.minimum(counts[:3], CAPACITY).sum()
    assert first.gate_mass == pytest.approx(140, rel=1e-5)  # padding has no weight


def test_batches_of_ours_say_what_is_padding(narrow: Narrow) -> None:
    made, prepared = narrow("mixtral")
    model, tokenizer = mlx_npumoe.load(
        str(made.folder), prepared=prepared, overflow="prune", saliency="gate", progress=False
    )
    prompts = [tokens(90).tolist()[0], tokens(60).tolist()[0]]
    for batch in (prompts, [prompts[0], prompts[0]]):
        before = mlx_npumoe.engine(model).report().totals
        mlx_npumoe.batch_generate(model, tokenizer, batch, max_tokens=3)
        after = mlx_npumoe.engine(model).report().totals
        assert after.launches > before.launches and after.dropped > before.dropped


# --- refusals and reports --------------------------------------------------------------------------------


def test_what_cannot_be_seen_is_refused_with_the_reason(tmp_path: Path) -> None:
    for name, saliency, reason in (
        ("llama4", "gate", "do not weigh the experts' outputs"),
        ("nemotron_h", "attention_norm", "no attention comes before the experts"),
    ):
        (tmp_path / name).mkdir()
        model = families.build(name)
        prepared = prepare_family(model, name, tmp_path / name)
        with pytest.raises(ModelError, match=reason):
            mlx_npumoe.attach(model, prepared, overflow="prune", saliency=saliency)
        assert mlx_npumoe.engine(model) is None
        other = "attention_norm" if saliency == "gate" else "gate"
        with mlx_npumoe.attach(model, prepared, overflow="prune", saliency=other) as engine:
            mx.eval(model(tokens(120)))
            report = engine.report()
            assert report.totals.launches > 0 and report.totals.unpruned == 0
        if name == "llama4":
            assert report.totals.dropped > 0 and report.totals.dropped_gate_share is None
            assert "gate weights" not in report.line()
            with pytest.raises(ModelError, match="renormalised"):
                mlx_npumoe.attach(model, prepared, overflow="prune", prune_renormalise=True)


def test_a_call_that_no_observer_saw_is_computed_in_full_and_counted(narrow: Narrow) -> None:
    made, prepared = narrow("qwen3_moe")
    with mlx_npumoe.attach(made.model, prepared, overflow="prune", saliency="gate") as engine:
        experts = made.model.layers[0].mlp.switch_mlp
        x, indices = mx.random.normal((1, 200, 64)), mx.zeros((1, 200, 2), mx.int32) + mx.array([0, 1])
        with phase(unpadded=True):
            out = experts(x, indices)
        assert (mx.abs(out).max(axis=-1) > 0).all()
        first = engine.report().layers[0].counters
    assert first.unpruned == 1 and first.dropped == 0 and first.spilled == 2 * (200 - CAPACITY)
    assert "1 calls not pruned" in engine.report().line()


def test_the_report_says_that_it_is_lossy_and_what_was_lost(
    narrow: Narrow, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, prepared = narrow("mixtral")
    argv = ["--model", str(made.folder), "--prepared", str(prepared.folder), "--prompt", "word " * 60]
    argv += ["--max-tokens", "3", "--temp", "0"]
    file = tmp_path / "report.json"
    lossy = ["--overflow", "prune", "--saliency", "gate", "--prune-renormalise", "--report", str(file)]
    assert generate.main([*argv, *lossy]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    report = json.loads(file.read_text())
    totals = report["totals"]
    assert report["overflow"] == "prune by gate, renormalised" and totals["dropped"] > 0 and totals["spilled"] == 0
    assert totals["dropped_gate_share"] == pytest.approx(totals["dropped_gate_mass"] / totals["gate_mass"])
    assert f"lossy (prune by gate, renormalised): {totals['dropped']} pairs dropped" in line and "gate weights)" in line
    assert sum(layer["dropped"] for layer in report["layers"]) == totals["dropped"]
    assert generate.main([*argv, "--report", str(file)]) == 0
    assert "lossy" not in capsys.readouterr().out
    assert json.loads(file.read_text())["overflow"] == "spill"


@pytest.mark.parametrize("argv", [["--saliency", "gate"], ["--prune-renormalise"], ["--record-routing", "x.bin"]])
def test_flags_without_an_effect_are_usage_errors(argv: list[str]) -> None:
    with pytest.raises(UsageError):
        generate.main(["--model", "x", *argv])


def test_an_unknown_saliency_is_refused() -> None:
    with pytest.raises(UsageError, match="luck"):
        Pruning("luck")
