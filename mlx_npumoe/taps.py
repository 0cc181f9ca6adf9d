"""Observers of what mlx-lm's blocks know and do not hand to their experts.

What can be observed of a site is found and proved in a trial call, so that no family has to be registered: routers are
recognised by what they return, gate weights by what the block does with the experts' rows, attention by mixing tokens.
A family in which something cannot be proved loses only what that would tell, with the reason. With sites this is the
only room that knows mlx-lm's modules. Letters: T tokens, K experts a token, E experts, D hidden.
"""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from .sites import ExpertSite

TRIAL_TOKENS = 12
_EXACT, _ROUNDED = 1e-3, 5e-2  # relative errors a trial allows in float32 and in half precision


@dataclass(frozen=True)
class Call:
    """One call of an observed module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any = None  # None before the call


Listener = Callable[[Call], None]


def observe(module: nn.Module, listener: Listener, *, before: bool = False) -> Callable[[], None]:
    """Tell `listener` of every call of a module, until the function returned is called.

    The module keeps its place, parameters and children; only its class is exchanged for one that tells.
    """
    listeners = type(module).__dict__.get("_listeners")
    if listeners is None:
        listeners = _exchange_class(module)
    place = listeners[0 if before else 1]
    place.append(listener)

    def close() -> None:
        if listener in place:
            place.remove(listener)
            if not any(listeners) and type(module).__dict__.get("_listeners") is listeners:
                module.__class__ = type(module).__bases__[0]

    return close


def _exchange_class(module: nn.Module) -> tuple[list[Listener], list[Listener]]:
    stock: Any = type(module)
    listeners: tuple[list[Listener], list[Listener]] = ([], [])  # before and after a call

    def observed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for listener in tuple(listeners[0]):
            listener(Call(args, kwargs))
        result = stock.__call__(self, *args, **kwargs)
        for listener in tuple(listeners[1]):
            listener(Call(args, kwargs, result))
        return result

    namespace = {"__call__": observed, "_listeners": listeners, "__module__": stock.__module__}
    module.__class__ = type(stock.__name__, (stock,), namespace)
    return listeners


def replay(module: nn.Module, result: Any) -> None:
    """Tell a module's observers that it returned `result`, which a stand-in returned in its place."""
    for listener in type(module).__dict__.get("_listeners", ((), ()))[1]:
        listener(Call((), {}, result))


# --- pairs that compute nothing --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Router:
    """Where a block keeps its router, and how the raw indices `(..., K)` are found in what it returns."""

    name: str
    indices: Callable[[Any], mx.array]


# Blocks whose routers also choose among experts that compute nothing. Those pairs reach the site as expert 0 with
# weight 0; only the router's own indices tell them apart.
_ZERO_EXPERTS = {"mlx_lm.models.longcat_flash.LongcatFlashMoE": _Router("router", lambda result: result[0])}


class PairTap:
    """Tells which (token, expert) pairs of a site's next call are real."""

    def __init__(self, router: nn.Module, find: Callable[[Any], mx.array], experts: int) -> None:
        self._find = find
        self._experts = experts
        self._noted = threading.local()  # calls of several threads do not mix
        self.close = observe(router, self._note)

    def _note(self, call: Call) -> None:
        self._noted.raw = self._find(call.result)

    def take(self, indices: mx.array, *, keep: bool = False) -> mx.array | None:
        """`(T, K)` bool for the site's `indices` `(T, K)`; None where the router was not called before this call."""
        raw = getattr(self._noted, "raw", None)
        if not keep:
            self._noted.raw = None
        if raw is None or raw.size != indices.size:
            return None
        return mx.logical_or(raw.reshape(indices.shape) < self._experts, indices != 0)


def pair_tap(model: nn.Module, path: str, experts: int) -> PairTap | None:
    """The tap of the site at `path`, None where all pairs of such a block are real."""
    block = dict(model.named_modules()).get(path.rpartition(".")[0])
    stock = next((c for c in type(block).__mro__ if "_listeners" not in c.__dict__), object)
    entry = _ZERO_EXPERTS.get(f"{stock.__module__}.{stock.__qualname__}")
    return PairTap(block[entry.name], entry.indices, experts) if entry is not None and block is not None else None


# --- gate weights ----------------------------------------------------------------------------------------


def _softmax(logits: mx.array, indices: mx.array) -> mx.array:
    return mx.take_along_axis(mx.softmax(logits, axis=-1), indices, axis=-1)


def _softmax_of_chosen(logits: mx.array, indices: mx.array) -> mx.array:
    return mx.softmax(mx.take_along_axis(logits, indices, axis=-1), axis=-1)


def _sigmoid(logits: mx.array, indices: mx.array) -> mx.array:
    return mx.sigmoid(mx.take_along_axis(logits, indices, axis=-1))


def _sqrt_softplus(logits: mx.array, indices: mx.array) -> mx.array:
    return mx.sqrt(nn.softplus(mx.take_along_axis(logits, indices, axis=-1)))


def _sparse_mixer(jitter: float) -> Callable[[mx.array, mx.array], mx.array]:
    """phimoe's: the k-th expert's share among the logits close to its own, those chosen before left out."""

    def gates(logits: mx.array, indices: mx.array) -> mx.array:
        left, found = logits, []
        for k in range(indices.shape[-1]):
            index = indices[..., k : k + 1]
            top = mx.take_along_axis(logits, index, axis=-1)
            close = (top - logits) / mx.maximum(mx.abs(logits), top) <= 2 * jitter
            shares = mx.softmax(mx.where(close, left, -mx.inf), axis=-1)
            found.append(mx.take_along_axis(shares, index, axis=-1))
            left = mx.put_along_axis(left, index, mx.array(-mx.inf, left.dtype), axis=-1)
        return mx.concatenate(found, axis=-1)

    return gates


def _normalised(form: Callable[[mx.array, mx.array], mx.array]) -> Callable[[mx.array, mx.array], mx.array]:
    def gates(logits: mx.array, indices: mx.array) -> mx.array:
        scores = form(logits, indices)
        return scores / scores.sum(axis=-1, keepdims=True)

    return gates


# Gate weights from float32 logits (T, E) and the chosen experts (T, K), up to a constant factor.
_FORMS: dict[str, Callable[[mx.array, mx.array], mx.array]] = {
    "softmax of the chosen": _softmax_of_chosen,
    "softmax": _softmax,
    "sigmoid": _sigmoid,
    "normalised sigmoid": _normalised(_sigmoid),
    "sqrt softplus": _sqrt_softplus,
    "normalised sqrt softplus": _normalised(_sqrt_softplus),
    "sparse mixer": _sparse_mixer(0.01),
}
_AS_RETURNED = "as returned"  # experts and weights, by the router
_AS_GIVEN = "as given"  # experts and weights, to the module that holds the experts


@dataclass(frozen=True)
class GateSource:
    """Where a site's gate weights are seen: a module, and how they follow from its call."""

    path: str
    form: str

    def gates(self, call: Call, indices: mx.array) -> mx.array | None:
        """`(T, K)` float32 for the experts `indices` `(T, K)`, 0 for pairs that compute nothing; None if not seen."""
        if self.form in _FORMS:
            return _from_logits(call.result, indices, self.form)
        return _from_pairs(call.result if self.form == _AS_RETURNED else (call.args, call.kwargs), indices)


def _from_logits(result: Any, indices: mx.array, form: str) -> mx.array | None:
    if not isinstance(result, mx.array) or result.ndim < 2 or result.size != len(indices) * result.shape[-1]:
        return None
    logits = result.reshape(len(indices), -1).astype(mx.float32)
    return _FORMS[form](logits, indices.astype(mx.int32))


def _from_pairs(found: Any, indices: mx.array) -> mx.array | None:
    """Weights of the experts that are named beside them."""
    arrays = [a for a in _arrays(found) if a.size == indices.size and a.shape[-1:] == indices.shape[-1:]]
    experts = next((a for a in arrays if mx.issubdtype(a.dtype, mx.integer)), None)
    weights = next((a for a in arrays if mx.issubdtype(a.dtype, mx.floating)), None)
    if experts is None or weights is None:
        return None
    same = experts.reshape(indices.shape).astype(mx.int32) == indices.astype(mx.int32)
    return mx.where(same, weights.reshape(indices.shape).astype(mx.float32), 0)


def _arrays(found: Any) -> list[mx.array]:
    return [a for _, a in tree_flatten(found) if isinstance(a, mx.array)]


# --- the trial -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Proof:
    """What can be observed of one site, and the reason where something cannot.

    `attention`: the module whose output precedes the block. `logits`: the module that returns `(T, E)` numbers the gate
    weights follow from. `layer`: the module that is called with `(B, T, ...)`.
    """

    layer: str | None = None
    attention: str | None = None
    logits: str | None = None
    gates: GateSource | None = None
    batch_reason: str | None = None
    attention_reason: str | None = None
    logits_reason: str | None = None
    gates_reason: str | None = None


def prove(model: nn.Module, sites: Sequence[ExpertSite]) -> dict[str, Proof]:
    """What can be observed of each site, by path, tried on a few tokens. The model is unchanged.

    A candidate for gate weights is believed if the block ignores rows whose mean under them is zero, and weighs all
    tokens alike once their sum is divided out: so they are the block's weights up to one factor.
    """
    try:
        trial = _Trial(model, sites)
    except Exception as e:  # whatever a model of any family may raise
        reason = f"a trial call failed ({type(e).__name__}: {' '.join(str(e).split())})"
        return {s.path: Proof(None, None, None, None, reason, reason, reason, reason) for s in sites}
    return {site.path: trial.proof(site) for site in sites}


class _Trial:
    """One forward pass with every module around the experts observed, and calls of single modules after it."""

    def __init__(self, model: nn.Module, sites: Sequence[ExpertSite]) -> None:
        self._modules = dict(model.named_modules())
        self._layers = {site.path: _layer_path(site.path) for site in sites}
        self._given: dict[str, Call] = {}  # arguments as they were before the call, which may write to its caches
        self._calls: dict[str, tuple[int, Call]] = {}  # in order of their ends, the first of each module
        layers, paths = set(self._layers.values()), {site.path for site in sites}
        closing = []
        try:
            for path, module in self._modules.items():
                inside = any(path.startswith(p + ".") for p in paths)
                if not inside and any(path == layer or path.startswith(layer + ".") for layer in layers if layer):
                    closing += [
                        observe(module, self._freezer(path), before=True),
                        observe(module, self._listener(path)),
                    ]
            ids = np.random.default_rng(0).permutation(64)[:TRIAL_TOKENS]
            out = model(mx.array(ids)[None])
            mx.eval(_arrays([out, [(c.args, c.result) for _, c in self._calls.values()]]))
        finally:
            for close in closing:
                close()

    def _freezer(self, path: str) -> Listener:
        def note(call: Call) -> None:
            if path not in self._given:
                self._given[path] = Call(
                    tuple(map(_frozen, call.args)), {k: _frozen(v) for k, v in call.kwargs.items()}
                )

        return note

    def _listener(self, path: str) -> Listener:
        def note(call: Call) -> None:
            given = self._given[path]
            self._calls.setdefault(path, (len(self._calls), Call(given.args, given.kwargs, call.result)))

        return note

    def proof(self, site: ExpertSite) -> Proof:
        """What holds of one site."""
        layer, called = self._layers[site.path], self._calls.get(site.path)
        if layer is None or called is None:
            reason = "the experts were not called in a trial" if layer else "no layer is known around the experts"
            return Proof(None, None, None, None, reason, reason, reason, reason)
        attention = self._attention(layer, site.path, called[0])
        gates, logits, gates_reason = self._gates(layer, site, called)
        batch_known = _batch(self._calls[layer][1]) == 1 if layer in self._calls else False
        return Proof(
            layer=layer if batch_known else None,
            attention=attention,
            logits=logits,
            gates=gates,
            batch_reason=None if batch_known else "the number of sequences of a call is not seen",
            attention_reason=None if attention else "no attention comes before the experts",
            logits_reason=None if logits else "the router hands no logits out that its gate weights follow from",
            gates_reason=gates_reason,
        )

    def _before(self, layer: str, path: str, end: int) -> list[tuple[str, Call]]:
        """Modules of a layer called before the experts, none around those, in order."""
        return [
            (name, call)
            for name, (at, call) in self._calls.items()
            if at < end and name.startswith(layer + ".") and not path.startswith(name + ".")
        ]

    # attention

    def _attention(self, layer: str, path: str, end: int) -> str | None:
        """The last module before the experts that mixes tokens, seen from outside."""
        before = self._before(layer, path, end)
        names = {name for name, _ in before}
        for name, call in reversed(before):
            inner = any(name.startswith(other + ".") for other in names)
            if not inner and self._mixes(name, call):
                return name
        return None

    def _mixes(self, name: str, call: Call) -> bool:
        """Whether what a module returns for the last tokens changes with the first one."""
        x, was = next(iter(call.args), None), _first_array(call.result)
        if not isinstance(x, mx.array) or was is None or min(x.ndim, was.ndim) < 3:
            return False
        if x.shape[:2] != (1, TRIAL_TOKENS) or was.shape[:2] != x.shape[:2] or not mx.issubdtype(x.dtype, mx.floating):
            return False
        first = mx.arange(TRIAL_TOKENS).reshape(1, -1, *[1] * (x.ndim - 2)) == 0
        try:
            other = mx.where(first, mx.roll(x, 1, -1), x)  # its negative is the same to products of two rows
            now = _first_array(self._modules[name](other, *call.args[1:], **call.kwargs))
        except Exception:  # a module that keeps state of its own may refuse a second call
            return False
        change = mx.abs(now.astype(mx.float32) - was.astype(mx.float32))[:, 1:]
        return bool((change.max() > 1e-6 * mx.abs(was.astype(mx.float32)).max()).item())

    # gates

    def _gates(
        self, layer: str, site: ExpertSite, called: tuple[int, Call]
    ) -> tuple[GateSource | None, str | None, str | None]:
        """The source of gate weights, the module of the logits, and the reason where there are no gate weights."""
        end, call = called
        indices = call.args[1]
        K = indices.shape[-1]
        flat = indices.reshape(-1, K)
        parent = site.path.rpartition(".")[0]
        if parent not in self._calls:
            return None, None, "the block around the experts is not called as one"
        block = _Block(self._modules[parent], site.path.rpartition(".")[2], self._calls[parent][1], call)
        sources = [GateSource(parent, _AS_GIVEN)]
        for name, _ in self._before(layer, site.path, end):
            sources += [GateSource(name, form) for form in (_AS_RETURNED, *_FORMS)]
        gates, logits, constant = None, None, False
        for source in sources:
            needed = logits is None if source.form in _FORMS else gates is None
            result = self._calls[source.path][1]
            if not needed or (source.form in _FORMS and not _of_width(result.result, site.experts)):
                continue
            weights = source.gates(result, flat)
            if weights is None or not block.weighs_by(weights):
                continue
            if K == 1 and bool((mx.abs(weights - weights[:1]) < 1e-3).all().item()):
                constant = True
                continue
            if source.form in _FORMS:
                logits = source.path
            gates = gates or source
        if gates is not None:
            return gates, logits, None
        if constant:
            return None, None, "its gate weights do not weigh the experts' outputs"
        return None, None, "no gate weights were found that the block weighs its experts by"


class _Block:
    """A block that is called again with other rows in its experts' place."""

    def __init__(self, module: nn.Module, name: str, call: Call, experts: Call) -> None:
        self._module, self._name, self._call = module, name, call
        self._like = experts.result  # (..., K, D)
        D = self._like.shape[-1]
        self._tolerance = _EXACT if self._like.dtype == mx.float32 else _ROUNDED
        K = self._like.shape[-2]
        self._rows = mx.random.normal((self._like.size // D // K, K, D), key=mx.random.key(0))  # (T, K, D)
        self._zero = self.out(mx.zeros_like(self._rows))
        self._scale = mx.linalg.norm(self.out(self._rows) - self._zero).item()

    def out(self, rows: mx.array) -> mx.array:
        """What the block returns `(T, D)` where its experts return `rows` `(T, K, D)`."""
        stock = self._module[self._name]
        self._module[self._name] = _Rows(rows.reshape(self._like.shape).astype(self._like.dtype))
        try:
            found = _first_array(self._module(*self._call.args, **self._call.kwargs))
        finally:
            self._module[self._name] = stock
        return found.reshape(len(rows), -1).astype(mx.float32)

    def weighs_by(self, gates: mx.array) -> bool:
        """Whether the block's sum is one under these gates `(T, K)`, times a constant."""
        some = (gates != 0).any(axis=-1)  # (T,) others have chosen nothing but zero experts
        if not bool(mx.logical_and(mx.isfinite(gates).all(), some.any()).item()) or not self._scale:
            return False
        total = mx.where(some, gates.sum(axis=-1), 1)[:, None, None]
        mean = (gates[..., None] * self._rows).sum(axis=1, keepdims=True) / total
        left = mx.linalg.norm(self.out(self._rows - mean) - self._zero) / self._scale
        alike = self.out(mx.broadcast_to(self._rows[:1, :1] / total, self._rows.shape)) - self._zero  # (T, D)
        centre = mx.where(some[:, None], alike, 0).sum(axis=0, keepdims=True) / some.sum()
        apart = mx.where(some, mx.linalg.norm(alike - centre, axis=-1), 0)
        spread = apart.max() / mx.linalg.norm(centre)
        return bool(mx.logical_and(left < self._tolerance, spread < self._tolerance).item())  # False for NaN


class _Rows(nn.Module):
    """Returns the same rows whatever it is called with."""

    def __init__(self, rows: mx.array) -> None:
        super().__init__()
        self._made = rows

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        return self._made


def _of_width(result: Any, experts: int) -> bool:
    """Whether a result is one array with a number an expert, zero experts included."""
    return isinstance(result, mx.array) and result.ndim >= 2 and result.shape[-1] >= experts


def _frozen(value: Any) -> Any:
    """A copy of what a call may write to; arrays are never written to."""
    return value if value is None or isinstance(value, mx.array | int | float | str) else copy.deepcopy(value)


def _first_array(result: Any) -> Any:
    return next(iter(_arrays(result)), None)


def _layer_path(path: str) -> str | None:
    match = re.match(r"(?:.*\.)?(?:layers|h|blocks)\.\d+(?=\.|$)", path)
    return match[0] if match else None


def _batch(call: Call) -> int | None:
    """Number of sequences of a layer's call."""
    x = _first_array((call.args, call.kwargs))
    return x.shape[0] if x is not None and x.ndim >= 3 else None


# --- at run time -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """What was seen of a site's next call. Lazy."""

    batch: int | None  # sequences
    attention_norm: mx.array | None  # (T,) L2 of each token's attention output
    gates: mx.array | None  # (T, K)


class SiteTaps:
    """The observers of one site, until they are closed."""

    def __init__(self, model: nn.Module, site: ExpertSite, proof: Proof) -> None:
        self._source = proof.gates
        self._noted = threading.local()
        modules = dict(model.named_modules())
        self._closing = []
        for name, path, before in (
            ("layer", proof.layer, True),
            ("attention", proof.attention, False),
            ("gates", proof.gates and proof.gates.path, proof.gates is not None and proof.gates.form == _AS_GIVEN),
        ):
            if path is not None:
                self._closing.append(observe(modules[path], self._listener(name), before=before))

    def _listener(self, name: str) -> Listener:
        def note(call: Call) -> None:
            if name == "layer":  # a new call: what was seen of the last one is gone
                self._noted.__dict__.clear()
                self._noted.batch = _batch(call)
            elif name == "attention":
                self._noted.attention = _first_array(call.result)
            else:
                self._noted.gates = call

        return note

    def take(self, indices: mx.array) -> Seen:
        """What was seen since the last call, of the site's call with `indices` `(T, K)`."""
        noted = dict(self._noted.__dict__)
        self._noted.__dict__.clear()
        attention, call = noted.get("attention"), noted.get("gates")
        norm = None
        if attention is not None and attention.size == len(indices) * attention.shape[-1]:
            norm = mx.linalg.norm(attention.reshape(len(indices), -1).astype(mx.float32), axis=-1)
        gates = None if call is None or self._source is None else self._source.gates(call, indices)
        return Seen(noted.get("batch"), norm, gates)

    def close(self) -> None:
        """Give the modules their classes back."""
        for close in self._closing:
            close()
