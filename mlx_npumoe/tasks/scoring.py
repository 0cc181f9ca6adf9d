"""Answers of a model to questions, beside the same model on plain MLX."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..comparison import LEVEL, RESAMPLES, Estimate
from ..progress import Progress
from . import MARGIN, Question


@dataclass(frozen=True)
class Result:
    """How a model and its reference answered a task. `change` is model minus reference, a share."""

    task: str
    questions: int
    chance: float
    accuracy: float
    reference_accuracy: float
    change: Estimate
    agreement: float  # share of questions both answer alike

    @property
    def counts(self) -> bool:
        """Whether the reference beats chance by enough for the task to say anything."""
        return self.reference_accuracy >= self.chance + MARGIN

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        return asdict(self) | {"counts": self.counts, "change_differs": self.change.differs}

    def line(self) -> str:
        """For people."""
        change = self.change
        said = (
            f"{100 * change.value:+.2f} points ({100 * change.low:+.2f} to {100 * change.high:+.2f})"
            f"{'' if change.differs else ', no difference'}"
        )
        if not self.counts:
            said = f"not counted: plain MLX does not beat chance ({self.chance:.0%}) by {100 * MARGIN:.0f} points"
        return (
            f"  {self.task:<22}{self.reference_accuracy:>12.2%}{self.accuracy:>12.2%}   {said}; "
            f"{self.agreement:.1%} of {self.questions} answered alike"
        )


def answers(model: nn.Module, tokenizer: Any, questions: Sequence[Question], bar: Progress | None = None) -> np.ndarray:
    """The choice `(n,)` a model finds most likely a byte, given the prompt.

    A prompt is one prefill into the model's own cache; each choice continues from a copy of it. Tokens that a choice
    and the prompt's end merge into are scored with the choice.
    """
    from mlx_lm.models.cache import make_prompt_cache

    chosen = []
    for question in questions:
        prompt = tokenizer.encode(question.prompt)
        wholes = [tokenizer.encode(question.prompt + choice) for choice in question.choices]
        shared = min(_common(prompt, whole) for whole in wholes)
        shared = max(1, min(shared, *(len(whole) - 1 for whole in wholes)))
        cache = make_prompt_cache(model)
        if shared > 1:
            model(mx.array(prompt[: shared - 1])[None], cache=cache)
            mx.eval([c.state for c in cache])
        scores = []
        for choice, whole in zip(question.choices, wholes, strict=True):
            logits = model(mx.array(whole[shared - 1 : -1])[None], cache=copy.deepcopy(cache))[0].astype(mx.float32)
            logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            picked = mx.take_along_axis(logits, mx.array(whole[shared:])[:, None], axis=-1)
            scores.append(float(mx.sum(picked)) / len(choice.encode()))
        chosen.append(int(np.argmax(scores)))
        if bar is not None:
            bar.advance()
    return np.array(chosen)


def compare_answers(
    task: str,
    model: nn.Module,
    tokenizer: Any,
    questions: Sequence[Question],
    plain: AbstractContextManager[Any],
    *,
    progress: bool = True,
    seed: int = 0,
) -> Result:
    """Answer every question twice, as the model is and within `plain`, and compare.

    The interval of the change is the bootstrap's over questions (percentiles, pairs kept together).
    """
    with Progress(f"Asking {task}", 2 * len(questions), "questions", show=progress) as bar:
        mine = answers(model, tokenizer, questions, bar)
        with plain:
            theirs = answers(model, tokenizer, questions, bar)
    right = np.array([q.answer for q in questions])
    difference = (mine == right).astype(float) - (theirs == right)
    drawn = np.random.default_rng(seed).integers(0, len(right), (RESAMPLES, len(right)))
    low, high = np.quantile(difference[drawn].mean(axis=1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Result(
        task=task,
        questions=len(right),
        chance=float(np.mean([1 / len(q.choices) for q in questions])),
        accuracy=float((mine == right).mean()),
        reference_accuracy=float((theirs == right).mean()),
        change=Estimate(float(difference.mean()), float(low), float(high)),
        agreement=float((mine == theirs).mean()),
    )


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the prefix two texts share, in tokens."""
    same = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        same += 1
    return same
