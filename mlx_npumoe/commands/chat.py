"""`mlx_npumoe.chat`: every flag of the installed `mlx_lm.chat`, and ours.

mlx-lm's own `main` runs, with its loader and its loop exchanged for ours. With `--json` it reads one message a line,
without mlx-lm's screen, and prints all answers at the end.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from ..errors import UsageError
from . import parse
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


def setup_arg_parser(chat: Any) -> argparse.ArgumentParser:
    """mlx-lm's parser with our flags."""
    parser: argparse.ArgumentParser = chat.setup_arg_parser()
    parser.prog = "mlx_npumoe.chat"
    parser.set_defaults(model=None)
    add_attachment(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    chat = importlib.import_module("mlx_lm.chat")
    args = parse(setup_arg_parser(chat), argv)
    require_usable(args)
    if args.max_tokens == 0:
        raise UsageError("--max-tokens 0 generates nothing; give a positive number, or -1 for no limit.")
    require_positive(args, "max_kv_size", "prefill_step_size")
    default_model(args)
    session = _Session(args)
    screen = _Transcript if args.json else _until_end_of_input(chat.ChatUI)
    with (
        patch.object(chat, "setup_arg_parser", lambda: SimpleNamespace(parse_args=lambda: args, error=_refuse)),
        patch.object(chat, "load", session.load),
        patch.object(chat, "stream_generate", session.stream),
        patch.object(chat, "ChatUI", screen),
    ):
        try:
            with in_one_sentence():
                chat.main()
        finally:
            if session.model is not None:
                finish(args, session.model, {"turns": session.turns})
    return 0


def _refuse(message: str) -> None:
    raise UsageError(message)


class _Session:
    """Stands in for mlx-lm's load and loop, and remembers what they gave."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.model: Any = None
        self.turns: list[dict[str, Any]] = []

    def load(self, path: str, **options: Any) -> Any:
        loaded = load_as_asked(self.args, path, **options)
        self.model = loaded[0]
        return loaded

    def stream(self, *args: Any, **options: Any) -> Iterator[Any]:
        from ..generation import stream_generate

        text, last = "", None
        for last in stream_generate(*args, **options):
            text += last.text
            yield last
        self.turns.append({"text": text, **{n: getattr(last, n) for n in NUMBERS}})


def _until_end_of_input(stock: Any) -> type:
    class Screen(stock):
        """mlx-lm's screen, where the end of the input means `q`."""

        def prompt(self) -> str:
            try:
                return str(super().prompt())
            except EOFError:
                return "q"

    return Screen


class _Transcript:
    """In the place of mlx-lm's screen: one message a line from stdin, nothing shown."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> _Transcript:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def prompt(self) -> str:
        line = sys.stdin.readline()
        return line.removesuffix("\n") if line else "q"

    def stream_token(self, text: str) -> None:
        pass

    def end_turn(self, response: Any) -> None:
        pass

    def say_bye(self) -> None:
        pass

    def say_reset(self) -> None:
        pass

    def say_help(self) -> None:
        pass
