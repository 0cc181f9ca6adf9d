"""Text a model writes itself, to calibrate on: what it is likely to see in use, with no text to be found for it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .data import own_seeds
from .phase import phase
from .progress import Progress

SELF = "self"  # as a text's name
TEMPERATURE = 1.0  # the model's own distribution
PIECE = 512  # tokens from one seed, at most


def writes_itself(text: Sequence[str | Path] | str | None) -> bool:
    """Whether the model's own text is asked for; a file of that name is `./self`."""
    return text == SELF or (not isinstance(text, str) and text is not None and list(text) == [SELF])


def own_text(
    model: nn.Module, tokenizer: Any, max_tokens: int, sequence: int, *, seed: int = 0, progress: bool = True
) -> list[list[int]]:
    """Token sequences of `sequence` tokens, `max_tokens` in all, that the model writes from the shipped seeds in turn.

    The same model, seed and mlx-lm write the same text on one machine.
    """
    from mlx_lm import stream_generate
    from mlx_lm.sample_utils import make_sampler

    mx.random.seed(seed)
    sampler = make_sampler(temp=TEMPERATURE)
    tokens: list[int] = []
    with Progress("Writing text", max_tokens, "tokens", show=progress) as bar:
        for start in cycle(own_seeds()):
            prompt = tokenizer.encode(start)
            more = min(PIECE, max_tokens - len(tokens)) - len(prompt)
            tokens += prompt
            bar.advance(len(prompt))
            with phase(generating=True):
                for response in stream_generate(model, tokenizer, prompt, max_tokens=max(more, 1), sampler=sampler):
                    tokens.append(response.token)
                    bar.advance()
            if len(tokens) >= max_tokens:
                break
    tokens = tokens[:max_tokens]
    return [tokens[i : i + sequence] for i in range(0, len(tokens), sequence)]
