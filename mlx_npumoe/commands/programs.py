"""`mlx_npumoe.programs`: emit the Core ML programs of a plan, or check those of a Prepared folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ..progress import Progress
from . import parse, parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    made = parser("programs", "Emit the Core ML programs of a plan, or check those of a Prepared folder.")
    actions = made.add_subparsers(dest="action", required=True, metavar="emit|check")
    emit = actions.add_parser("emit", help="write one .mlpackage a layer")
    emit.add_argument("--model", required=True)
    emit.add_argument("--plan", required=True, metavar="FILE")
    emit.add_argument("--out", required=True, metavar="FOLDER")
    check = actions.add_parser("check", help="lint every program and compare it with MLX again")
    check.add_argument("folder", help="A Prepared folder.")
    check.add_argument("--model", help="Where the model is now. Default: where it was prepared from.")
    args = parse(made, argv)
    rows = _emit(args.model, args.plan, args.out) if args.action == "emit" else _check(args.folder, args.model)
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    for row in rows:
        print(f"{row['program']:<56} {row['bytes'] / 1e6:8.2f} MB  relative L2 {row['relative_l2']:.2e}")
    print(f"{len(rows)} programs {'written to ' + args.out if args.action == 'emit' else 'are as MLX computes them'}.")
    return 0


def _emit(model: str, plan_file: str, out: str) -> list[dict]:
    from ..planning.plan import Plan
    from ..preparation import emit_programs

    return emit_programs(model, Plan.load(Path(plan_file)), Path(out))


def _check(folder: str, model: str | None) -> list[dict]:
    from ..calibration import RoutingProfile
    from ..converters import lint
    from ..preparation import site_weights
    from ..prepared import PROFILE, Prepared
    from ..programs import measure_error, require_accuracy

    prepared = Prepared.open(folder)
    profile = RoutingProfile.load(prepared.folder / PROFILE)
    _, weights = site_weights(model or prepared.model)
    rows = []
    with Progress("Checking programs", len(weights), "layers") as bar:
        for site in weights:
            entry, plan = prepared.sites.get(site.site.path), prepared.plan.site(site.site.path)
            if entry is not None and entry.program and plan is not None and plan.spec is not None:
                package = prepared.folder / entry.program
                lint.check(package, plan.spec)
                seen = profile.sites[entry.path]
                error = measure_error(package, plan.spec, site.matrices, seen.rows, seen.chosen)
                require_accuracy(error, plan.spec, entry.path)
                rows.append({"program": entry.program, "bytes": entry.program_bytes, **error})
            bar.advance()
    return rows
