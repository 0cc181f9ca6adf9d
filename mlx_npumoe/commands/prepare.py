"""`mlx_npumoe.prepare`: everything a model needs, into one folder."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ..planning.tiers import TIER_POLICIES, TIERS_HELP
from ..program import DEFAULT_CHUNK, DEFAULT_TOKENS, LOWEST_MACOS, WEIGHT_FORMATS
from . import TEXT_HELP, WEIGHTS_HELP, add_form, parse, parser, positive


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    made = parser("prepare", "Calibrate on text, plan, emit and check the programs of a model's hot experts.")
    made.add_argument("--model", required=True, help="Folder, hub repository or demo:NAME.")
    made.add_argument("--text", nargs="+", metavar="FILE", help=TEXT_HELP)
    made.add_argument("--seed", type=int, default=0, help="Of the sampling of --text self. Default: 0.")
    made.add_argument("--out", metavar="FOLDER", help="Default: the cache folder of the model's fingerprint.")
    made.add_argument(
        "--chunk", type=positive, default=DEFAULT_CHUNK, help="Tokens a launch, at most (generate's prefill step)."
    )
    made.add_argument("--tiers", choices=TIER_POLICIES, default="quantile", help=TIERS_HELP)
    made.add_argument("--weights", choices=WEIGHT_FORMATS, default="int8", help=WEIGHTS_HELP)
    add_form(made)
    made.add_argument("--profile", metavar="FILE", help="A routing profile; the model is then never loaded whole.")
    made.add_argument("--plan", metavar="FILE", help="A plan made before.")
    made.add_argument("--max-tokens", type=positive, default=DEFAULT_TOKENS, help="Tokens to calibrate on.")
    made.add_argument("--device-profile", metavar="FILE", help="Device to plan for. Default: this machine's.")
    args = parse(made, argv)

    from ..preparation import prepare

    prepared = prepare(
        args.model,
        text=args.text,
        seed=args.seed,
        out=args.out,
        chunk=args.chunk,
        tiers=args.tiers,
        weights=args.weights,
        layout=args.layout,
        body=args.body,
        profile=args.profile,
        plan=args.plan,
        max_tokens=args.max_tokens,
        device_profile=args.device_profile,
        progress=not args.quiet,
    )
    sites = prepared.sites.values()
    errors = [s.error["relative_l2"] for s in sites if s.error]
    nbytes = sum(s.program_bytes for s in sites)
    summary = {
        "folder": str(prepared.folder),
        "model": prepared.model,
        "fingerprint": prepared.fingerprint,
        "layers": len(prepared.sites),
        "offloaded_layers": sum(bool(s.programs) for s in sites),
        "programs": sum(len(s.programs) for s in sites),
        "program_bytes": nbytes,
        "weights": prepared.plan.weights,
        "lowest_macos": LOWEST_MACOS[prepared.plan.weights],
        "worst_relative_l2": max(errors, default=None),
    }
    if args.json:
        print(json.dumps(summary, indent=2))
        return 0
    worst = f", furthest from MLX by {max(errors):.2g} (relative L2)" if errors else ""
    print(
        f"Prepared {prepared.model}: {summary['offloaded_layers']} of {summary['layers']} layers have programs "
        f"({summary['programs']}, {nbytes / 1e6:.1f} MB, {prepared.plan.weights}, macOS {summary['lowest_macos']} or "
        f"later){worst}."
    )
    print(f"Folder: {prepared.folder}")
    print(f"Next: mlx_npumoe.generate --model {prepared.model} --prompt ...")
    return 0
