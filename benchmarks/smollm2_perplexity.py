"""Perplexity of the SmolLM2 demo models on held-out text: dense, 8-of-8 (must equal dense) and 2-of-4, stock mlx-lm.

    python -m mlx_npumoe.benchmarks.smollm2_perplexity --tokens 1536

Text: the demo document, then the last documents of the calibration corpus, which calibration never uses; then, only
where `--tokens` asks for more, the calibrated documents too, and the output says so.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import mlx.core as mx
from mlx_lm import load

from mlx_npumoe.data import calibration_documents, held_out_documents
from mlx_npumoe.demo.smollm2 import FORMS, build
from mlx_npumoe.errors import UsageError
from mlx_npumoe.evaluate import DEFAULT_WINDOW, perplexity

DEFAULT_TOKENS = 1536


@dataclass(frozen=True)
class Measurement:
    """One model on one text, measured on this machine."""

    form: str
    tokens: int
    held_out: int  # of these tokens, how many no calibration has seen
    perplexity: float
    seconds: float


def evaluation_tokens(tokenizer: Any, count: int) -> tuple[list[int], int]:
    """`count` tokens of evaluation text, and how many of them are held out.

    Raises:
        UsageError: there is not that much text.
    """
    held_out = tokenizer.encode("\n\n".join(held_out_documents()))
    tokens = held_out[:count]
    if len(tokens) < count:
        tokens = held_out + tokenizer.encode("\n\n" + "\n\n".join(calibration_documents()))[: count - len(held_out)]
    if len(tokens) < count:
        raise UsageError(f"The shipped texts have {len(tokens)} tokens; --tokens {count} is more.")
    return tokens, min(count, len(held_out))


def measure(form: str, count: int, window: int) -> Measurement:
    """Perplexity of one form with stock mlx-lm, weights upcast to float32."""
    model, tokenizer = load(str(build(form)))
    model.set_dtype(mx.float32)
    tokens, held_out = evaluation_tokens(tokenizer, count)
    start = time.perf_counter()
    value = perplexity(model, tokens, window)
    return Measurement(form, count, held_out, value, time.perf_counter() - start)


def setup_arg_parser() -> argparse.ArgumentParser:
    """Flags of this benchmark."""
    parser = argparse.ArgumentParser(description="Perplexity of the SmolLM2 demo models")
    parser.add_argument("--tokens", type=int, default=DEFAULT_TOKENS, help="tokens of text (default %(default)s)")
    parser.add_argument("--window", type=int, default=DEFAULT_WINDOW, help="tokens a call (default %(default)s)")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=["dense", "8of8", "2of4"])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main() -> None:
    """Measure and print."""
    arguments = setup_arg_parser().parse_args()
    results = [measure(form, arguments.tokens, arguments.window) for form in arguments.forms]
    machine = f"{platform.system()} {platform.machine()}, MLX {version('mlx')} on {mx.default_device()}"
    if arguments.json:
        print(json.dumps({"machine": machine, "results": [asdict(result) for result in results]}))
        return
    print(f"Measured here: {machine}; {results[0].held_out} of {arguments.tokens} tokens held out")
    for result in results:
        print(f"{result.form:>6}  perplexity {result.perplexity:9.4f}  {result.seconds:7.1f} s")


if __name__ == "__main__":
    main()
