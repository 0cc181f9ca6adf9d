"""Training sequences out of the token files: the mixture of kinds, epochs in random order. Knows no model."""

from __future__ import annotations

from pathlib import Path

import numpy as np

# Shares of the training tokens. The figure that counts is the mean over the kinds, so they are near to even; the
# handbook and its companions are small and seen several times.
MIXTURE = {
    "handbook": 0.07,
    "debian": 0.05,
    "python": 0.13,
    "git": 0.09,
    "postgresql": 0.12,
    "kernel": 0.15,
    "manual": 0.14,
    "wordnet": 0.13,
    "gcide": 0.12,
}


class Sampler:
    """Sequences of any length, without repeats within a pass over a kind. Its state is `taken`, by kind/length."""

    def __init__(self, folder: Path, seed: int, mixture: dict[str, float] = MIXTURE) -> None:
        self.tokens = {kind: np.load(folder / f"{kind}.npy") for kind in mixture}
        self.shares = np.array(list(mixture.values())) / sum(mixture.values())
        self.kinds, self.seed = list(mixture), seed
        self.taken: dict[str, int] = {}

    def batch(self, sequences: int, length: int) -> np.ndarray:
        """int64 (sequences, length + 1): inputs and, one later, targets; of the kinds by their shares."""
        counts = np.array([self.taken.get(f"{kind}/{length}", 0) for kind in self.kinds], dtype=float)
        rows = []
        for _ in range(sequences):
            kind = int(np.argmax(self.shares * (counts.sum() + 1) - counts))  # the one furthest behind its share
            rows.append(self._sequence(self.kinds[kind], int(counts[kind]), length))
            counts[kind] += 1
        self.taken.update({f"{k}/{length}": int(c) for k, c in zip(self.kinds, counts, strict=True)})
        return np.stack(rows).astype(np.int64)

    def _sequence(self, kind: str, number: int, length: int) -> np.ndarray:
        """The `number`-th sequence of a kind: passes differ in order and in where they cut."""
        tokens = self.tokens[kind]
        pieces = (len(tokens) - 1) // length - 1
        run, place = divmod(number, pieces)
        rng = np.random.default_rng((self.seed, self.kinds.index(kind), length, run))
        offset = int(rng.integers(length))
        start = offset + length * int(rng.permutation(pieces)[place])
        return tokens[start : start + length + 1]
