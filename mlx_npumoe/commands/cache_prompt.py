"""`mlx_npumoe.cache_prompt`: every flag of the installed `mlx_lm.cache_prompt`, and ours.

mlx-lm's own `main` runs, with its loader and its loop exchanged for ours. Its files and mlx-lm's are the same kind.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from .. import demo
from ..cache import whole_file
from . import parse, require_parent
from .attached import (
    add_attachment,
    default_model,
    finish,
    in_one_sentence,
    load_as_asked,
    require_positive,
    require_usable,
)

SUFFIX = ".safetensors"


def setup_arg_parser(commands: Any) -> argparse.ArgumentParser:
    """mlx-lm's parser with our flags."""
    parser: argparse.ArgumentParser = commands.setup_arg_parser()
    parser.prog = "mlx_npumoe.cache_prompt"
    parser.set_defaults(model=None)
    add_attachment(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    commands = importlib.import_module("mlx_lm.cache_prompt")
    args = parse(setup_arg_parser(commands), argv)
    require_usable(args)
    require_parent(args.prompt_cache_file, "--prompt-cache-file")
    require_positive(args, "max_kv_size")
    default_model(args)
    args.model = demo.resolve(args.model)  # the file names the model, and mlx-lm knows no demo models
    session = _Session(args, commands.save_prompt_cache)
    with (
        patch.object(commands, "setup_arg_parser", lambda: SimpleNamespace(parse_args=lambda: args)),
        patch.object(commands, "load", session.load),
        patch.object(commands, "generate_step", session.step),
        patch.object(commands, "save_prompt_cache", session.save),
        contextlib.redirect_stdout(io.StringIO() if args.json else sys.stdout),
        in_one_sentence(),
    ):
        commands.main()
    finish(args, session.model, {"prompt_cache_file": str(session.file), "prompt_tokens": session.tokens})
    return 0


class _Session:
    """Stands in for mlx-lm's load, loop and writer, and remembers what they gave."""

    def __init__(self, args: argparse.Namespace, write: Any) -> None:
        self.args = args
        self.model: Any = None
        self.tokens = 0
        self.file = Path(args.prompt_cache_file)
        if self.file.suffix != SUFFIX:  # MLX appends it
            self.file = self.file.with_name(self.file.name + SUFFIX)
        self._write = write

    def load(self, path: str, **options: Any) -> Any:
        loaded = load_as_asked(self.args, path, **options)
        self.model = loaded[0]
        return loaded

    def step(self, prompt: Any, *args: Any, **options: Any) -> Iterator[Any]:
        from ..generation import generate_step

        self.tokens = len(prompt)
        return generate_step(prompt, *args, **options)

    def save(self, _: str, cache: Any, metadata: dict[str, str]) -> None:
        with whole_file(self.file) as temporary:
            self._write(str(temporary), cache, metadata)
