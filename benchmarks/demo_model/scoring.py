"""Bits per byte: which windows a text is cut into and how losses become the figure. Knows no framework and no model.

Windows do not overlap. Each document begins after an end-of-text token, so its first token counts too, and bits are
divided by the document's UTF-8 bytes: no tokenizer flatters the figure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

END_ID = 0


@dataclass(frozen=True)
class Window:
    """`tokens`: inputs and targets, two lists of the same length. `bytes`: the share of the document that is meant."""

    tokens: tuple[list[int], list[int]]
    bytes: float


def windows(documents: Sequence[tuple[list[int], int]], length: int, most: int | None = None) -> list[Window]:
    """All windows of (tokens, bytes) documents, those of at most the first `most` tokens.

    A document that is cut off by `most` counts the bytes in proportion to its tokens, else they are exact.
    """
    found, left = [], most if most is not None else sum(len(tokens) for tokens, _ in documents)
    for tokens, size in documents:
        text = [END_ID, *tokens]
        for start in range(0, min(len(tokens), left), length):
            end = min(start + length, len(tokens), left)
            found.append(Window((text[start:end], text[start + 1 : end + 1]), size * (end - start) / len(tokens)))
        left = max(0, left - len(tokens))
    return found


def bits_per_byte(nats: float, size: float) -> float:
    """Summed negative log-likelihood in nats over bytes of text."""
    return nats / math.log(2) / size
