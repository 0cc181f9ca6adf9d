"""`mlx_npumoe.programs`: emit the Core ML programs of a plan, or check those of a Prepared folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from . import add_common, add_form, parse, parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    made = parser("programs", "Emit the Core ML programs of a plan, or check those of a Prepared folder.")
    actions = made.add_subparsers(dest="action", required=True, metavar="emit|check")
    emit = actions.add_parser("emit", help="write the .mlpackage of each program")
    emit.add_argument("--model", required=True)
    emit.add_argument("--plan", required=True, metavar="FILE")
    emit.add_argument("--out", required=True, metavar="FOLDER")
    add_form(emit, layout=None, body=None)
    check = actions.add_parser("check", help="lint every program and compare it with MLX again")
    check.add_argument("folder", help="A Prepared folder.")
    check.add_argument("--model", help="Where the model is now. Default: where it was prepared from.")
    for action in (emit, check):
        add_common(action, again=True)
    args = parse(made, argv)
    from ..planning.plan import Plan
    from ..preparation import check_programs, emit_programs
    from ..prepared import Prepared

    if args.action == "emit":
        plan = Plan.load(Path(args.plan)).in_form(args.layout, args.body)
        rows = emit_programs(args.model, plan, Path(args.out), progress=not args.quiet)
    else:
        rows = check_programs(Prepared.open(args.folder), args.model, progress=not args.quiet)
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    for row in rows:
        print(f"{row['program']:<56} {row['bytes'] / 1e6:8.2f} MB  relative L2 {row['relative_l2']:.2e}")
    print(f"{len(rows)} programs {'written to ' + args.out if args.action == 'emit' else 'are as MLX computes them'}.")
    return 0
