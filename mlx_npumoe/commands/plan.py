"""`mlx_npumoe.plan`: from a routing profile to a plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..planning.tiers import TIER_POLICIES, TIERS_HELP
from ..program import DEFAULT_CHUNK, LOWEST_MACOS, WEIGHT_FORMATS
from . import WEIGHTS_HELP, add_form, parse, parser, positive, require_parent


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    made = parser("plan", "Decide which experts go to the device, in which groups and capacities.")
    made.add_argument("--model", required=True, help="The model the profile was made of (it is not loaded).")
    made.add_argument("--profile", required=True, metavar="FILE", help="From mlx_npumoe.calibrate.")
    made.add_argument("--out", metavar="FILE", default="plan.json", help="Default: plan.json.")
    made.add_argument("--explain", action="store_true", help="Print the plan layer by layer, with reasons.")
    made.add_argument("--chunk", type=positive, default=DEFAULT_CHUNK)
    made.add_argument("--tiers", choices=TIER_POLICIES, default="quantile", help=TIERS_HELP)
    made.add_argument("--weights", choices=WEIGHT_FORMATS, default="int8", help=WEIGHTS_HELP)
    add_form(made)
    made.add_argument(
        "--hot", type=_hot, default="auto", help="Hot experts a layer: auto (by the cost rule), all, or a number."
    )
    made.add_argument("--device-profile", metavar="FILE", help="Device to plan for. Default: this machine's.")
    args = parse(made, argv)
    require_parent(args.out, "--out")

    from ..calibration import RoutingProfile
    from ..machine import device_profile
    from ..preparation import plan_for
    from ..tensors import site_weights

    profile = RoutingProfile.load(Path(args.profile))
    sites = [weights.site for weights in site_weights(args.model)[1]]
    made_plan = plan_for(
        profile,
        sites,
        chunk=args.chunk,
        tiers=args.tiers,
        weights=args.weights,
        layout=args.layout,
        body=args.body,
        hot=args.hot,
        device=device_profile(args.device_profile),
    )
    made_plan.save(Path(args.out))
    if args.json:
        print(made_plan.to_json())
    elif args.explain:
        print(made_plan.explain())
    if not args.json:
        print(f"Plan: {args.out} ({args.weights} programs, macOS {LOWEST_MACOS[args.weights]} or later)")
    return 0


def _hot(text: str) -> str | int:
    """An argparse type: `auto`, `all` or a whole number."""
    if text in ("auto", "all"):
        return text
    return positive(text)
