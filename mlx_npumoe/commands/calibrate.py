"""`mlx_npumoe.calibrate`: a routing profile of a model on a text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ..errors import UsageError
from ..program import DEFAULT_CHUNK, DEFAULT_TOKENS
from . import TEXT_HELP, parse, parser, positive, require_parent


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    made = parser("calibrate", "Record how a model's experts are used on a text.")
    made.add_argument("--model", help="Folder, hub repository or demo:NAME.")
    made.add_argument("--text", nargs="+", metavar="FILE", help=TEXT_HELP)
    made.add_argument("--seed", type=int, default=0, help="Of the sampling of --text self. Default: 0.")
    made.add_argument("--out", metavar="FILE", default="profile.safetensors", help="Default: profile.safetensors.")
    made.add_argument("--max-tokens", type=positive, default=DEFAULT_TOKENS)
    made.add_argument("--chunk", type=positive, default=DEFAULT_CHUNK, help="Tokens a call.")
    made.add_argument(
        "--compare", nargs=2, metavar="FILE", help="Compare two profiles of a model instead of making one."
    )
    made.add_argument(
        "--top",
        type=positive,
        nargs="+",
        metavar="K",
        help="With --compare: K of Overlap@K. Default: 4 8, where they fit.",
    )
    args = parse(made, argv)
    if args.compare is not None:
        if args.model is not None or args.text is not None:
            raise UsageError("--compare takes two profiles and no --model or --text.")
        return _compare(Path(args.compare[0]), Path(args.compare[1]), args.top, as_json=args.json)
    if args.model is None or args.top is not None:
        raise UsageError("--top belongs to --compare." if args.top else "give --model, or two profiles with --compare.")
    require_parent(args.out, "--out")
    if not args.out.endswith(".safetensors"):
        raise UsageError(f"--out {args.out} must end in .safetensors.")

    from ..recording import calibrate

    profile = calibrate(
        args.model,
        text=args.text,
        max_tokens=args.max_tokens,
        sequence=args.chunk,
        seed=args.seed,
        progress=not args.quiet,
    )
    profile.save(Path(args.out))
    layers = {path: site.skew() for path, site in profile.sites.items()}
    unknown = {path: site.gates_reason for path, site in profile.sites.items() if site.gate_mass is None}
    if args.json:
        made_of = {"out": args.out, "tokens": profile.tokens, "source": profile.source}
        print(json.dumps({**made_of, "layers": layers, "without_gate_mass": unknown}, indent=2))
        return 0
    print(f"{profile.tokens} tokens of {profile.source}; busiest expert / mean, share of the busiest quarter:")
    for path, skew in layers.items():
        print(f"  {path:<44} {skew['max_over_mean']:5.2f}  {skew['top_quarter']:6.1%}")
    for path, reason in unknown.items():
        print(f"No gate weights of {path}: {reason}.")
    print(f"Profile: {args.out}")
    return 0


def _compare(first: Path, second: Path, tops: Sequence[int] | None, *, as_json: bool) -> int:
    """Print Overlap@K of two profiles, layer by layer, with mean and median."""
    from statistics import mean, median

    from ..calibration import RoutingProfile, overlaps

    a, b = RoutingProfile.load(first), RoutingProfile.load(second)
    if tops is None:
        least = min((site.experts for site in a.sites.values()), default=0)
        tops = [k for k in (4, 8) if k < least] or [1]
    columns = {k: overlaps(a, b, k) for k in tops}
    layers = {path: {str(k): columns[k][path] for k in tops} for path in a.sites}
    totals = {str(k): {"mean": mean(columns[k].values()), "median": median(columns[k].values())} for k in tops}
    if as_json:
        of = [{"file": str(f), "source": p.source, "tokens": p.tokens} for f, p in ((first, a), (second, b))]
        print(json.dumps({"profiles": of, "overlap": totals, "layers": layers}, indent=2))
        return 0
    print(f"Most loaded experts of {a.source} ({a.tokens} tokens) and {b.source} ({b.tokens} tokens) that agree:")
    print(f"  {'layer':<44} " + "  ".join(f"{f'top {k}':>7}" for k in tops))
    for path, shares in layers.items():
        print(f"  {path:<44} " + "  ".join(f"{shares[str(k)]:>7.1%}" for k in tops))
    for name in ("mean", "median"):
        print(f"  {name:<44} " + "  ".join(f"{totals[str(k)][name]:>7.1%}" for k in tops))
    return 0
