"""RoutedExperts, the stand-in for a site's experts: assigns pairs to executors, starts them in order, combines.

It carries the stock module's children under the same names, so parameter paths, quantisation walks and adapters see
what they always saw. Where no executor but the local one is wanted it builds stock's own graph and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from . import phase
from .calibration import Recorder
from .errors import DeviceError, InputError, UsageError
from .executors.device import DeviceExecutor
from .executors.local import LocalExecutor
from .policies import Pruning
from .report import LayerCounters
from .routing import assign, combine, most_salient, pack, renormalised
from .taps import PairTap, Seen, SiteTaps
from .usage import UseRecorder
from .weights import Seal

_OWN = (
    "_stock",
    "_stock_class",
    "_evaluated_in_prefill",
    "_local",
    "_device",
    "_recorder",
    "_counters",
    "_seal",
    "_float32",
    "_tap",
    "_taps",
    "_pruning",
    "_usage",
)


class RoutedExperts(nn.Module):
    """Experts of one site, spread over executors.

    Attributes that are not the stock module's start with an underscore and are invisible to MLX's walks.

    Args:
        stock: the module it stands in for.
        evaluated_in_prefill: False where no cache follows, so that a generation loop never computes this site's
            output for a prefill chunk.
        tap: tells which pairs are real, where not all of them are; closed with `unwrapped`.
    """

    def __init__(self, stock: nn.Module, *, evaluated_in_prefill: bool = True, tap: PairTap | None = None) -> None:
        super().__init__()
        self.__dict__.update(stock.__dict__)
        dict.update(self, stock)
        object.__setattr__(self, "_stock", stock)  # nn.Module would take it for a child
        self._stock_class = type(stock)
        self._evaluated_in_prefill = evaluated_in_prefill
        self._local = LocalExecutor(type(stock))
        self._device: DeviceExecutor | None = None
        self._recorder: Recorder | None = None
        self._counters = LayerCounters()
        self._seal: Seal | None = None
        self._float32 = False
        self._tap = tap
        self._taps: SiteTaps | None = None
        self._pruning: Pruning | None = None
        self._usage: UseRecorder | None = None

    def use(self, device: DeviceExecutor) -> None:
        """Send hot experts to `device`, for as long as nobody touches their weights."""
        self._seal = Seal(self)
        self._float32 = any(a.dtype == mx.float32 for _, a in tree_flatten(self.parameters()))
        self._device = device

    def prune(self, pruning: Pruning, taps: SiteTaps) -> None:
        """Drop what the device has no room for, as `pruning` says."""
        self._pruning, self._taps = pruning, taps

    def changed(self) -> bool:
        """Whether weights were loaded, written, quantised or adapted since `use`: the programs compute the old ones."""
        return self._seal is not None and self._seal.broken(self)

    def unwrapped(self) -> nn.Module:
        """The stock module, holding whatever children this one holds now."""
        self.untap()
        dict.clear(self._stock)
        dict.update(self._stock, self)
        self._stock.__dict__.update((k, v) for k, v in self.__dict__.items() if k not in _OWN)
        return self._stock

    def untap(self) -> None:
        """Give modules around the experts their classes back, where they were observed."""
        for tap in (self._tap, self._taps):
            if tap is not None:
                tap.close()

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        """Rows of the chosen experts: `(..., D)` and `(..., K)` to `(..., K, D)`."""
        device, now = self._device, phase.current()
        tokens = indices.size // indices.shape[-1]
        seen = None if self._taps is None else self._taps.take(indices.reshape(tokens, -1))
        if self._recorder is not None:
            real = self._real(indices.reshape(tokens, -1))
            return self._recorder(x, indices, _rows_valid(now, tokens), real, None if seen is None else seen.gates)
        if self._usage is not None:
            flat = indices.reshape(tokens, -1)
            real = self._real(flat, keep=True)
            self._usage.note(
                x.reshape(tokens, -1), flat, _rows_valid(now, tokens), real, None if seen is None else seen.gates
            )
        if device is None or _decoding(indices, now) or not device.wants(tokens) or self.changed():
            return self._local.whole(self, x, indices)
        if now.generating and not self._evaluated_in_prefill:
            return self._local.whole(self, x, indices)
        flat = indices.reshape(tokens, -1)
        valid, real = _rows_valid(now, tokens), self._real(flat)
        pruned = None
        if self._pruning is not None and seen is not None:
            pruned = self._pruned(
                self._pruning, seen, x.reshape(tokens, -1), real, known=_padding_known(now, seen, valid)
            )
        if real is not None:
            valid = real if valid is None else mx.logical_and(real, valid[:, None])
        return self._routed(device, x.reshape(tokens, -1), flat, valid, pruned).reshape(*indices.shape, -1)

    def _real(self, indices: mx.array, *, keep: bool = False) -> mx.array | None:
        """Which pairs `(T, K)` stand for an expert's work; None where all do. Told once a call, unless kept."""
        return None if self._tap is None else self._tap.take(indices, keep=keep)

    def _pruned(
        self, pruning: Pruning, seen: Seen, x: mx.array, real: mx.array | None, *, known: bool
    ) -> Pruned | None:
        """What a call is pruned by; None, counted, where an observer has seen nothing of it."""
        if not known:
            raise UsageError(
                "overflow='prune' has to know which rows of a batch are padding, and a bare call does not say; "
                "use mlx_npumoe.batch_generate, one sequence a call, or overflow='spill'."
            )
        saliency = seen.attention_norm if pruning.saliency == "attention_norm" else seen.gates
        if saliency is None or (pruning.renormalise and seen.gates is None):
            self._counters.unpruned += 1
            return None
        if pruning.saliency == "gate_norm":
            saliency = saliency * mx.linalg.norm(x.astype(mx.float32), axis=-1, keepdims=True)
        return Pruned(saliency, seen.gates, pruning.renormalise, real)

    def _routed(
        self,
        device: DeviceExecutor,
        x: mx.array,
        indices: mx.array,
        valid: mx.array | None,
        pruned: Pruned | None,
    ) -> mx.array:
        """Pieces of the plan's chunk, each on the device unless it is too short, is traced, or the device fails."""
        pieces = []
        for start in range(0, len(x), device.chunk):
            at = slice(start, start + device.chunk)
            part = None if pruned is None else pruned.at(at)
            pieces.append(self._tried(device, x[at], indices[at], None if valid is None else valid[at], part))
        return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces)

    def _rows_as(self, x: mx.array) -> mx.Dtype:
        """The type stock returns rows of `x` in: float32 experts widen half precision."""
        return mx.float32 if self._float32 else x.dtype

    def _tried(
        self,
        device: DeviceExecutor,
        x: mx.array,
        indices: mx.array,
        valid: mx.array | None,
        pruned: Pruned | None,
    ) -> mx.array:
        if device.wants(len(x)):
            try:
                out = self._piece(device, x, indices, valid, pruned)
                device.breaker.success()
                return out
            except _Traced:
                pass
            except DeviceError as e:
                self._counters.fallbacks += 1
                if not isinstance(e, InputError):
                    device.breaker.failure(str(e))
        return self._local.whole(self, x, indices)

    def _piece(
        self,
        device: DeviceExecutor,
        x: mx.array,
        indices: mx.array,
        valid: mx.array | None,
        pruned: Pruned | None,
    ) -> mx.array:
        """One launch: pack, hand over, run our half meanwhile, join, combine. `(T, D)`, `(T, K)` to `(T, K, D)`."""
        table = device.table
        kept = None if pruned is None else most_salient(indices, table, pruned.saliency, valid)
        assignment = assign(indices, table, _both(kept, valid))
        packed = pack(x, assignment, table)
        losses = () if pruned is None or kept is None else pruned.losses(kept, valid)
        _evaluate(packed, assignment.counts, *losses)
        accepted, n_local, spilled = assignment.split(table)
        ticket = device.start(packed, accepted)
        local = None
        if n_local:
            local = self._local.rows(self, x, assignment.local_token[:n_local], assignment.local_expert[:n_local])
            mx.async_eval(local)
        outputs = device.join(ticket, self._counters)
        out = combine(outputs, local, assignment, table, (*indices.shape, x.shape[-1]), self._rows_as(x))
        if pruned is not None and kept is not None:
            out = pruned.weighed(out, kept)
            self._counters.lose(*(float(np.array(number)) for number in losses))
        mx.async_eval(out)
        ticket.retire(out)
        self._counters.spilled += spilled
        return out


@dataclass(frozen=True)
class Pruned:
    """What one call is pruned by. `gates` and `real` `(T, K)` where they are known; lazy."""

    saliency: mx.array  # (T,) or (T, K)
    gates: mx.array | None
    renormalise: bool
    real: mx.array | None

    def at(self, tokens: slice) -> Pruned:
        """The same of some tokens."""
        gates, real = (None if a is None else a[tokens] for a in (self.gates, self.real))
        return Pruned(self.saliency[tokens], gates, self.renormalise, real)

    def losses(self, kept: mx.array, valid: mx.array | None) -> tuple[mx.array, ...]:
        """Numbers of dropped pairs, and where gates are known the gate weights of all and of dropped pairs."""
        real = (
            mx.ones(kept.shape, mx.bool_)
            if valid is None
            else mx.broadcast_to(valid.reshape(len(kept), -1), kept.shape)
        )
        lost = mx.logical_and(real, mx.logical_not(kept))
        if self.gates is None:
            return (lost.sum(),)
        return lost.sum(), mx.where(real, self.gates, 0).sum(), mx.where(lost, self.gates, 0).sum()

    def weighed(self, rows: mx.array, kept: mx.array) -> mx.array:
        """Rows `(T, K, D)`, scaled where gates are to be renormalised."""
        if not self.renormalise or self.gates is None:
            return rows
        return rows * renormalised(self.gates, self.real, kept).astype(rows.dtype)[:, None, None]


def _both(kept: mx.array | None, valid: mx.array | None) -> mx.array | None:
    """Pairs that are kept and no padding."""
    if kept is None:
        return valid
    return kept if valid is None else mx.logical_and(kept, valid.reshape(len(kept), -1))


class _Traced(Exception):
    """The call is traced by `mx.compile` or another transformation, which allows no evaluation."""


def _evaluate(*arrays: object) -> None:
    try:
        mx.async_eval(*arrays)  # refused by every transformation, where eval passes under a gradient
    except (RuntimeError, ValueError) as e:
        if "transformation" in str(e):
            raise _Traced from e
        raise
    mx.eval(*arrays)


def _decoding(indices: mx.array, now: phase.Phase) -> bool:
    """Whether each sequence brings a single token; of flattened calls, `(B*T, K)`, only the loop knows that of many."""
    return now.decoding or indices.ndim < 2 or indices.shape[-2] == 1


def _rows_valid(now: phase.Phase, tokens: int) -> mx.array | None:
    """The loop's padding mask as `(T,)`, where it speaks of this call's rows."""
    if now.valid is None or now.valid.size != tokens:
        return None
    return now.valid.reshape(-1)


def _padding_known(now: phase.Phase, seen: Seen, valid: mx.array | None) -> bool:
    """Whether the loop says which rows are padding, or there is a single sequence, which has none."""
    return valid is not None or now.unpadded or seen.batch == 1
