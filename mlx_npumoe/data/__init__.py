"""The texts shipped with the package: the calibration corpus, a held-out text, and the demo's document and question."""

from __future__ import annotations

import json
from importlib.resources import files

SEPARATOR = "<|doc|>"
HELD_OUT = 8  # last documents of the corpus, never calibrated on


def read_text(name: str) -> str:
    """The text of one shipped file, such as `demo_document.txt`.

    Raises:
        FileNotFoundError: there is no such file.
    """
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


def calibration_documents() -> list[str]:
    """The documents of the default calibration corpus, in order; any prefix of them is a fair sample."""
    return _corpus()[:-HELD_OUT]


def held_out_documents() -> list[str]:
    """English texts no calibration sees: the demo document and the end of the corpus."""
    return [read_text("demo_document.txt").strip(), *_corpus()[-HELD_OUT:]]


def own_seeds() -> list[str]:
    """Beginnings of the text a model writes itself."""
    return read_text("seeds.txt").splitlines()


def family_taps() -> dict[str, dict[str, str | None]]:
    """By family: `attention_output`, `router_logits`, `gate_weights`, each None or the reason why it is not seen.

    As tried with the mlx-lm this package was tested with.
    """
    return json.loads(read_text("taps.json"))["families"]


def demo_prompt() -> str:
    """The demo's user message: the document, a blank line and the question about it."""
    return f"{read_text('demo_document.txt').strip()}\n\n{read_text('demo_question.txt').strip()}"


def _corpus() -> list[str]:
    return [text.strip("\n") for text in read_text("calibration.txt").split(f"\n{SEPARATOR}\n")]
