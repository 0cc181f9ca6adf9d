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
from ..progress import note
from . import parse, require_parent
from .attached import (
    NUMBERS,
    add_attachment,
    default_model,
    finish,
    in_one_sentence,
    load_as_asked,
    require_positive,
    require_usable,
)


def setup_arg_parser(loops: Any) -> argparse.ArgumentParser:
    """mlx-lm's parser with our flags."""
    parser: argparse.ArgumentParser = loops.setup_arg_parser()
    parser.prog = "mlx_npumoe.generate"
    add_attachment(parser).add_argument(
        "--record-routing",
        metavar="FILE",
        help="Add how the experts are used to this routing profile (.safetensors); the text is not changed by it.",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    loops = importlib.import_module("mlx_lm.generate")
    args = parse(setup_arg_parser(loops), argv)
    require_usable(args)
    require_parent(args.record_routing, "--record-routing")
    if args.record_routing is not None and not args.record_routing.endswith(".safetensors"):
        raise UsageError(f"--record-routing {args.record_routing} must end in .safetensors.")
    if args.max_tokens == 0:
        raise UsageError("--max-tokens 0 generates nothing; give a positive number, or -1 for no limit.")
    require_positive(args, "max_kv_size", "prefill_step_size", "num_draft_tokens")
    if args.prompt_cache_file is None:  # which names its model
        default_model(args)
    session = _Session(args)
    with (
        patch.object(loops, "setup_arg_parser", lambda: SimpleNamespace(parse_args=lambda: args)),
        patch.object(loops, "load", session.load),
        patch.object(loops, "generate", session.generate),
        contextlib.redirect_stdout(io.StringIO() if args.json else sys.stdout),
    ):
        try:
            with in_one_sentence():
                loops.main()
        except KeyboardInterrupt:
            session.save_routing()  # what was used until then
            raise
    session.save_routing()
    result = {"text": session.text, **{n: getattr(session.last, n, None) for n in NUMBERS}}
    finish(args, session.model, result, line=args.verbose)
    return 0


class _Session:
    """Stands in for mlx-lm's load and generate, and remembers what they gave."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.model: Any = None
        self.text = ""
        self.last: Any = None
        self.log: Any = None

    def load(self, path: str, **options: Any) -> Any:
        draft = self.model is not None
        loaded = load_as_asked(self.args, path, plain=draft, **options)
        if not draft:
            self.model = loaded[0]
            if self.args.record_routing is not None:
                from ..recording import RoutingLog

                self.log = RoutingLog(self.model, self.args.record_routing, path_or_repo=path)
        return loaded

    def save_routing(self) -> None:
        """Add what was recorded to its file."""
        if self.log is None:
            return
        log, self.log = self.log, None
        profile = log.close()
        if profile is not None:
            note(f"Note: {self.args.record_routing} holds the routing of {profile.tokens} tokens now.")

    def generate(self, model: Any, tokenizer: Any, prompt: Any, **options: Any) -> str:
        from ..generation import plain_generate, stream_generate

        if not self.args.json:
            return plain_generate(model, tokenizer, prompt, **options)
        options.pop("verbose")
        for self.last in stream_generate(model, tokenizer, prompt, **options):
            self.text += self.last.text
        return self.text
