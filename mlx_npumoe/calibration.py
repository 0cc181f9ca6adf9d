"""The routing profile of a model: how its experts are used on a text.

Counts are kept per 128-token block, so that the load of any chunk is a sum of blocks. Recording needs the model; the
profile itself is a safetensors file with one JSON header and knows no model.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .cache import whole_file
from .errors import PreparedError, UsageError
from .sites import ExpertSite, projection_names
from .weights import ExpertWeights

BLOCK = 128  # tokens
SCHEMA = 2
MAXIMA = ("x", "gate", "up", "product", "down")
SAMPLES = 64  # rows kept a site, for comparing programs with MLX on real inputs


@dataclass
class SiteProfile:
    """What was seen at one site. `counts` has a row per full block; `totals` covers every token, tails too.

    `rows` are inputs spread over the text, the one with the largest magnitude first, and `chosen` their experts.
    `gate_mass` is each expert's sum of gate weights (up to one factor a site), None where gates cannot be observed, for
    `gates_reason`.
    """

    path: str
    experts: int
    top_k: int = 0
    tokens: int = 0
    counts: list[np.ndarray] = field(default_factory=list)  # (E,) int64 each
    totals: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # (E,)
    maxima: dict[str, float] = field(default_factory=lambda: dict.fromkeys(MAXIMA, 0.0))  # largest magnitudes
    rows: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.float32))  # (N, D)
    chosen: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int32))  # (N, K)
    gate_mass: np.ndarray | None = None  # (E,) float64
    gates_reason: str | None = None

    def skew(self) -> dict[str, float]:
        """How uneven the load is: busiest expert over the mean, and the share of the busiest quarter of experts."""
        loads = np.sort(self.totals)[::-1]
        total = max(int(loads.sum()), 1)
        quarter = loads[: max(1, self.experts // 4)].sum()
        return {"max_over_mean": float(loads[0] * self.experts / total), "top_quarter": float(quarter / total)}

    def most_loaded(self, k: int) -> set[int]:
        """The `k` experts with most pairs, ties by number."""
        return set(np.argsort(-self.totals, kind="stable")[:k].tolist())

    def merged(self, other: SiteProfile) -> SiteProfile:
        """What was seen here and there. Sample rows are shared out by tokens, the largest first."""
        here = round(SAMPLES * self.tokens / max(self.tokens + other.tokens, 1))
        parts = [(s.rows[:n], s.chosen[:n]) for s, n in ((self, here), (other, SAMPLES - here)) if len(s.rows) and n]
        rows = np.concatenate([r for r, _ in parts]) if parts else self.rows
        chosen = np.concatenate([c for _, c in parts]) if parts else self.chosen
        if len(rows):
            largest = int(np.abs(rows).max(axis=1).argmax())
            order = np.r_[largest, np.delete(np.arange(len(rows)), largest)]
            rows, chosen = rows[order], chosen[order]
        known = self.gate_mass is not None and other.gate_mass is not None
        return SiteProfile(
            path=self.path,
            experts=self.experts,
            top_k=max(self.top_k, other.top_k),
            tokens=self.tokens + other.tokens,
            counts=[*self.counts, *other.counts],
            totals=self.totals + other.totals,
            maxima={name: max(self.maxima[name], other.maxima[name]) for name in MAXIMA},
            rows=rows,
            chosen=chosen,
            gate_mass=self.gate_mass + other.gate_mass if known else None,  # type: ignore[operator]
            gates_reason=None if known else self.gates_reason or other.gates_reason,
        )

    def loads(self, chunk: int) -> np.ndarray:
        """Pairs each expert gets in a chunk of `chunk` tokens: `(S, E)`, one row per run of blocks.

        Runs overlap block by block. Where the text was shorter than a chunk, the totals are scaled instead.
        """
        blocks = np.array(self.counts, np.float64).reshape(-1, self.experts)
        n, rest = divmod(chunk, BLOCK)
        if n == 0 or len(blocks) < n:
            return (self.totals / max(self.tokens, 1) * chunk)[None]
        sums = np.concatenate([np.zeros((1, self.experts)), np.cumsum(blocks, axis=0)])
        return (sums[n:] - sums[:-n]) * (chunk / (n * BLOCK) if rest else 1.0)


@dataclass
class RoutingProfile:
    """Per-site profiles of one phase of one model on one text."""

    fingerprint: str
    model_type: str
    source: str
    phase: str
    sequence: int  # tokens a call
    sites: dict[str, SiteProfile]

    @property
    def tokens(self) -> int:
        """Tokens seen."""
        return max((s.tokens for s in self.sites.values()), default=0)

    def merged(self, other: RoutingProfile) -> RoutingProfile:
        """Both profiles in one.

        Raises:
            PreparedError: they are of different models.
        """
        require_same_model(self, other)
        same_phase, same_source = self.phase == other.phase, self.source == other.source
        return RoutingProfile(
            fingerprint=self.fingerprint,
            model_type=self.model_type,
            source=self.source if same_source else f"{self.source}, {other.source}",
            phase=self.phase if same_phase else "prefill and decode",
            sequence=max(self.sequence, other.sequence),
            sites={path: site.merged(other.sites[path]) for path, site in self.sites.items()},
        )

    def save(self, path: Path) -> None:
        """Write to `path` (temporary name, fsync, rename)."""
        arrays, header = {}, {k: v for k, v in asdict(self).items() if k != "sites"}
        header["schema"] = SCHEMA
        header["sites"] = {}
        for name, s in self.sites.items():
            arrays[f"{name}.counts"] = mx.array(np.array(s.counts, np.int32).reshape(-1, s.experts))
            arrays[f"{name}.totals"] = mx.array(s.totals.astype(np.int64))
            arrays[f"{name}.rows"] = mx.array(s.rows.astype(np.float32))
            arrays[f"{name}.chosen"] = mx.array(s.chosen.astype(np.int32))
            if s.gate_mass is not None:
                arrays[f"{name}.gate_mass"] = mx.array(s.gate_mass.astype(np.float32))
            header["sites"][name] = {
                "experts": s.experts,
                "top_k": s.top_k,
                "tokens": s.tokens,
                "maxima": s.maxima,
                "gates_reason": s.gates_reason,
            }
        with whole_file(path) as partial:  # keeps the ending, which MLX insists on
            try:
                mx.save_safetensors(str(partial), arrays, {"profile": json.dumps(header, sort_keys=True)})
            except RuntimeError as e:  # MLX's word for a disk that is full or read-only
                raise OSError(errno.EIO, str(e), str(path)) from e

    @classmethod
    def load(cls, path: Path) -> RoutingProfile:
        """Read a saved profile. Raises PreparedError where it is missing, damaged or of another schema."""
        if not path.is_file():
            raise PreparedError(f"There is no routing profile at {path}; make one with mlx_npumoe.calibrate.")
        try:
            loaded: Any = mx.load(str(path), format="safetensors", return_metadata=True)
            arrays, metadata = loaded
            header = json.loads(metadata["profile"])
            schema = header.pop("schema")
            if schema != SCHEMA:
                raise PreparedError(
                    f"{path} is a routing profile of schema {schema}, this version reads schema {SCHEMA}; make a new "
                    "one with mlx_npumoe.calibrate."
                )
            described: dict[str, Any] = header.pop("sites")
            sites = {
                name: SiteProfile(
                    path=name,
                    counts=list(np.array(arrays[f"{name}.counts"], np.int64)),
                    totals=np.array(arrays[f"{name}.totals"]),
                    rows=np.array(arrays[f"{name}.rows"]),
                    chosen=np.array(arrays[f"{name}.chosen"]),
                    gate_mass=_gate_mass(arrays.get(f"{name}.gate_mass")),
                    **facts,
                )
                for name, facts in described.items()
            }
            profile = cls(sites=sites, **header)
        except (RuntimeError, ValueError, KeyError, TypeError) as e:
            raise PreparedError(f"{path} is not a routing profile ({e}); make one with mlx_npumoe.calibrate.") from e
        return profile


def _gate_mass(stored: mx.array | None) -> np.ndarray | None:
    return None if stored is None else np.array(stored, np.float64)


def require_same_model(a: RoutingProfile, b: RoutingProfile) -> None:
    """Raises PreparedError where two profiles are not of the same experts."""
    shapes = [{path: site.experts for path, site in profile.sites.items()} for profile in (a, b)]
    if a.fingerprint != b.fingerprint or shapes[0] != shapes[1]:
        raise PreparedError(
            f"The two routing profiles are of different models ({a.model_type} of experts {a.fingerprint[:12]} and "
            f"{b.model_type} of {b.fingerprint[:12]}); give two profiles of one model."
        )


def overlaps(a: RoutingProfile, b: RoutingProfile, k: int) -> dict[str, float]:
    """Overlap@K of each site: the share of the `k` most loaded experts that two profiles agree on (NPUMoE 5).

    Raises:
        PreparedError: they are of different models. UsageError: `k` is not between 1 and the number of experts.
    """
    require_same_model(a, b)
    least = min((site.experts for site in a.sites.values()), default=0)
    if not 1 <= k <= least:
        raise UsageError(f"Overlap@{k} is impossible: the model has {least} experts a layer; give 1 to {least}.")
    return {p: len(site.most_loaded(k) & b.sites[p].most_loaded(k)) / k for p, site in a.sites.items()}


class SiteStatistics:
    """Fills the profile of one site from what passes. `chosen` is -1 for pairs that stand for no expert's work."""

    def __init__(self, site: ExpertSite) -> None:
        self.profile = SiteProfile(site.path, site.experts, totals=np.zeros(site.experts, np.int64))
        self._random = np.random.default_rng(site.layer)
        self._lots = np.zeros(0)  # of the rows kept; the lowest stay

    def draw(self, n: int) -> np.ndarray:
        """Lots for `n` rows."""
        return self._random.random(n)

    def count(self, chosen: np.ndarray) -> None:
        """Count `(T, K)` choices; full blocks are kept apart."""
        self.profile.top_k = chosen.shape[1]
        self.profile.tokens += len(chosen)
        for start in range(0, len(chosen), BLOCK):
            block = chosen[start : start + BLOCK]
            counts = np.bincount(block[block >= 0], minlength=self.profile.experts)
            self.profile.totals += counts
            if len(block) == BLOCK:
                self.profile.counts.append(counts)

    def weigh(self, chosen: np.ndarray, gates: np.ndarray | None) -> None:
        """Add the gate weights `(T, K)` of the choices; once unknown, the mass stays unknown."""
        if gates is None:
            self.profile.gate_mass = None
            self.profile.gates_reason = self.profile.gates_reason or "an observer of the router saw nothing of a call"
        elif self.profile.gates_reason is None:
            if self.profile.gate_mass is None:
                self.profile.gate_mass = np.zeros(self.profile.experts)
            counted = chosen >= 0
            weights = gates[counted].astype(np.float64)
            self.profile.gate_mass += np.bincount(chosen[counted], weights, minlength=self.profile.experts)

    def sample(self, x: np.ndarray, chosen: np.ndarray, lots: np.ndarray) -> None:
        """Keep the SAMPLES rows with the lowest lots of all calls so far, and the largest as the first."""
        if not len(x):
            return
        largest = int(np.abs(x).max(axis=1).argmax())
        profile = self.profile
        if len(profile.rows):
            x, chosen = np.concatenate([profile.rows, x]), np.concatenate([profile.chosen, chosen])
            lots = np.concatenate([self._lots, lots])
            largest += len(profile.rows)
            lots[0] = self._random.random()  # the largest so far is a row like any other, should it be surpassed
            if np.abs(x[0]).max() >= np.abs(x[largest]).max():
                largest = 0
        lots[largest] = -1.0
        keep = np.argsort(lots)[:SAMPLES]
        profile.rows, profile.chosen, self._lots = x[keep], chosen[keep], lots[keep]

    def stretch(self, maxima: Sequence[float]) -> None:
        """Take up the largest magnitudes of a call."""
        for name, value in zip(MAXIMA, maxima, strict=True):
            self.profile.maxima[name] = max(self.profile.maxima[name], value)


class Recorder:
    """Runs the experts of one site and records what passes: the stand-in hands it every call.

    Off Metal MLX's float32 kernels are slow, so NumPy computes the experts there, where it can; the values recorded are
    the same.
    """

    def __init__(self, site: ExpertSite, module: nn.Module, gates_reason: str | None = None) -> None:
        self._statistics = SiteStatistics(site)
        self.profile.gates_reason = gates_reason
        self._weights = ExpertWeights(site, module)
        self._run = _runner(site)

    @property
    def profile(self) -> SiteProfile:
        """What was recorded so far."""
        return self._statistics.profile

    def __call__(
        self,
        x: mx.array,
        indices: mx.array,
        valid: mx.array | None,
        real: mx.array | None = None,
        gates: mx.array | None = None,
    ) -> mx.array:
        """Rows `(..., K, D)` of the experts, after recording counts, gate weights `(T, K)` and maxima.

        Rows of padding (`valid` False) and pairs that stand for no expert's work (`real` `(T, K)` False) are not
        counted; they come back computed or zero.
        """
        K = indices.shape[-1]
        flat = np.array(indices, np.int64).reshape(-1, K)
        rows = np.ones(len(flat), bool) if valid is None else np.array(valid).reshape(-1)
        keep = np.repeat(rows[:, None], K, axis=1)  # (T, K)
        if real is not None:
            keep &= np.array(real)
        chosen = np.where(keep, flat, -1)[rows]
        self._statistics.count(chosen)
        self._statistics.weigh(chosen, None if gates is None else np.array(gates)[rows])
        tokens = np.array(x.astype(mx.float32)).reshape(len(flat), -1)[rows]
        self._statistics.sample(tokens, chosen, self._statistics.draw(len(tokens)))
        out, maxima = self._run(self._weights, x.reshape(len(flat), -1), flat, keep)
        self._statistics.stretch(maxima)
        return out.reshape(*indices.shape, -1).astype(x.dtype)


Run = Callable[[ExpertWeights, mx.array, np.ndarray, np.ndarray], tuple[mx.array, list[float]]]


def _runner(site: ExpertSite) -> Run:
    by_numpy = site.local_reason is None and not mx.metal.is_available()
    return _experts_numpy if by_numpy else _experts_mlx


def largest_magnitudes(site: ExpertSite, module: nn.Module, rows: np.ndarray, chosen: np.ndarray) -> list[float]:
    """MAXIMA of the experts on `(N, D)` rows whose experts `chosen` `(N, K)` are; -1 for none."""
    keep = chosen >= 0
    if not keep.any():
        return [0.0] * len(MAXIMA)
    return _runner(site)(ExpertWeights(site, module), mx.array(rows), np.where(keep, chosen, 0), keep)[1]


def _experts_mlx(
    weights: ExpertWeights, x: mx.array, indices: np.ndarray, keep: np.ndarray
) -> tuple[mx.array, list[float]]:
    """The experts' rows `(T, K, D)` by mlx-lm's own kernels, sorted, and the largest magnitudes on kept rows."""
    module, K = weights.module, indices.shape[1]
    flat = indices.reshape(-1)
    order = np.argsort(flat, kind="stable")
    sorted_experts = mx.array(flat[order].astype(np.uint32))
    valid = mx.array(keep.reshape(-1)[order])[:, None, None]
    rows = x[mx.array(order // K)][:, None]  # (P, 1, D)
    *first, last = projection_names(module)
    gate_up = [module[name](rows, sorted_experts, sorted_indices=True) for name in first]
    gate, up = gate_up if len(first) == 2 else (mx.zeros(1), *gate_up)
    product = module.activation(up, gate) if len(first) == 2 else module.activation(up)
    down = module[last](product, sorted_experts, sorted_indices=True)
    maxima = [mx.max(mx.where(valid, mx.abs(a), 0)).astype(mx.float32) for a in (rows, gate, up, product, down)]
    out = down.squeeze(1)[mx.array(np.argsort(order))].reshape(*indices.shape, -1)
    mx.eval(out, maxima)
    return out, [float(np.array(m)) for m in maxima]


def _experts_numpy(
    weights: ExpertWeights, x: mx.array, indices: np.ndarray, keep: np.ndarray
) -> tuple[mx.array, list[float]]:
    """As `_experts_mlx`, by a sorted loop of float32 products; pairs not kept come back as zeros."""
    tokens = np.array(x.astype(mx.float32))
    T, K = indices.shape
    out = np.zeros((T, K, tokens.shape[1]), np.float32)
    largest = [float(np.abs(tokens[keep.any(axis=1)]).max(initial=0.0)), 0.0, 0.0, 0.0, 0.0]
    for expert in np.unique(indices[keep]):
        token, column = np.nonzero((indices == expert) & keep)
        parts = weights.matrices(int(expert)).rows(np, weights.site.activation, tokens[token])
        out[token, column] = parts[-1]
        largest = [largest[0]] + [
            old if a is None else max(old, float(np.abs(a).max())) for old, a in zip(largest[1:], parts, strict=True)
        ]
    return mx.array(out), largest


def sequences(
    documents: Sequence[str], encode: Callable[[str], list[int]], length: int, max_tokens: int
) -> list[list[int]]:
    """Token sequences of at most `length`, `max_tokens` in all, documents joined end to end within a sequence."""
    tokens: list[int] = []
    for document in documents:
        tokens += encode(document)
        if len(tokens) >= max_tokens:
            break
    tokens = tokens[:max_tokens]
    return [tokens[i : i + length] for i in range(0, len(tokens), length)]


def up_shift(maxima: dict[str, float], margin: float = 4.0, limit: float = 2.0**15) -> int:
    """Power of two by which `up` is scaled down so that up, product and down stay `margin` below `limit`.

    The Neural Engine's products saturate at 2^15. All three are linear in `up` if the activation is. Ours.
    """
    largest = max(maxima["up"], maxima["product"], maxima["down"]) * margin
    return max(0, int(np.ceil(np.log2(largest / limit)))) if largest > 0 else 0
