"""Pick the right gloss: which of four WordNet definitions belongs to a word."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from ..data import read_text
from ..errors import UsageError
from . import Question

CHOICES = 4


def questions(count: int, seed: int = 0) -> list[Question]:
    """Questions over the shipped glosses; the wrong ones belong to other words of the same part of speech.

    Raises:
        UsageError: more questions than words.
    """
    entries = [tuple(line.split("\t")) for line in read_text("glosses.txt").splitlines()]
    if count > len(entries):
        raise UsageError(f"There are {len(entries)} words with glosses; ask for no more than that with --questions.")
    by_part: dict[str, list[int]] = defaultdict(list)
    for i, (_, part, _) in enumerate(entries):
        by_part[part].append(i)
    random = np.random.default_rng(seed)
    made = []
    for at in random.permutation(len(entries))[:count]:
        word, part, gloss = entries[at]
        others = random.choice([i for i in by_part[part] if i != at], CHOICES - 1, replace=False)
        glosses = [gloss, *(entries[i][2] for i in others)]
        order = random.permutation(CHOICES)
        prompt = f"{word} ({part}):"
        made.append(Question(prompt, tuple(f" {glosses[i]}" for i in order), int(np.flatnonzero(order == 0)[0])))
    return made
