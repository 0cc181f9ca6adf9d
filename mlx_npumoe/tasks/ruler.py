"""Synthetic long-context tasks of the form of RULER (Hsieh et al., arXiv 2404.06654), with choices to pick from.

Needles hide in filler sentences at random places. Every prompt is filled up to the length asked for, in tokens of the
model's tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from ..errors import UsageError
from . import Count, Question

CHOICES = 4
KEYS = 4  # needles of the multi-key task, one of them asked for
HOPS = 3  # assignments in each chain of variables
COMMON, RARE = 8, 2  # times a word is said

_FILLER = (
    "The grass is green and the sky is blue.",
    "The river runs past the mill and under the bridge.",
    "In the evening the shops close and the street grows quiet.",
    "The road goes up the hill and comes down on the other side.",
    "Rain fell in the morning, and the sun came out at noon.",
    "The old clock in the hall has not been wound for years.",
    "Boats lie in the harbour until the tide comes in.",
    "There and back again takes the better part of a day.",
)
_NAMES = (
    "apple", "bridge", "candle", "desert", "engine", "forest", "garden", "hammer", "island",
    "jacket", "kettle", "ladder", "mirror", "needle", "orange", "pencil", "quarry", "ribbon",
    "saddle", "tunnel", "velvet", "window", "yellow", "anchor", "basket", "copper", "dragon",
    "feather", "guitar", "helmet", "insect", "jungle", "lantern", "marble", "nectar", "oyster",
)  # fmt: skip


def questions(kind: str, count: int, tokens: int, size: Count, seed: int = 0) -> list[Question]:
    """Questions of `single`, `multikey`, `variables` or `words`, each of at most `tokens` tokens.

    Raises:
        UsageError: the needles and the question alone are longer.
    """
    make = _KINDS[kind]
    random = np.random.default_rng([seed, list(_KINDS).index(kind)])
    return [make(random, tokens, size) for _ in range(count)]


def _single(random: np.random.Generator, tokens: int, size: Count) -> Question:
    """One needle; the other choices are numbers the text does not hold."""
    (name,) = _some(random, _NAMES, 1)
    numbers = _numbers(random, CHOICES)
    question = f"\nThe special number for {name} mentioned in the text is"
    return _asked(random, [_needle(name, numbers[0])], question, _spaced(numbers), tokens, size)


def _multikey(random: np.random.Generator, tokens: int, size: Count) -> Question:
    """Several needles of one form; the other choices are the numbers of the other needles."""
    names, numbers = _some(random, _NAMES, KEYS), _numbers(random, KEYS)
    needles = [_needle(n, v) for n, v in zip(names, numbers, strict=True)]
    question = f"\nThe special number for {names[0]} mentioned in the text is"
    return _asked(random, _shuffled(random, needles), question, _spaced(numbers), tokens, size)


def _variables(random: np.random.Generator, tokens: int, size: Count) -> Question:
    """Chains of assignments, interleaved; asked for the value at the end of one, the others are the choices."""
    letters = _some(random, [chr(ord("A") + i) for i in range(26)], 26)
    numbers = _numbers(random, 2)
    chains = [[f"{c}{i}" for i in range(1, HOPS + 1)] for c in letters[:2]]
    steps = [
        [f"VAR {chain[0]} = {number}.", *(f"VAR {b} = VAR {a}." for a, b in pairwise(chain))]
        for chain, number in zip(chains, numbers, strict=True)
    ]
    needles = []  # the steps of a chain stay in order
    left = [list(s) for s in steps]
    while any(left):
        chain = left[int(random.choice([i for i, s in enumerate(left) if s]))]
        needles.append(chain.pop(0))
    question = f"\nFollowing the assignments, the number in VAR {chains[0][-1]} is"
    return _asked(random, needles, question, _spaced(numbers), tokens, size)


def _words(random: np.random.Generator, tokens: int, size: Count) -> Question:
    """A list in which one word is said more often than the others; the list is as long as fits."""
    names = _some(random, _NAMES, len(_NAMES))
    common, others = names[0], names[1:]
    head, question = "Words:", "\nThe word that appears most often in the list is"

    def listed(rare: int) -> str:
        words = [common] * COMMON + [w for w in others[:rare] for _ in range(RARE)]
        return f"{head} {' '.join(_shuffled(np.random.default_rng(rare), words))}.{question}"

    fitting = [n for n in range(CHOICES - 1, len(others) + 1) if size(listed(n)) <= tokens]
    if not fitting:
        raise _too_short(tokens)
    return _mixed(random, listed(fitting[-1]), [f" {w}" for w in (common, *others[: CHOICES - 1])])


_KINDS: dict[str, Callable[[np.random.Generator, int, Count], Question]] = {
    "single": _single,
    "multikey": _multikey,
    "variables": _variables,
    "words": _words,
}


def _asked(
    random: np.random.Generator, needles: Sequence[str], question: str, choices: list[str], tokens: int, size: Count
) -> Question:
    """Needles in their order at random places among as much filler as fits."""
    sizes = [size(f" {line}") for line in _FILLER]
    room = tokens - size(" ".join(needles)) - size(question)
    filler: list[str] = []
    while room >= min(sizes):
        drawn = int(random.integers(len(_FILLER)))
        if sizes[drawn] <= room:
            filler.append(_FILLER[drawn])
            room -= sizes[drawn]
    places = np.sort(random.integers(0, len(filler) + 1, len(needles)))
    while True:
        lines = list(filler)
        for needle, place in reversed(list(zip(needles, places, strict=True))):
            lines.insert(min(int(place), len(filler)), needle)
        prompt = " ".join(lines) + question
        if size(prompt) <= tokens:
            return _mixed(random, prompt, choices)
        if not filler:
            raise _too_short(tokens)
        filler.pop()  # parts joined may be a little longer than the parts


def _mixed(random: np.random.Generator, prompt: str, choices: Sequence[str]) -> Question:
    """The question with its choices in random order; the first one given is right."""
    order = random.permutation(len(choices))
    return Question(prompt, tuple(choices[i] for i in order), int(np.flatnonzero(order == 0)[0]))


def _needle(name: str, number: str) -> str:
    return f"The special number for {name} is {number}."


def _numbers(random: np.random.Generator, count: int) -> list[str]:
    return [str(n) for n in random.choice(np.arange(1000, 10000), count, replace=False)]


def _spaced(words: Sequence[str]) -> list[str]:
    return [f" {w}" for w in words]


def _some(random: np.random.Generator, among: Sequence[str], count: int) -> list[str]:
    return [among[i] for i in random.choice(len(among), count, replace=False)]


def _shuffled(random: np.random.Generator, items: Sequence[str]) -> list[str]:
    return [items[i] for i in random.permutation(len(items))]


def _too_short(tokens: int) -> UsageError:
    return UsageError(f"A prompt of {tokens} tokens cannot hold the task's question; ask for a longer --length.")
