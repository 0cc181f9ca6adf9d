"""Questions with several answers, made here or handed to lm-evaluation-harness, for judging a mode by its answers.

Every built-in task asks the model which of a few continuations is the most likely, so that chance is known; a task says
something only about a model that beats chance (`MARGIN`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Count = Callable[[str], int]  # tokens of a text


@dataclass(frozen=True)
class Question:
    """A prompt, and the continuations a model may choose from."""

    prompt: str
    choices: tuple[str, ...]  # each begins where the prompt ends, a space included
    answer: int


BUILT_IN = ("ruler:single", "ruler:multikey", "ruler:variables", "ruler:words", "glosses")
MARGIN = 0.10  # a stock model has to beat chance by that for a task to count


def make(task: str, count: int, tokens: int, size: Count, seed: int = 0) -> list[Question]:
    """Questions of a built-in task.

    Args:
        task: one of BUILT_IN.
        count: questions.
        tokens: length of a RULER prompt; other tasks have their own.
        size: tokens of a text, by the model's tokenizer.
        seed: the same seed makes the same questions.

    Raises:
        UsageError: the prompt is too short for the task.
    """
    from . import glosses, ruler

    if task == "glosses":
        return glosses.questions(count, seed)
    return ruler.questions(task.removeprefix("ruler:"), count, tokens, size, seed)
