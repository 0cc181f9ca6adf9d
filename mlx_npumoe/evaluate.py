"""Quality of a model on text: perplexity. Takes any mlx-lm model, attached or not, and loads none."""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .errors import UsageError

DEFAULT_WINDOW = 512


def perplexity(model: nn.Module, tokens: Sequence[int], window: int = DEFAULT_WINDOW) -> float:
    """exp of the mean negative log-likelihood of every token but the first.

    The text is cut into inputs of `window` tokens that do not overlap (the last may be shorter). Each input is one
    teacher-forced call without a cache, so a token sees at most the `window` tokens before it and none across a
    border; the last target of a window is the first token of the next. Softmax and sums are float32 or wider.

    Args:
        model: an mlx-lm model: `model(tokens (1, T))` -> logits `(1, T, vocabulary)`.
        tokens: the text, at least two tokens.
        window: tokens a call.

    Raises:
        UsageError: fewer than two tokens, or a window below one.
    """
    if len(tokens) < 2:
        raise UsageError(f"Perplexity needs a text of at least 2 tokens; this one has {len(tokens)}.")
    if window < 1:
        raise UsageError(f"The perplexity window must be at least 1 token, not {window}.")
    targets = len(tokens) - 1
    total = 0.0
    for start in range(0, targets, window):
        end = min(start + window, targets)
        total += _negative_log_likelihood(model, tokens[start : end + 1])
    mean = total / targets
    return math.inf if mean > 700 else math.exp(mean)


def _negative_log_likelihood(model: nn.Module, tokens: Sequence[int]) -> float:
    """Summed over all tokens but the first, in nats."""
    ids = mx.array(list(tokens))
    logits = model(ids[None, :-1])[0].astype(mx.float32)  # (T, vocabulary)
    chosen = mx.take_along_axis(logits, ids[1:, None], axis=-1).squeeze(-1)  # (T,)
    losses = mx.logsumexp(logits, axis=-1) - chosen
    return float(np.array(losses).sum(dtype=np.float64))
