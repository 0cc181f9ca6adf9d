"""Planning: tiers, groups, device profiles, placement, plans.

Run: pytest tests/test_planning.py
"""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mlx_npumoe.activations import SILU, Activation
from mlx_npumoe.errors import NpumoeError, PreparedError, UsageError
from mlx_npumoe.planning import (
    DeviceLimits,
    DeviceProfile,
    Figure,
    Form,
    Plan,
    RateTable,
    SiteLoads,
    TierPolicy,
    choose_capacities,
    expected,
    expert_bytes,
    load_profile,
    make_plan,
    pack_groups,
)
from mlx_npumoe.planning.cost import PACKAGE_ALLOWANCE, SiteCost
from mlx_npumoe.planning.tiers import TIER_POLICIES, TierChooser, round_up

EXPERT_IN_A_PACKAGE = expert_bytes(64, 32, "int8") + PACKAGE_ALLOWANCE
MANY = settings(max_examples=60, deadline=None)
FEW = settings(max_examples=25, deadline=None)


def profile_of(device_gflops=1000.0, local_gflops=10.0, seconds=1e-5, gbps=100.0, **limits) -> DeviceProfile:
    """A made-up device with flat rates."""

    def figure(value):
        return Figure(value, "estimated", "made up for a test")

    def table(gflops):
        return RateTable((1, 64), (gflops, gflops), "estimated", "made up for a test")

    return DeviceProfile(
        name="made up",
        chip="none",
        launch_s=figure(seconds),
        join_s=figure(seconds),
        device_rate=table(device_gflops),
        local_rate=table(local_gflops),
        pack_gbps=figure(gbps),
        unpack_gbps=figure(gbps),
        weight_gbps=figure(gbps),
        local_overhead_s=figure(seconds),
        limits=DeviceLimits(**limits),
    )


INFINITELY_FAST = profile_of(device_gflops=1e30, seconds=0.0, gbps=1e30)


def site_of(loads, layer=0, hidden=64, width=32, **fields) -> SiteLoads:
    loads = np.asarray(loads)
    fields = {"activation": SILU, "top_k": 2} | fields
    path = f"model.layers.{layer}.mlp.switch_mlp"
    return SiteLoads(path, layer, loads.shape[1], hidden, width, loads=loads, **fields)


def plan_of(sites, chunk, profile, **options) -> Plan:
    return make_plan(sites, model_fingerprint="f1", model_type="qwen3_moe", chunk=chunk, profile=profile, **options)


@st.composite
def loads_and_chunk(draw, experts=12, samples=5, chunk=300):
    tokens = draw(st.integers(1, chunk))
    shape = (draw(st.integers(1, samples)), draw(st.integers(1, experts)))
    elements = st.one_of(st.just(0), st.integers(0, tokens))
    return draw(hnp.arrays(np.int64, shape, elements=elements)), tokens


policies = st.builds(
    TierPolicy,
    name=st.sampled_from(["quantile", "uniform"]),
    quantile=st.sampled_from([0.5, 0.9, 1.0]),
    levels=st.integers(1, 3),
    spill_cost=st.sampled_from([0.0, 1.0, 9.0, 100.0]),
)


# --- tiers -------------------------------------------------------------------------------------------------


@MANY
@given(loads_and_chunk(), policies)
def test_capacities_are_few_multiples_of_the_grain_within_the_chunk(case, policy):
    loads, chunk = case
    capacities = choose_capacities(loads, chunk, policy)
    assert (capacities % 32 == 0).all()
    assert (capacities <= round_up(chunk)).all()
    assert ((capacities > 0) == loads.any(axis=0)).all()
    levels = set(capacities[capacities > 0].tolist())
    assert len(levels) <= (1 if policy.name == "uniform" else policy.levels)


@MANY
@given(loads_and_chunk(), policies)
def test_the_quantile_of_every_expert_is_served(case, policy):
    loads, chunk = case
    capacities = choose_capacities(loads, chunk, policy)
    assert ((loads <= capacities).mean(axis=0) >= policy.quantile).all()


@pytest.mark.parametrize(
    "load, capacity", [(0, 0), (1, 32), (32, 32), (33, 64), (64, 64), (65, 96), (128, 128), (129, 160)]
)
def test_tier_edges(load, capacity):
    assert choose_capacities(np.array([[load]]), 256).tolist() == [capacity]
    assert choose_capacities(np.array([[load]]), 256, TierPolicy("uniform")).tolist() == [capacity]


def test_tier_edges_side_by_side():
    loads = np.array([[0, 1, 32, 33, 64, 65]])
    assert choose_capacities(loads, 256).tolist() == [0, 32, 32, 64, 64, 96]
    assert choose_capacities(loads, 256, TierPolicy("uniform")).tolist() == [0, 96, 96, 96, 96, 96]


def test_the_papers_uniform_example() -> None:
    """NPUMoE 3.2: B = 256, E = 8, r = 2 gives 64; with top-2 the mean load, and so ours, is twice that."""
    for top_k, ours in ((1, 64), (2, 128)):
        mean = top_k * 256 / 8
        loads = np.array([[2 * mean, 0.0, *[mean] * 6]])
        assert set(choose_capacities(loads, 256, TierPolicy("uniform_paper")).tolist()) == {64, 0}
        assert set(choose_capacities(loads, 256, TierPolicy("uniform")).tolist()) == {ours, 0}


def test_quartile4x_of_phimoe() -> None:
    """Papers 7.1: B = 256, k = 2, E = 16: a base of 32 allocates 1.75 times the routed load, one of 16 half of that."""
    loads = np.arange(16, 48, 2, dtype=float)[None]  # the busiest are the last four
    loads *= 512 / loads.sum()
    ours = choose_capacities(loads, 256, TierPolicy("quartile4x"))
    assert ours.tolist() == [32] * 12 + [128] * 4 and ours.sum() == 1.75 * 512
    papers = choose_capacities(loads, 256, TierPolicy("quartile4x_paper"))
    assert papers.tolist() == [32] * 12 + [64] * 4  # 16 rows are not a capacity: the grain is 32


@pytest.mark.parametrize(("experts", "busiest"), [(2, 1), (4, 1), (7, 1), (8, 2), (128, 32)])
def test_quartile4x_gives_ties_to_the_first_and_nothing_to_the_unused(experts: int, busiest: int) -> None:
    loads = np.full((3, experts), 100.0)
    chosen = choose_capacities(loads, 2048, TierPolicy("quartile4x"))
    assert chosen.tolist() == [416] * busiest + [128] * (experts - busiest)
    assert choose_capacities(loads, 256, TierPolicy("quartile4x")).max() == 256  # no more than a chunk
    loads[:, 0] = 0
    chosen = choose_capacities(loads, 2048, TierPolicy("quartile4x"))
    assert chosen[0] == 0 and (chosen[1:] > 0).all()
    chooser = TierChooser(loads, 2048, TierPolicy("quartile4x"))
    some = chooser.capacities([experts - 1])
    assert some[:-1].sum() == 0 and some[-1] == chosen[-1]  # a smaller hot set changes no capacity


@pytest.mark.parametrize("tiers", ["uniform_paper", "quartile4x", "quartile4x_paper"])
def test_plans_of_every_tier_policy_survive_json(tiers: str) -> None:
    assert tiers in TIER_POLICIES
    assert TierPolicy(tiers).papers_base is tiers.endswith("_paper")
    loads = np.random.default_rng(0).integers(1, 90, (5, 8))
    plan = plan_of([site_of(loads)], 256, INFINITELY_FAST, hot="all", tiers=tiers)
    assert plan.tiers == tiers and Plan.from_json(plan.to_json()) == plan
    assert f"tiers {tiers} " in plan.explain()


def test_a_rarely_used_expert_gets_the_least_capacity():
    loads = np.zeros((20, 2), np.int64)
    loads[3, 0] = 5
    assert choose_capacities(loads, 64).tolist() == [32, 0]


def test_the_papers_example_of_one_capacity():
    rows, pads, spilled = expected(np.array([[64, 32, 32, 0]]), np.array([64, 64, 64, 64]))
    assert (rows, pads, spilled) == (256, 128, 0)


@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("spill_cost", [0.0, 9.0, 1000.0])
@pytest.mark.parametrize("seed", range(15))
def test_clustering_is_optimal(seed, levels, spill_cost):
    rng = np.random.default_rng(seed)
    chunk = 400
    samples, experts = rng.integers(1, 6), rng.integers(1, 13)
    typical = rng.choice([0, 20, 60, 100, 200, 350], size=experts)
    loads = np.clip(typical * rng.uniform(0.3, 1.7, (samples, experts)), 0, chunk).astype(np.int64)
    policy = TierPolicy(quantile=float(rng.choice([0.5, 0.9])), levels=levels, spill_cost=spill_cost)

    def cost(capacities):
        total = 0.0
        for sample in loads:
            for n, c in zip(sample, capacities, strict=True):
                total += policy.pad_cost * max(c - n, 0) + policy.spill_cost * max(n - c, 0) if c else 0
        return total / len(loads)

    # Each expert's own need is what a policy without a limit on levels gives it.
    needs = choose_capacities(loads, chunk, replace(policy, levels=100, pad_cost=1.0, spill_cost=0.0))
    candidates = sorted(set(needs[needs > 0].tolist()))
    best = min(
        (
            cost([min((c for c in chosen if c >= n), default=0) if n else 0 for n in needs])
            for count in range(1, levels + 1)
            for chosen in itertools.combinations(candidates, count)
            if chosen[-1] == candidates[-1]
        ),
        default=0.0,
    )
    assert cost(choose_capacities(loads, chunk, policy)) == pytest.approx(best)


@MANY
@given(loads_and_chunk(), st.data())
def test_expected_equals_counting(case, data):
    loads, _ = case
    capacities = data.draw(hnp.arrays(np.int64, loads.shape[1], elements=st.sampled_from([0, 32, 64, 96, 320])))
    rows = pads = spilled = 0
    for sample in loads:
        for n, c in zip(sample, capacities, strict=True):
            for row in range(c):
                rows += 1
                pads += row >= n
            spilled += max(int(n) - int(c), 0) if c else 0
    counted = np.array([rows, pads, spilled]) / len(loads)
    assert np.allclose(expected(loads, capacities), counted)


@MANY
@given(loads_and_chunk(), st.data())
def test_more_capacity_means_fewer_spills_and_more_pads(case, data):
    loads, _ = case
    small = data.draw(hnp.arrays(np.int64, loads.shape[1], elements=st.sampled_from([32, 64, 96])))
    large = small + data.draw(hnp.arrays(np.int64, loads.shape[1], elements=st.sampled_from([0, 32, 64])))
    before, after = expected(loads, small), expected(loads, large)
    assert after.spilled <= before.spilled
    assert after.pads >= before.pads


@pytest.mark.parametrize(
    "loads", [np.zeros((0, 4)), np.zeros(4), np.array([[-1.0]]), np.array([[np.nan]]), np.array([["a"]])]
)
def test_loads_that_are_no_counts_are_refused(loads):
    with pytest.raises(PreparedError, match="calibrate again"):
        choose_capacities(loads, 32)


# --- groups ------------------------------------------------------------------------------------------------


@MANY
@given(
    hnp.arrays(np.int64, st.integers(1, 40), elements=st.sampled_from([0, 32, 64, 128])),
    st.sampled_from([64, 2048, 4096, 10000, 16384]),
    st.data(),
)
def test_groups_hold_each_hot_expert_once_and_keep_the_limits(capacities, hidden, data):
    demand = data.draw(hnp.arrays(np.float64, len(capacities), elements=st.integers(0, 200)))
    groups = pack_groups(capacities, demand, Form().group_size(hidden, 32, DeviceLimits()))
    members = [e for g in groups for e in g.experts]
    assert sorted(members) == np.flatnonzero(capacities).tolist()
    for g in groups:
        assert {int(capacities[e]) for e in g.experts} == {g.capacity}
        assert 1 <= len(g.experts) <= min(8, 16384 // hidden)
    for capacity in set(capacities.tolist()):
        wanted = [demand[e] for g in groups if g.capacity == capacity for e in g.experts]
        assert wanted == sorted(wanted, reverse=True)


def test_a_hidden_size_over_the_surface_limit_is_refused():
    assert Form().group_size(16385, 32, DeviceLimits()) == 0
    plan = plan_of([site_of([[50, 50]], hidden=16385)], 64, INFINITELY_FAST)
    assert "surface" in plan.sites[0].reason


# --- device profiles ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["interpreter", "apple"])
def test_shipped_profiles_load_and_claim_no_measurement(name, tmp_path):
    profile = load_profile(name)
    assert profile.kind != "measured"
    assert "measured" not in {profile.launch_s.kind, profile.device_rate.kind, profile.limits.kind}
    profile.save(tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == profile
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]


def test_rates_interpolate_time_between_entries_and_hold_outside():
    table = RateTable((32, 64), (10.0, 20.0), "estimated", "made up")
    assert np.allclose(table.seconds(np.array([0, 16, 32, 48, 64, 128]), 1e9), [0, 1.6, 3.2, 3.2, 3.2, 6.4])


def test_measured_figures_replace_estimates():
    profile = load_profile("interpreter")
    partly = profile.replace_measured("timed today", figures={"launch_s": 1e-4}, device_rate={64: 90, 32: 50})
    assert (partly.launch_s.value, partly.launch_s.kind) == (1e-4, "measured")
    assert partly.device_rate.rows == (32, 64)
    assert partly.kind == "estimated"
    times = {"launch_s": 1e-4, "join_s": 0, "pack_gbps": 2, "unpack_gbps": 2, "local_overhead_s": 0}
    whole = profile.replace_measured(
        "timed today",
        name="here",
        figures=times | {"weight_gbps": None},
        device_rate={64: 9},
        local_rate={1: 2},
    )
    assert (whole.kind, whole.name) == ("measured", "here")
    with pytest.raises(PreparedError, match="pack_gbps"):
        profile.replace_measured("timed today", figures={"pack_gbps": 0.0})
    with pytest.raises(PreparedError, match="no figure"):
        profile.replace_measured("timed today", figures={"lunch_s": 1.0})


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda d: d.pop("launch_s"), "'launch_s' is missing"),
        (lambda d: d["launch_s"].update(value=-1), "'value'"),
        (lambda d: d["launch_s"].update(value="fast"), "'value'"),
        (lambda d: d["launch_s"].update(kind="guessed"), "'kind'"),
        (lambda d: d["launch_s"].update(source=""), "'source'"),
        (lambda d: d["pack_gbps"].update(value=0), "'value'"),
        (lambda d: d.update(device_rate=[1]), "JSON object"),
        (lambda d: d["device_rate"].update(rows=[64, 32, 128, 2048]), "ascend"),
        (lambda d: d["device_rate"].update(rows=[32]), "pair up"),
        (lambda d: d["device_rate"].update(gflops=[]), "non-empty list"),
        (lambda d: d["limits"].update(programs=0), "'programs'"),
        (lambda d: d["limits"].update(grain=33), "multiple of 32"),
        (lambda d: d.update(schema_version=2), "newer"),
        (lambda d: d.update(schema_version=True), "'schema_version'"),
    ],
)
def test_malformed_profiles_are_refused(change, message):
    data = json.loads(load_profile("interpreter").to_json())
    change(data)
    with pytest.raises(PreparedError, match=message) as caught:
        DeviceProfile.from_json(json.dumps(data))
    assert "\n" not in str(caught.value)


def test_missing_profiles_are_refused(tmp_path):
    with pytest.raises(PreparedError, match="neither a file nor one of"):
        load_profile("toaster")
    with pytest.raises(PreparedError, match="neither a file nor one of"):
        load_profile(tmp_path / "none.json")


# --- placement ---------------------------------------------------------------------------------------------


@FEW
@given(loads_and_chunk(samples=1))
def test_everything_with_load_goes_to_an_infinitely_fast_device(case):
    loads, chunk = case
    site = plan_of([site_of(loads)], chunk, INFINITELY_FAST).sites[0]
    assert sorted(site.hot) == np.flatnonzero(loads.any(axis=0)).tolist()
    if site.spec is None:
        assert "routed no token" in site.reason


def test_a_slower_device_stays_idle_with_a_reason():
    slow = profile_of(device_gflops=0.01, local_gflops=1000.0)
    plan = plan_of([site_of([[50, 40, 30]])], 64, slow)
    site = plan.sites[0]
    assert (site.spec, site.min_chunk, site.expected.gain) == (None, 0, 0.0)
    assert "local alone" in site.reason
    assert site.expected.layer_s == site.expected.stock_s
    assert site.reason in plan.explain()


@FEW
@given(loads_and_chunk(), st.sampled_from([1.0, 10.0, 100.0]), st.sampled_from(["quantile", "uniform"]))
def test_the_chosen_prefix_is_the_best_one(case, device_gflops, tiers):
    loads, chunk = case
    profile = profile_of(device_gflops=device_gflops)
    site = site_of(loads)
    planned = plan_of([site], chunk, profile, tiers=tiers).sites[0]
    hot = sorted(range(site.experts), key=lambda e: (-site.demand[e], e))
    assert set(planned.hot) == set(hot[: len(planned.hot)])
    cost = SiteCost(site, profile, "int8")
    times = [cost.stock_s()]
    for h in range(1, int((site.demand > 0).sum()) + 1):
        capacities = np.zeros(site.experts, np.int64)
        members = hot[:h]
        capacities[members] = choose_capacities(loads[:, members], chunk, TierPolicy(tiers))
        times.append(cost.times(capacities).layer_s)
    assert planned.expected.layer_s == pytest.approx(min(times))
    assert planned.expected.layer_s <= planned.expected.stock_s


def test_the_cost_rule_by_hand():
    profile = profile_of(device_gflops=100.0, local_gflops=1.0, seconds=0.25, gbps=1e-3)
    site = site_of([[40, 10]], hidden=100, width=50)
    times = SiteCost(site, profile, "fp16").times(np.array([32, 0]))
    row = 6 * 100 * 50 / 1e9
    assert times.device_s == pytest.approx(0.25 + 32 * row / 100 + 30000 / 1e6)
    assert times.local_s == pytest.approx(0.25 + (8 + 10) * row)
    assert times.serial_s == pytest.approx(0.25 + 2 * 32 * 200 / 1e6)
    assert times.layer_s == pytest.approx(times.serial_s + max(times.device_s, times.local_s))


@FEW
@given(st.lists(loads_and_chunk(experts=6, samples=2), min_size=1, max_size=6), st.data())
def test_budgets_are_respected(cases, data):
    size = EXPERT_IN_A_PACKAGE
    limits = {
        "program_bytes": size * data.draw(st.integers(1, 4)),
        "total_bytes": size * data.draw(st.integers(1, 12)) + 1,
        "programs": data.draw(st.integers(1, 4)),
    }
    sites = [site_of(loads, layer) for layer, (loads, _) in enumerate(cases)]
    plan = plan_of(sites, 300, replace(INFINITELY_FAST, limits=DeviceLimits(**limits)))
    hot = [e for s in plan.sites for e in s.hot]
    assert len(hot) * size <= limits["total_bytes"]
    assert len(plan.hot_sites) <= limits["programs"]
    assert all(len(s.hot) * size <= limits["program_bytes"] for s in plan.sites)
    assert all((s.spec is None) == bool(s.reason) for s in plan.sites)
    # Nothing that would help is left out while the budget has room.
    wanted = sum(min(int((s.demand > 0).sum()), limits["program_bytes"] // size) for s in sites)
    if len(sites) <= limits["programs"] and all(len(s.loads) == 1 for s in sites):
        assert len(hot) == min(wanted, limits["total_bytes"] // size)


def test_a_tight_budget_keeps_the_experts_that_save_most():
    size = EXPERT_IN_A_PACKAGE
    sites = [site_of([[90, 10, 80]], 0), site_of([[5, 100, 6]], 1), site_of([[1, 1, 1]], 2)]
    tight = replace(INFINITELY_FAST, limits=DeviceLimits(total_bytes=3 * size))
    plan = plan_of(sites, 128, tight)
    assert [sorted(s.hot) for s in plan.sites] == [[0, 2], [1], []]
    assert "layers that gain more" in plan.sites[2].reason


def test_one_expert_over_the_limit_stays_local():
    plan = plan_of([site_of([[50, 50]])], 64, replace(INFINITELY_FAST, limits=DeviceLimits(program_bytes=100)))
    assert "one expert" in plan.sites[0].reason


def test_refused_sites_and_activations_stay_local_with_their_reason():
    sites = [
        site_of([[50, 50]], 0, reason="experts have biases"),
        site_of([[50, 50]], 1, activation=Activation("gelu")),
    ]
    plan = plan_of(sites, 64, INFINITELY_FAST)
    assert plan.sites[0].reason == "experts have biases"
    assert "gelu" in plan.sites[1].reason
    assert plan.hot_sites == ()


def test_values_near_the_limit_stay_local_where_the_activation_allows_no_shift():
    relu2 = site_of([[50, 50]], 0, activation=Activation("relu2"), up_shift=2)
    plan = plan_of([relu2, site_of([[50, 50]], 1, up_shift=2)], 64, INFINITELY_FAST)
    assert "relu2 is not linear" in plan.sites[0].reason
    assert plan.sites[1].spec.up_shift == 2


def test_forced_hot_sets():
    loads = [[50, 0, 30, 40]]
    slow = profile_of(device_gflops=0.01, local_gflops=1000.0)
    everything = plan_of([site_of(loads)], 64, slow, hot="all").sites[0]
    assert (sorted(everything.hot), everything.min_chunk) == ([0, 2, 3], 32)
    assert sorted(plan_of([site_of(loads)], 64, slow, hot=2).sites[0].hot) == [0, 3]
    assert plan_of([site_of(loads)], 64, slow, hot=2, min_chunk=7).sites[0].min_chunk == 7
    assert plan_of([site_of(loads)], 64, slow, hot=0).sites[0].spec is None
    small = replace(slow, limits=DeviceLimits(total_bytes=EXPERT_IN_A_PACKAGE * 2))
    with pytest.raises(UsageError, match="force fewer"):
        plan_of([site_of(loads)], 64, small, hot="all")


@FEW
@given(loads_and_chunk(samples=3), st.sampled_from([20.0, 100.0]))
def test_the_least_chunk_and_everything_above_wins(case, device_gflops):
    loads, chunk = case
    profile = profile_of(device_gflops=device_gflops)
    site = site_of(loads)
    planned = plan_of([site], chunk, profile).sites[0]
    if planned.spec is None:
        return
    capacities = np.zeros(site.experts, np.int64)
    capacities[list(planned.spec.experts)] = planned.spec.capacities
    cost = SiteCost(site, profile, "int8")

    def wins(tokens):
        return cost.times(capacities, tokens / chunk).layer_s < cost.stock_s(tokens / chunk)

    least = planned.min_chunk
    assert all(wins(t) for t in range(least, chunk, 32)) and wins(chunk)
    below = (least - 1) // 32 * 32
    assert below == 0 or not wins(below)


@pytest.mark.parametrize(
    "options",
    [
        {"tiers": "best"},
        {"weights": "int3"},
        {"layout": "rows"},
        {"body": "whole"},
        {"chunk": 0},
        {"hot": "some"},
        {"hot": -1},
        {"hot": True},
        {"min_chunk": 65},
    ],
)
def test_wrong_arguments_are_refused(options):
    with pytest.raises(UsageError, match=r"; use|; choose"):
        plan_of([site_of([[5, 5]])], **({"chunk": 64, "profile": INFINITELY_FAST} | options))


def test_expert_bytes():
    assert expert_bytes(2048, 768, "fp16") == 3 * 2048 * 768 * 2
    assert expert_bytes(2048, 768, "int8") == 3 * 2048 * 768 + 2 * (2 * 768 + 2048)


# --- plans -------------------------------------------------------------------------------------------------


@FEW
@given(
    st.lists(loads_and_chunk(), min_size=0, max_size=4),
    st.sampled_from(["quantile", "uniform"]),
    st.sampled_from(["int8", "fp16"]),
    st.sampled_from([1.0, 100.0]),
    st.sampled_from([32, 64]),
)
def test_plans_survive_json(cases, tiers, weights, device_gflops, grain):
    sites = [site_of(loads, layer, up_shift=layer) for layer, (loads, _) in enumerate(cases)]
    profile = profile_of(device_gflops=device_gflops, grain=grain)
    plan = plan_of(sites, 300, profile, tiers=tiers, weights=weights)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.explain()
    for site in plan.hot_sites:
        assert len(set(site.hot)) == len(site.hot)
        assert site.spec.weights == weights and site.spec.up_shift == site.layer
        assert site.expected.rows == site.spec.rows
        assert all(c % grain == 0 and c <= round_up(300, grain) for c in site.spec.capacities)


@pytest.fixture(scope="module")
def plan() -> Plan:
    sites = [site_of([[90, 10, 80, 0], [60, 30, 70, 0]], 0), site_of([[9, 9, 9, 9]], 1, reason="biases")]
    return plan_of(sites, 128, INFINITELY_FAST)


def test_a_plan_on_disk(plan, tmp_path):
    path = tmp_path / "plan.json"
    plan.save(path)
    plan.save(path)
    assert Plan.load(path) == plan
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    assert plan.site(plan.sites[0].path) is plan.sites[0] and plan.site("elsewhere") is None
    with pytest.raises(PreparedError, match="cannot be read"):
        Plan.load(tmp_path / "none.json")
    with pytest.raises(PreparedError, match="cannot be written"):
        plan.save(tmp_path / "none" / "plan.json")


def test_a_plan_explains_itself(plan):
    text = plan.explain()
    lines = text.splitlines()
    assert "qwen3_moe" in lines[0] and "128 tokens" in lines[0]
    assert "estimated" in lines[1]
    assert any(line.split()[:2] == ["0", "3/4"] for line in lines)
    assert any(line.split()[:2] == ["1", "0/4"] for line in lines)
    assert any(line.split()[:2] == ["total", "3/8"] for line in lines)
    assert "1 of 2 layers offloaded" in text
    assert "Local, layer 1: biases." in text


def program(data):
    return data["sites"][0]["program"]


def group(data):
    return program(data)["groups"][0]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda d: d.update(schema_version=2), "newer"),
        (lambda d: d.update(schema_version=0), "'schema_version'"),
        (lambda d: d.update(schema_version="1"), "'schema_version'"),
        (lambda d: d.update(chunk=0), "'chunk'"),
        (lambda d: d.update(chunk=64.0), "'chunk'"),
        (lambda d: d.update(chunk=2**70), "'chunk'"),
        (lambda d: d.update(chunk=16), "over the chunk"),
        (lambda d: d.update(model_fingerprint=""), "'model_fingerprint'"),
        (lambda d: d.update(model_type=None), "'model_type'"),
        (lambda d: d.update(tiers="best"), "'tiers'"),
        (lambda d: d.update(quantile=1.5), "'quantile'"),
        (lambda d: d.update(quantile=0), "'quantile'"),
        (lambda d: d["device"]["limits"].update(grain=48), "'grain'"),
        (lambda d: d["device"]["limits"].update(grain=64), "multiple of 64"),
        (lambda d: d["device"]["limits"].update(branches=1), "over the device's limit of 1"),
        (lambda d: d["device"]["limits"].update(surface_rows=64), "over the device's limit of 1"),
        (lambda d: d.update(weights="int3"), "'weights'"),
        (lambda d: d.update(layout="rows"), "'layout'"),
        (lambda d: d.update(body="whole"), "'body'"),
        (lambda d: d.update(device="mine"), "'device'"),
        (lambda d: d["device"].update(kind="guessed"), "'kind'"),
        (lambda d: d.update(sites={}), "'sites'"),
        (lambda d: d.update(sites=[None]), "JSON object"),
        (lambda d: d["sites"].append(d["sites"][0]), "listed twice"),
        (lambda d: d["sites"][0].update(reason="both"), "either a program or the reason"),
        (lambda d: d["sites"][1].update(reason=None), "either a program or the reason"),
        (lambda d: d["sites"][0].update(min_chunk=None), "'min_chunk'"),
        (lambda d: d["sites"][1].update(min_chunk=32), "'min_chunk'"),
        (lambda d: d["sites"][0].update(min_chunk=0), "'min_chunk'"),
        (lambda d: d["sites"][0].update(min_chunk=4096), "'min_chunk'"),
        (lambda d: d["sites"][0].update(experts=2), "does not exist"),
        (lambda d: d["sites"][0].update(layer=-1), "'layer'"),
        (lambda d: d["sites"][0].update(path=7), "'path'"),
        (lambda d: d["sites"][0]["expected"].update(rows="many"), "'rows'"),
        (lambda d: d["sites"][0]["expected"].update(pads=-1), "'pads'"),
        (lambda d: d["sites"][0]["expected"].update(device_s=10**400), "'device_s'"),
        (lambda d: program(d).update(groups=[]), "'groups'"),
        (lambda d: program(d).update(hidden=0), "'hidden'"),
        (lambda d: program(d).update(weights="fp16"), "'weights'"),
        (lambda d: program(d).update(activation="gelu"), "'activation'"),
        (lambda d: program(d).update(up_shift=-1), "'up_shift'"),
        (lambda d: program(d)["groups"].append(group(d)), "listed twice"),
        (lambda d: group(d).update(experts=[0, 0]), "listed twice"),
        (lambda d: group(d).update(experts=[]), "'experts'"),
        (lambda d: group(d).update(experts=[True]), "'experts'"),
        (lambda d: group(d).update(experts=["0"]), "'experts'"),
        (lambda d: group(d).update(experts=[-1]), "'experts'"),
        (lambda d: group(d).update(experts=[4]), "does not exist"),
        (lambda d: group(d).update(capacity=33), "multiple of 32"),
        (lambda d: group(d).update(capacity=0), "'capacity'"),
        (lambda d: group(d).update(capacity=160), "over the chunk"),
    ],
)
def test_malformed_plans_are_refused(plan, change, message):
    data = json.loads(plan.to_json())
    change(data)
    check_refused(json.dumps(data), message)


def check_refused(text, message):
    with pytest.raises(PreparedError, match=message) as caught:
        Plan.from_json(text, where="plan of a test")
    sentence = str(caught.value)
    assert sentence.startswith("plan of a test") and "\n" not in sentence
    assert "again" in sentence or "upgrade" in sentence


def test_text_that_is_no_plan_is_refused(plan):
    text = plan.to_json()
    for broken in (
        "", "{", "[]", "null", text[:-10], text.replace("128", "NaN", 1), b"\xff\xfe{}", "[" * 100_000
    ):  # fmt: skip
        check_refused(broken, "not valid JSON|JSON object")


def test_no_key_of_a_plan_may_be_missing(plan):
    def holders(value):
        if isinstance(value, dict):
            yield value
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from holders(inner)

    count = len(list(holders(json.loads(plan.to_json()))))
    for i in range(count):
        keys = list(list(holders(json.loads(plan.to_json())))[i])
        for key in keys:
            data = json.loads(plan.to_json())
            del list(holders(data))[i][key]
            check_refused(json.dumps(data), f"'{key}' is missing")


@FEW
@given(st.data())
def test_any_value_anywhere_is_accepted_or_refused_in_our_words(plan, data):
    text = plan.to_json()
    tree = json.loads(text)
    node, parent, key = tree, None, None
    while isinstance(node, dict | list) and node and (parent is None or data.draw(st.booleans())):
        parent = node
        key = data.draw(st.sampled_from(list(node) if isinstance(node, dict) else range(len(node))))
        node = node[key]
    parent[key] = data.draw(st.sampled_from([None, True, -1, 0, 1.5, 1e308, "x", "", [], [None], {}, {"a": 1}]))
    try:
        Plan.from_json(json.dumps(tree))
    except NpumoeError as error:
        assert "\n" not in str(error)
