"""`mlx_npumoe.generate`: every flag of the installed `mlx_lm.generate`, and ours.

mlx-lm's own `main` runs, with its loader and its loop exchanged for ours, so what it prints and checks is its own.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from ..devices import DEVICES
from ..errors import ModelError, NpumoeError, UsageError
from ..progress import note
from . import add_common, add_overflow, overflow_options, parse, require_parent, write_text

DEFAULT_MODEL = "demo:smollm2"


def setup_arg_parser(loops: Any) -> argparse.ArgumentParser:
    """mlx-lm's parser with our flags."""
    parser = loops.setup_arg_parser()
    parser.prog = "mlx_npumoe.generate"
    group = parser.add_argument_group("second device")
    group.add_argument(
        "--prepared",
        default="auto",
        metavar="FOLDER",
        help="What mlx_npumoe.prepare made of the model; 'auto' looks in the cache, 'none' attaches nothing.",
    )
    group.add_argument("--device", choices=DEVICES, default="auto", help="Where hot experts run.")
    add_overflow(group)
    group.add_argument(
        "--record-routing",
        metavar="FILE",
        help="Add how the experts are used to this routing profile (.safetensors); the text is not changed by it.",
    )
    group.add_argument("--report", metavar="FILE", help="Write what the device did as JSON.")
    add_common(group)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    loops = importlib.import_module("mlx_lm.generate")
    args = parse(setup_arg_parser(loops), argv)
    require_parent(args.report, "--report")
    require_parent(args.record_routing, "--record-routing")
    if args.record_routing is not None and not args.record_routing.endswith(".safetensors"):
        raise UsageError(f"--record-routing {args.record_routing} must end in .safetensors.")
    overflow_options(args)
    _require_sizes(args)
    if args.model is None and args.prompt_cache_file is None:
        args.model = DEFAULT_MODEL
        note(f"Note: no --model given, using {DEFAULT_MODEL}.")
    session = _Session(args)
    out = io.StringIO() if args.json else sys.stdout
    with (
        patch.object(loops, "setup_arg_parser", lambda: SimpleNamespace(parse_args=lambda: args)),
        patch.object(loops, "load", session.load),
        patch.object(loops, "generate", session.generate),
        contextlib.redirect_stdout(out),
    ):
        try:
            loops.main()
        except KeyboardInterrupt:
            session.save_routing()  # what was used until then
            raise
        except (NpumoeError, BrokenPipeError):
            raise
        except Exception as e:  # whatever mlx-lm, a tokenizer or a template finds wrong
            reason = " ".join(str(e).split()) or type(e).__name__
            raise ModelError(f"mlx-lm cannot do this: {reason}") from e
    session.finish()
    return 0


def _require_sizes(args: argparse.Namespace) -> None:
    """Raises UsageError for sizes mlx-lm would fail on late, or in other words."""
    if args.max_tokens == 0:
        raise UsageError("--max-tokens 0 generates nothing; give a positive number, or -1 for no limit.")
    for flag in ("max_kv_size", "prefill_step_size", "num_draft_tokens"):
        value = getattr(args, flag, None)
        if value is not None and value < 1:
            raise UsageError(f"--{flag.replace('_', '-')} {value} is not a positive number.")


class _Session:
    """Stands in for mlx-lm's load and generate, and remembers what they gave."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.model: Any = None
        self.text = ""
        self.last: Any = None
        self.log: Any = None

    def load(self, path: str, **options: Any) -> Any:
        from ..generation import load

        draft = self.model is not None
        prepared = None if draft or self.args.prepared == "none" else self.args.prepared
        policies = {} if draft else overflow_options(self.args)
        loaded = load(path, prepared=prepared, device=self.args.device, **policies, **options)
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

    def finish(self) -> None:
        """Print our line, write the report, print the JSON, release the device."""
        from ..runtime import detach, report

        made = report(self.model, str(self.args.model))
        self.save_routing()
        if self.args.report:
            write_text(self.args.report, made.to_json() + "\n")
        if self.args.json:
            numbers = (
                "prompt_tokens",
                "prompt_tps",
                "generation_tokens",
                "generation_tps",
                "peak_memory",
                "finish_reason",
            )
            result = {"text": self.text, **{n: getattr(self.last, n) for n in numbers}}
            print(json.dumps({**result, "report": json.loads(made.to_json())}, indent=2))
        elif self.args.verbose:
            print(made.line())
        detach(self.model)
