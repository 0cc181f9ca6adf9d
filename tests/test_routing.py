"""Packing and combining of rows. Run: pytest tests/test_routing.py"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_npumoe.program import Group, ProgramSpec
from mlx_npumoe.routing import SlotTable, assign, combine, pack

D = 4


def _spec(groups: list[tuple[tuple[int, ...], int]], up_shift: int = 0) -> ProgramSpec:
    return ProgramSpec(D, 8, tuple(Group(e, c) for e, c in groups), up_shift=up_shift)


def _experts(x: np.ndarray, expert: np.ndarray) -> np.ndarray:
    """A stand-in for the experts: every expert does something of its own to a row."""
    return x * (expert[..., None] + 1.0) + expert[..., None]


def _route(
    x: np.ndarray,
    indices: np.ndarray,
    spec: ProgramSpec,
    experts: int,
    valid: np.ndarray | None = None,
    poison: bool = True,
) -> tuple[np.ndarray, np.ndarray, int]:
    """Run a whole call with the stand-in on both sides; pad columns of the device are NaN going out."""
    table = SlotTable.of(spec, experts)
    a = assign(mx.array(indices), table, None if valid is None else mx.array(valid))
    packed = pack(mx.array(x), a, table)
    accepted, n_local, _ = a.split(table)
    outputs = []
    for group, p in zip(spec.groups, packed, strict=True):
        block = np.array(p.astype(mx.float32)).reshape(len(group.experts), D, group.capacity)
        out = np.full_like(block, np.nan)
        for g, e in enumerate(group.experts):
            assert (block[g, :, accepted[e] :] == 0).all()
            n = group.capacity if not poison else accepted[e]
            out[g, :, :n] = _experts(block[g, :, :n].T, np.full(n, e)).T
        outputs.append(mx.array(out.reshape(-1, group.capacity)).astype(mx.float16))
    local = None
    if n_local:
        tokens, chosen = np.array(a.local_token)[:n_local], np.array(a.local_expert)[:n_local]
        local = mx.array(_experts(x[tokens], chosen))
    y = combine(outputs, local, a, table, (*indices.shape, D), mx.float32)
    return np.array(y), accepted, n_local


@st.composite
def _cases(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, ProgramSpec, int]:
    E = draw(st.integers(2, 9))
    K = draw(st.integers(1, min(4, E)))
    T = draw(st.integers(1, 70))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    skew = rng.random(E) ** draw(st.integers(1, 6))
    indices = np.array([rng.choice(E, K, replace=False, p=None if K > 1 else skew / skew.sum()) for _ in range(T)])
    hot = rng.permutation(E)[: draw(st.integers(1, E))]
    cut = draw(st.integers(0, len(hot)))
    groups = [
        (tuple(int(e) for e in part), int(rng.choice([4, 8, 32]))) for part in (hot[:cut], hot[cut:]) if len(part)
    ]
    x = rng.integers(-8, 8, (T, D)).astype(np.float32)
    return x, indices, _spec(groups), E


@settings(max_examples=150, deadline=None)
@given(_cases())
def test_every_pair_comes_back_whatever_the_loads(case: tuple[np.ndarray, np.ndarray, ProgramSpec, int]) -> None:
    x, indices, spec, E = case
    y, accepted, n_local = _route(x, indices, spec, E)
    np.testing.assert_array_equal(y, _experts(x[:, None, :].repeat(indices.shape[1], 1), indices))
    counts = np.bincount(indices.reshape(-1), minlength=E)
    capacity = dict(zip(spec.experts, spec.capacities, strict=True))
    np.testing.assert_array_equal(accepted, [min(counts[e], capacity.get(e, 0)) for e in range(E)])
    assert accepted.sum() + n_local == indices.size


@settings(max_examples=60, deadline=None)
@given(_cases(), st.randoms(use_true_random=False))
def test_permuting_tokens_permutes_rows(case: tuple[np.ndarray, np.ndarray, ProgramSpec, int], random: object) -> None:
    x, indices, spec, E = case
    order = np.random.default_rng(len(x)).permutation(len(x))
    y, *_ = _route(x, indices, spec, E)
    permuted, *_ = _route(x[order], indices[order], spec, E)
    np.testing.assert_array_equal(permuted, y[order])


@settings(max_examples=60, deadline=None)
@given(_cases())
def test_renaming_experts_changes_nothing(case: tuple[np.ndarray, np.ndarray, ProgramSpec, int]) -> None:
    x, indices, spec, E = case
    name = np.random.default_rng(E).permutation(E)
    renamed = _spec([(tuple(int(name[e]) for e in g.experts), g.capacity) for g in spec.groups])
    y, accepted, n_local = _route(x, indices, spec, E)
    y_renamed, accepted_renamed, n_local_renamed = _route(x, name[indices], renamed, E)
    np.testing.assert_array_equal(y_renamed - name[indices][..., None], x[:, None] * (name[indices][..., None] + 1.0))
    np.testing.assert_array_equal(y - indices[..., None], x[:, None] * (indices[..., None] + 1.0))
    np.testing.assert_array_equal(accepted_renamed[name], accepted)
    assert n_local == n_local_renamed


@settings(max_examples=60, deadline=None)
@given(_cases(), st.integers(0, 2**32 - 1))
def test_padding_rows_take_no_slot_and_come_back_as_zeros(
    case: tuple[np.ndarray, np.ndarray, ProgramSpec, int], seed: int
) -> None:
    x, indices, spec, E = case
    valid = np.random.default_rng(seed).random(len(x)) < 0.6
    y, accepted, n_local = _route(np.where(valid[:, None], x, np.nan), indices, spec, E, valid)
    expected = _experts(x[:, None, :].repeat(indices.shape[1], 1), indices)
    np.testing.assert_array_equal(y, np.where(valid[:, None, None], expected, 0))
    counts = np.bincount(indices[valid].reshape(-1), minlength=E)
    assert accepted.sum() + n_local == counts.sum()


@pytest.mark.parametrize("load", [0, 1, 31, 32, 33])
def test_loads_around_the_capacity(load: int) -> None:
    spec = _spec([((1,), 32)])
    indices = np.concatenate([np.full((load, 1), 1), np.full((5, 1), 0)])
    x = np.arange(len(indices) * D, dtype=np.float32).reshape(-1, D) % 31
    y, accepted, n_local = _route(x, indices, spec, 2)
    assert accepted[1] == min(load, 32)
    assert n_local == 5 + max(0, load - 32)
    np.testing.assert_array_equal(y, _experts(x[:, None], indices))


def test_the_papers_example_of_loads_64_32_32_0() -> None:
    """NPUMoE 3.3: four experts of capacity 64 with loads 64, 32, 32 and 0."""
    spec = _spec([((0, 1, 2, 3), 64)])
    indices = np.repeat([0, 1, 2], [64, 32, 32])[:, None]
    x = np.random.default_rng(0).integers(-4, 4, (128, D)).astype(np.float32)
    y, accepted, n_local = _route(x, indices, spec, 4)
    assert accepted.tolist() == [64, 32, 32, 0]
    assert n_local == 0
    np.testing.assert_array_equal(y, _experts(x[:, None], indices))


def test_up_shift_is_undone_outside_the_program() -> None:
    spec = _spec([((0,), 32)], up_shift=3)
    table = SlotTable.of(spec, 1)
    a = assign(mx.zeros((2, 1), mx.int32), table)
    y = combine([mx.full((D, 32), 60000.0, mx.float16)], None, a, table, (2, 1, D), mx.float32)
    assert (np.array(y) == 8 * float(np.float16(60000))).all()
