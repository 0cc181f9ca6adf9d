"""`mlx_npumoe.generate`: every flag of the installed `mlx_lm.generate`, and ours.

mlx-lm's own `main` runs, with its loader and its loop exchanged for ours, so what it prints and checks is its own.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from ..errors import UsageError
from . import parse, require_parent
from .attached import (
    NUMBERS,
    add_attachment,
    default_model,
    finish,
    in_one_sentence,
    load_as_asked,
    require_positive,
)


def setup_arg_parser(loops: Any) -> argparse.ArgumentParser:
    """mlx-lm's parser with our flags."""
    parser: argparse.ArgumentParser = loops.setup_arg_parser()
    parser.prog = "mlx_npumoe.generate"
    add_attachment(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    loops = importlib.import_module("mlx_lm.generate")
    args = parse(setup_arg_parser(loops), argv)
    require_parent(args.report, "--report")
    _require_sizes(args)
    if args.prompt_cache_file is None:
        default_model(args)
    session = _Session(args)
    out = io.StringIO() if args.json else sys.stdout
    with (
        patch.object(loops, "setup_arg_parser", lambda: SimpleNamespace(parse_args=lambda: args)),
        patch.object(loops, "load", session.load),
        patch.object(loops, "generate", session.generate),
        contextlib.redirect_stdout(out),
        in_one_sentence(),
    ):
        loops.main()
    session.finish()
    return 0


def _require_sizes(args: argparse.Namespace) -> None:
    """Raises UsageError for sizes mlx-lm would fail on late, or in other words."""
    if args.max_tokens == 0:
        raise UsageError("--max-tokens 0 generates nothing; give a positive number, or -1 for no limit.")
    require_positive(args, "max_kv_size", "prefill_step_size", "num_draft_tokens")


class _Session:
    """Stands in for mlx-lm's load and generate, and remembers what they gave."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.model: Any = None
        self.text = ""
        self.last: Any = None

    def load(self, path: str, **options: Any) -> Any:
        draft = self.model is not None
        loaded = load_as_asked(self.args, path, plain=draft, **options)
        if not draft:
            self.model = loaded[0]
        return loaded

    def generate(self, model: Any, tokenizer: Any, prompt: Any, **options: Any) -> str:
        from ..generation import plain_generate, stream_generate

        if not self.args.json:
            return plain_generate(model, tokenizer, prompt, **options)
        options.pop("verbose")
        for self.last in stream_generate(model, tokenizer, prompt, **options):
            self.text += self.last.text
        return self.text

    def finish(self) -> None:
        """Print our line, write the report, print the JSON, release the device."""
        result = {"text": self.text, **{n: getattr(self.last, n) for n in NUMBERS}} if self.args.json else {}
        finish(self.args, self.model, result, line=self.args.verbose)
