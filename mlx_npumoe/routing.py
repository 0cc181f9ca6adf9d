"""Slots: which (token, expert) pair goes into which device row, and how rows come back. MLX operations only.

One sort of a unique integer key orders the pairs by expert and token; everything else is index arithmetic, built
lazily, so that a single evaluation gives the packed surfaces and the counts. Letters: T tokens, K experts a token,
E experts, P = T*K pairs, S device slots (rows), D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from .errors import UsageError
from .program import ProgramSpec


@dataclass(frozen=True)
class SlotTable:
    """The static side of a site's program: where each hot expert's rows lie. Cold experts have capacity 0."""

    spec: ProgramSpec
    capacity: mx.array  # (E+1,) int32, last entry: padding rows
    first_slot: mx.array  # (E+1,) int32
    slot_expert: mx.array  # (S,) int32
    slot_rank: mx.array  # (S,) int32
    host_capacity: np.ndarray  # (E,) int64

    @property
    def experts(self) -> int:
        """Number of experts of the site, E."""
        return len(self.host_capacity)

    @classmethod
    def of(cls, spec: ProgramSpec, experts: int) -> SlotTable:
        """The table of `spec` for a site of `experts` experts."""
        capacity = np.zeros(experts + 1, np.int32)
        first = np.zeros(experts + 1, np.int32)
        slot = 0
        for e, c in zip(spec.experts, spec.capacities, strict=True):
            capacity[e], first[e] = c, slot
            slot += c
        repeats = np.array(spec.capacities)
        slot_expert = np.repeat(np.array(spec.experts, np.int32), repeats)
        slot_rank = np.concatenate([np.arange(c, dtype=np.int32) for c in spec.capacities])
        made = cls(
            spec=spec,
            capacity=mx.array(capacity),
            first_slot=mx.array(first),
            slot_expert=mx.array(slot_expert),
            slot_rank=mx.array(slot_rank),
            host_capacity=capacity[:-1].astype(np.int64),
        )
        mx.eval(made.capacity, made.first_slot, made.slot_expert, made.slot_rank)
        return made


class Split(NamedTuple):
    """Numbers the host needs of an assignment."""

    accepted: np.ndarray  # (E,) int64 real rows of each expert on the device
    n_local: int  # pairs left for the local executor
    spilled: int  # those of them that belong to hot experts


@dataclass(frozen=True)
class Assignment:
    """Where each pair of one call goes. Lazy arrays."""

    counts: mx.array  # (E,) int32 pairs per expert, padding left out
    slot_token: mx.array  # (S,) int32 token of each device row, 0 where unfilled
    slot_filled: mx.array  # (S,) bool
    source: mx.array  # (P,) int32 row of each pair in [device rows, local rows, one zero row]
    local_token: mx.array  # (P,) int32, the first n_local entries count; ordered by expert
    local_expert: mx.array  # (P,) int32, likewise

    def split(self, table: SlotTable) -> Split:
        """How the pairs divide. Needs `counts` evaluated."""
        counts = np.array(self.counts, np.int64)
        accepted = np.minimum(counts, table.host_capacity)
        over = counts - accepted
        return Split(accepted, int(over.sum()), int(over[table.host_capacity > 0].sum()))


def assign(indices: mx.array, table: SlotTable, valid: mx.array | None = None) -> Assignment:
    """Give every pair a device slot or a local row (overflow policy `spill`: nothing is dropped).

    Args:
        indices: `(T, K)` expert of each pair.
        table: the site's slots.
        valid: `(T,)` or `(T, K)` bool; padding takes no slot, no capacity and no count, and comes back as zeros.
    """
    T, K = indices.shape
    P, E, S = T * K, table.experts, table.slot_expert.size
    flat = indices.reshape(-1).astype(mx.int32)  # (P,)
    if valid is not None:
        flat = mx.where(mx.broadcast_to(valid.reshape(T, -1), (T, K)).reshape(-1), flat, E)
    key = mx.sort(flat * P + mx.arange(P, dtype=mx.int32))
    expert, order = key // P, key % P  # (P,) both
    counts = mx.zeros((E + 1,), mx.int32).at[flat].add(1)
    start = mx.cumsum(counts) - counts  # (E+1,)

    rank = mx.arange(P, dtype=mx.int32) - start[expert]
    on_device = rank < table.capacity[expert]
    local = mx.logical_and(mx.logical_not(on_device), expert < E)
    local_rank = mx.cumsum(local.astype(mx.int32)) - 1
    zero_row = S + local.sum()
    source = mx.where(on_device, table.first_slot[expert] + rank, mx.where(local, S + local_rank, zero_row))
    local_at = mx.minimum(mx.sort(mx.where(local, mx.arange(P, dtype=mx.int32), P)), P - 1)

    slot_at = mx.minimum(start[table.slot_expert] + table.slot_rank, P - 1)
    slot_filled = table.slot_rank < counts[table.slot_expert]
    in_pair_order = mx.zeros((P,), mx.int32)
    in_pair_order[order] = source.astype(mx.int32)
    return Assignment(
        counts=counts[:E],
        slot_token=mx.where(slot_filled, order[slot_at] // K, 0),
        slot_filled=slot_filled,
        source=in_pair_order,
        local_token=order[local_at] // K,
        local_expert=expert[local_at],
    )


def most_salient(indices: mx.array, table: SlotTable, saliency: mx.array, valid: mx.array | None = None) -> mx.array:
    """Which pairs overflow policy `prune` keeps: `(T, K)` bool. Lazy.

    Of each hot expert's pairs the `capacity` most salient stay, ties by token; NaN is the least salient of all, and
    -0.0 ties with 0.0. Pairs of cold experts stay. What is said of padding (`valid` False) means nothing, and padding
    takes no place.

    Args:
        indices: `(T, K)` expert of each pair.
        table: the site's slots.
        saliency: `(T,)` or `(T, K)`.
        valid: `(T,)` or `(T, K)` bool.
    """
    T, K = indices.shape
    P, E = T * K, table.experts
    if (E + 1) * P >= 2**31:
        raise UsageError(f"{T} tokens of {E} experts are too many for one prune; use a smaller chunk.")
    flat = indices.reshape(-1).astype(mx.int32)  # (P,)
    if valid is not None:
        flat = mx.where(mx.broadcast_to(valid.reshape(T, -1), (T, K)).reshape(-1), flat, E)
    values = mx.broadcast_to(saliency.reshape(T, -1), (T, K)).reshape(-1).astype(mx.float32)
    # One key: expert, the saliency's bits descending, pair. Bits of floats order as integers, negative ones backwards.
    bits = mx.where(values == 0, mx.zeros_like(values), values).view(mx.int32)
    rising = mx.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    rising = mx.where(mx.isnan(values), -(2**31), rising).astype(mx.int64)
    falling = (2**31 - 1) - rising  # 0 to 2**32 - 1
    key = (flat.astype(mx.int64) * 2**32 + falling) * P + mx.arange(P, dtype=mx.int64)
    order = (mx.sort(key) % P).astype(mx.int32)  # (P,)
    expert = flat[order]
    counts = mx.zeros((E + 1,), mx.int32).at[flat].add(1)
    start = mx.cumsum(counts) - counts
    rank = mx.arange(P, dtype=mx.int32) - start[expert]
    capacity = table.capacity[expert]
    kept = mx.zeros((P,), mx.bool_)
    kept[order] = mx.logical_or(capacity == 0, rank < capacity)
    return kept.reshape(T, K)


def renormalised(gates: mx.array, real: mx.array | None, kept: mx.array) -> mx.array:
    """`(T,)` factors that give a token's kept gates the sum of all its gates; exactly 1 where nothing was dropped.

    Args:
        gates: `(T, K)`. real: `(T, K)` bool, the pairs that stand for an expert's work. kept: `(T, K)` bool.
    """
    ours = gates if real is None else mx.where(real, gates, 0)
    rest = mx.where(kept, ours, 0)
    before, after = ours.sum(axis=-1), rest.sum(axis=-1)
    lost = mx.logical_not(kept) if real is None else mx.logical_and(real, mx.logical_not(kept))
    return mx.where(mx.logical_and(lost.any(axis=-1), after > 0), before / mx.where(after > 0, after, 1), 1.0)


def pack(x: mx.array, assignment: Assignment, table: SlotTable) -> list[mx.array]:
    """Accepted rows of `x` `(T, D)` as one `(n*D, C)` float16 array a port; unused columns are zero."""
    D = x.shape[-1]
    rows = x.astype(mx.float16)[assignment.slot_token]  # (S, D)
    rows = mx.where(assignment.slot_filled[:, None], rows, mx.array(0, mx.float16))
    packed, slot = [], 0
    for port in table.spec.ports:
        block = rows[slot : slot + port.slots].reshape(len(port.experts), port.capacity, D)
        packed.append(mx.contiguous(block.transpose(0, 2, 1).reshape(-1, port.capacity)))
        slot += port.slots
    return packed


def combine(
    outputs: Sequence[mx.array],
    local: mx.array | None,
    assignment: Assignment,
    table: SlotTable,
    shape: Sequence[int],
    dtype: mx.Dtype,
) -> mx.array:
    """Bring device and local rows back to `(T, K, D)`. Pad columns are never read.

    Args:
        outputs: one `(n*D, C)` float16 array a port.
        local: `(n_local, D)` rows in the order of `assignment.local_token`, None where there are none.
        shape: `(T, K, D)`.
    """
    D = shape[-1]
    scale = 2.0**table.spec.up_shift
    rows = []
    for port, y in zip(table.spec.ports, outputs, strict=True):
        block = y.reshape(len(port.experts), D, port.capacity).transpose(0, 2, 1).reshape(-1, D)
        block = block.astype(mx.float32) * scale if scale != 1.0 else block
        rows.append(block.astype(dtype))
    if local is not None:
        rows.append(local.astype(dtype))
    rows.append(mx.zeros((1, D), dtype))
    return mx.concatenate(rows)[assignment.source].reshape(shape)
