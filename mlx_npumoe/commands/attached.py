"""What commands that run a model with its experts attached share: flags, loading, mlx-lm's errors, the report."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..devices import DEVICES
from ..errors import ModelError, NpumoeError, UsageError
from ..progress import note
from . import add_common, add_overflow, overflow_options, require_parent, write_text

DEFAULT_MODEL = "demo:smollm2"
NUMBERS = ("prompt_tokens", "prompt_tps", "generation_tokens", "generation_tps", "peak_memory", "finish_reason")


def add_attachment(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """The flags of a second device, beside those of mlx-lm, in the group that is returned."""
    group = parser.add_argument_group("second device")
    group.add_argument(
        "--prepared",
        default="auto",
        metavar="FOLDER",
        help="What mlx_npumoe.prepare made of the model; 'auto' looks in the cache, 'none' attaches nothing.",
    )
    group.add_argument("--device", choices=DEVICES, default="auto", help="Where hot experts run.")
    add_overflow(group)
    group.add_argument("--report", metavar="FILE", help="Write what the device did as JSON.")
    add_common(group)
    return group


def require_usable(args: argparse.Namespace) -> None:
    """Raises UsageError where flags of `add_attachment` could not be followed in the end."""
    require_parent(args.report, "--report")
    overflow_options(args)


def load_as_asked(args: argparse.Namespace, path: str, *, plain: bool = False, **options: Any) -> Any:
    """`mlx_npumoe.load` by the flags of `add_attachment`; `plain` for a model that gets no device, as a draft model."""
    from ..generation import load

    prepared = None if plain or args.prepared == "none" else args.prepared
    policies = {} if plain else overflow_options(args)
    return load(path, prepared=prepared, device=args.device, **policies, **options)


def default_model(args: argparse.Namespace) -> None:
    """Use the demo model, and say so, where no model was named."""
    if args.model is None:
        args.model = DEFAULT_MODEL
        note(f"Note: no --model given, using {DEFAULT_MODEL}.")


def require_positive(args: argparse.Namespace, *flags: str) -> None:
    """Raises UsageError for sizes mlx-lm would fail on late, or in other words; None stands for its default."""
    for flag in flags:
        value = getattr(args, flag, None)
        if value is not None and value < 1:
            raise UsageError(f"--{flag.replace('_', '-')} {value} is not a positive number.")


@contextmanager
def in_one_sentence() -> Iterator[None]:
    """Turns whatever mlx-lm, a tokenizer or a template finds wrong into ModelError."""
    try:
        yield
    except (NpumoeError, BrokenPipeError):
        raise
    except Exception as e:
        reason = " ".join(str(e).split()) or type(e).__name__
        raise ModelError(f"mlx-lm cannot do this: {reason}") from e


def finish(args: argparse.Namespace, model: Any, result: dict[str, Any], *, line: bool = True) -> None:
    """Write the report, print `result` with it as JSON or (with `line`) our line, release the device."""
    from ..runtime import detach, report

    made = report(model, str(args.model))
    if args.report:
        write_text(args.report, made.to_json() + "\n")
    if args.json:
        print(json.dumps({**result, "report": json.loads(made.to_json())}, indent=2))
    elif line:
        print(made.line())
    detach(model)
