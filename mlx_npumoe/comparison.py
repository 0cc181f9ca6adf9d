"""A model's quality beside the same model on plain MLX: perplexity, accuracy, divergence, agreement, with intervals.

Takes two functions from tokens to logits and knows nothing of models, devices or modes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from .errors import UsageError
from .evaluate import DEFAULT_WINDOW
from .progress import Progress

Logits = Callable[[mx.array], mx.array]  # tokens (1, T) to logits (1, T, vocabulary)

ROWS = 128  # tokens compared at a time: two float32 rows of a vocabulary each
RESAMPLES = 2000
LEVEL = 0.95
LEAST_UNITS = 8  # documents from which on they are what is drawn; of fewer, windows are


class Sums(NamedTuple):
    """Sums over the tokens of a window, each predicted by both sides."""

    tokens: float
    loss: float  # nats
    reference_loss: float
    correct: float  # tokens that were the most probable
    reference_correct: float
    agreed: float  # tokens for which both hold the same one most probable
    divergence: float  # Kullback-Leibler, reference to model, nats


@dataclass(frozen=True)
class Estimate:
    """A value and its interval (bootstrap percentiles) at LEVEL."""

    value: float
    low: float
    high: float

    @property
    def differs(self) -> bool:
        """Whether zero lies outside the interval."""
        return not self.low <= 0.0 <= self.high


@dataclass(frozen=True)
class Comparison:
    """What a comparison showed. Changes are model against reference."""

    tokens: int
    documents: int
    units: int  # what the bootstrap draws from
    unit: str  # "documents" or "windows"
    perplexity: float
    reference_perplexity: float
    perplexity_change: Estimate  # relative: 0.01 is one percent worse
    accuracy: float  # next token, share
    reference_accuracy: float
    accuracy_change: Estimate  # difference of shares: -0.01 is one point lost
    agreement: float  # share of tokens where both would choose the same next one
    divergence: Estimate  # nats a token

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types, with `differs` beside each change."""
        changes = {f"{name}_differs": getattr(self, name).differs for name in ("perplexity_change", "accuracy_change")}
        return asdict(self) | changes

    def table(self) -> str:
        """For people."""
        ppl, acc, kl = self.perplexity_change, self.accuracy_change, self.divergence
        return "\n".join(
            (
                f"{self.tokens} tokens of {self.documents} documents; {LEVEL:.0%} intervals from {RESAMPLES} resamples "
                f"of {self.units} {self.unit}",
                f"  {'':<22}{'plain MLX':>12}{'this':>12}   change",
                f"  {'perplexity':<22}{self.reference_perplexity:>12.4f}{self.perplexity:>12.4f}   "
                f"{ppl.value:+.3%} ({ppl.low:+.3%} to {ppl.high:+.3%}){_none(ppl)}",
                f"  {'next-token accuracy':<22}{self.reference_accuracy:>12.2%}{self.accuracy:>12.2%}   "
                f"{100 * acc.value:+.3f} points ({100 * acc.low:+.3f} to {100 * acc.high:+.3f}){_none(acc)}",
                f"  {'greedy agreement':<22}{'':>12}{self.agreement:>12.2%}",
                f"  {'KL divergence':<22}{'':>12}{kl.value:>12.2e}   nats a token ({kl.low:.2e} to {kl.high:.2e})",
            )
        )


def _none(change: Estimate) -> str:
    return "" if change.differs else ", no difference"


def compare(
    model: Logits,
    reference: Logits,
    documents: Sequence[Sequence[int]],
    *,
    window: int = DEFAULT_WINDOW,
    progress: bool = True,
    seed: int = 0,
) -> Comparison:
    """Run both sides over documents and compare them token by token.

    A document is cut into windows that do not overlap, as `evaluate.perplexity` does; each is one teacher-forced call.
    Intervals are percentiles of resampled documents, or of windows where there are fewer than LEAST_UNITS documents.

    Args:
        model, reference: tokens `(1, T)` to logits `(1, T, vocabulary)`.
        documents: token ids; those of fewer than two tokens predict nothing and are left out.
        window: tokens a call.
        seed: of the resampling.

    Raises:
        UsageError: nothing to predict, or a window below one.
    """
    if window < 1:
        raise UsageError(f"The window must be at least 1 token, not {window}.")
    texts = [list(d) for d in documents if len(d) > 1]
    if not texts:
        raise UsageError("A comparison needs a text of at least 2 tokens.")
    by_document: list[list[Sums]] = []
    with Progress("Comparing", sum(len(t) - 1 for t in texts), "tokens", show=progress) as bar:
        for text in texts:
            windows = []
            for ids in _windows(text, window):
                windows.append(_compared(model, reference, ids))
                bar.advance(len(ids) - 1)
            by_document.append(windows)
    unit = "documents" if len(texts) >= LEAST_UNITS else "windows"
    units = [sums for windows in by_document for sums in windows]
    if unit == "documents":
        units = [Sums(*np.sum(windows, axis=0)) for windows in by_document]
    return _summary(np.array(units, np.float64), len(texts), unit, seed)


def _windows(text: Sequence[int], window: int) -> Iterator[Sequence[int]]:
    targets = len(text) - 1
    for start in range(0, targets, window):
        yield text[start : min(start + window, targets) + 1]


def _compared(model: Logits, reference: Logits, ids: Sequence[int]) -> Sums:
    tokens = mx.array(list(ids))
    sides = [side(tokens[None, :-1])[0] for side in (model, reference)]
    mx.eval(sides)
    total = np.zeros(len(Sums._fields))
    for start in range(0, len(ids) - 1, ROWS):
        q, p = (_log_probabilities(side[start : start + ROWS]) for side in sides)
        targets = tokens[1 + start : 1 + start + len(q)]
        best_q, best_p = mx.argmax(q, axis=-1), mx.argmax(p, axis=-1)
        parts = (
            -mx.take_along_axis(q, targets[:, None], axis=-1),
            -mx.take_along_axis(p, targets[:, None], axis=-1),
            best_q == targets,
            best_p == targets,
            best_q == best_p,
            mx.sum(mx.exp(p) * (p - q), axis=-1),
        )
        total += [len(q), *(float(np.array(part, np.float64).sum()) for part in parts)]
    return Sums(*total)


def _log_probabilities(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _measures(sums: np.ndarray) -> np.ndarray:
    """Perplexity change, accuracy change and divergence of `(..., 7)` sums: `(..., 3)`."""
    tokens, loss, reference_loss, correct, reference_correct, _, divergence = np.moveaxis(sums, -1, 0)
    with np.errstate(over="ignore", invalid="ignore"):
        change = np.expm1((loss - reference_loss) / tokens)
    return np.stack([change, (correct - reference_correct) / tokens, divergence / tokens], axis=-1)


def _summary(units: np.ndarray, documents: int, unit: str, seed: int) -> Comparison:
    total = units.sum(axis=0)
    sums = Sums(*total)
    random = np.random.default_rng(seed)
    drawn = random.multinomial(len(units), np.full(len(units), 1 / len(units)), RESAMPLES)  # (R, U) times drawn
    spread = np.quantile(_measures(drawn @ units), [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)  # (2, 3)
    change, accuracy, divergence = (
        Estimate(float(v), float(low), float(high)) for v, low, high in zip(_measures(total), *spread, strict=True)
    )
    return Comparison(
        tokens=int(sums.tokens),
        documents=documents,
        units=len(units),
        unit=unit,
        perplexity=_exp(sums.loss / sums.tokens),
        reference_perplexity=_exp(sums.reference_loss / sums.tokens),
        perplexity_change=change,
        accuracy=sums.correct / sums.tokens,
        reference_accuracy=sums.reference_correct / sums.tokens,
        accuracy_change=accuracy,
        agreement=sums.agreed / sums.tokens,
        divergence=divergence,
    )


def _exp(nats: float) -> float:
    return math.inf if nats > 700 else math.exp(nats)
