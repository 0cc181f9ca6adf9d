"""`mlx_npumoe.calibrate`: a routing profile of a model on a text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ..errors import UsageError
from ..program import DEFAULT_CHUNK, DEFAULT_TOKENS
from . import parse, parser, positive, require_parent


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    made = parser("calibrate", "Record how a model's experts are used on a text.")
    made.add_argument("--model", required=True, help="Folder, hub repository or demo:NAME.")
    made.add_argument("--text", nargs="+", metavar="FILE", help="UTF-8 files. Default: a shipped corpus.")
    made.add_argument("--out", metavar="FILE", default="profile.safetensors", help="Default: profile.safetensors.")
    made.add_argument("--max-tokens", type=positive, default=DEFAULT_TOKENS)
    made.add_argument("--chunk", type=positive, default=DEFAULT_CHUNK, help="Tokens a call.")
    args = parse(made, argv)
    require_parent(args.out, "--out")
    if not args.out.endswith(".safetensors"):
        raise UsageError(f"--out {args.out} must end in .safetensors.")

    from ..recording import calibrate

    profile = calibrate(
        args.model, text=args.text, max_tokens=args.max_tokens, sequence=args.chunk, progress=not args.quiet
    )
    profile.save(Path(args.out))
    layers = {path: site.skew() for path, site in profile.sites.items()}
    if args.json:
        print(
            json.dumps(
                {"out": args.out, "tokens": profile.tokens, "source": profile.source, "layers": layers}, indent=2
            )
        )
        return 0
    print(f"{profile.tokens} tokens of {profile.source}; busiest expert / mean, share of the busiest quarter:")
    for path, skew in layers.items():
        print(f"  {path:<44} {skew['max_over_mean']:5.2f}  {skew['top_quarter']:6.1%}")
    print(f"Profile: {args.out}")
    return 0
