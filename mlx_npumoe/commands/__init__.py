"""One thin file a command: parse, call the API, print. What they share is here."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..cache import whole_file
from ..errors import UsageError
from ..policies import OVERFLOWS, SALIENCIES
from ..progress import set_quiet

WEIGHTS_HELP = (
    "Weight format of the programs: int8 (per channel, default) or fp16; lut8, lut6, lut4 (indices into a table a "
    "matrix; smaller, less exact); int4 (blocks; exact for models stored in 4 bits, needs macOS 15)."
)
TEXT_HELP = (
    "UTF-8 files to calibrate on, or 'self': text the model writes itself from short seeds. Default: a shipped corpus."
)


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """A parser with the flags every command has."""
    made = argparse.ArgumentParser(prog=f"mlx_npumoe.{name}", description=description)
    add_common(made)
    return made


def add_common(made: argparse._ActionsContainer, *, again: bool = False) -> None:
    """`--json` and `--quiet`; `again` for a subcommand, whose silence must not undo the command's flag."""
    default = argparse.SUPPRESS if again else False
    made.add_argument("--json", action="store_true", default=default, help="Print the result as JSON on stdout.")
    made.add_argument("--quiet", action="store_true", default=default, help="No progress and no notes.")


def add_form(made: argparse._ActionsContainer, *, layout: str | None = "layer", body: str | None = "split") -> None:
    """`--layout` and `--body`, of which None leaves a plan as it is."""
    from ..program import BODIES, LAYOUTS

    def default(value: str | None) -> str:
        return f" Default: {value or 'that of the plan'}."

    made.add_argument(
        "--layout",
        choices=LAYOUTS,
        default=layout,
        help="layer: one program a layer, one launch. groups: one program for each group of experts, where a layer's "
        "program would be too large for the device, or to compare." + default(layout),
    )
    made.add_argument(
        "--body",
        choices=BODIES,
        default=body,
        help="split: dense convolutions between a split and a concat. grouped: one grouped convolution a matrix. "
        "separate: an input and an output for each expert, where split and concat are not accepted." + default(body),
    )


def parse(made: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse and apply the shared flags."""
    args = made.parse_args(argv)
    set_quiet(args.quiet)
    return args


def add_overflow(made: argparse._ActionsContainer) -> None:
    """The flags of the overflow policy."""
    made.add_argument(
        "--overflow",
        choices=OVERFLOWS,
        default="spill",
        help="Pairs beyond an expert's capacity: spill computes them with MLX (exact), prune drops the least salient "
        "(lossy; the report says how many).",
    )
    made.add_argument(
        "--saliency",
        choices=SALIENCIES,
        default=None,
        help="What prune keeps: tokens of large attention output (attention_norm, default), pairs of large gate weight "
        "(gate), or of large gate weight times the size of the input (gate_norm).",
    )
    made.add_argument(
        "--prune-renormalise",
        action="store_true",
        help="Under prune, scale the gates a token has left to the sum of all it had.",
    )


def overflow_options(args: argparse.Namespace) -> dict[str, Any]:
    """What those flags mean to `load`. Raises UsageError for flags without an effect."""
    if args.overflow != "prune" and (args.saliency is not None or args.prune_renormalise):
        raise UsageError("--saliency and --prune-renormalise have an effect with --overflow prune only.")
    saliency = args.saliency or SALIENCIES[0]
    return {"overflow": args.overflow, "saliency": saliency, "prune_renormalise": args.prune_renormalise}


def positive(text: str) -> int:
    """argparse type: a whole number of at least one."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def require_parent(path: str | None, flag: str) -> None:
    """Raises UsageError where a file asked for could not be written in the end."""
    if path is None:
        return
    target = Path(path)
    if target.is_dir() or not target.absolute().parent.is_dir() or not os.access(target.absolute().parent, os.W_OK):
        raise UsageError(f"{flag} {path} cannot be written: its folder is missing or read-only, or it is a folder.")


def write_text(path: str | Path, text: str) -> None:
    """Write a file whole or not at all."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
