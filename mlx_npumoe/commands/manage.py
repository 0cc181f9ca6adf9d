"""`mlx_npumoe.manage`: what we keep in the cache, as `mlx_lm.manage` does for models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from ..errors import UsageError
from . import parse, parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit code 1 where `--verify` finds a fault."""
    made = parser("manage", "List, verify or delete what the cache keeps.")
    made.add_argument("--scan", action="store_true", help="List what there is (the default).")
    made.add_argument("--verify", action="store_true", help="Open everything and compare every file with its hash.")
    made.add_argument("--delete", action="store_true", help="Delete what matches the pattern, after asking.")
    made.add_argument("--pattern", default="", help="Part of a folder's or its model's name. Default: everything.")
    made.add_argument("--yes", action="store_true", help="Delete without asking.")
    args = parse(made, argv)

    if args.delete and args.json and not args.yes:
        raise UsageError("--delete with --json cannot ask; add --yes.")

    from ..storage import delete, fault, stored

    entries = stored(args.pattern)
    faults = {e.path: fault(e) for e in entries} if args.verify else {}
    bad = {path: reason for path, reason in faults.items() if reason}
    gone, failed = [], False
    if args.delete and entries and (args.yes or _confirmed([e.name for e in entries])):
        for entry in entries:
            try:
                delete(entry)
                gone.append(str(entry.path))
            except OSError as error:
                failed, bad[entry.path] = True, f"not deleted: {error.strerror or error}"
    if args.json:
        rows = [{**asdict(e), "path": str(e.path), "fault": bad.get(e.path)} for e in entries]
        print(json.dumps({"entries": rows, "deleted": gone}, indent=2))
        return int(bool(bad))
    if not entries:
        print(f'Nothing in the cache matches "{args.pattern}".' if args.pattern else "The cache is empty.")
    for e in entries:
        state = f"  {bad[e.path]}" if e.path in bad else "  sound" if args.verify else ""
        size = f"{e.nbytes / 1e6:>9.1f} MB {e.files:>5} files"
        print(f"{e.kind:<9} {e.model or '?':<32} {size}  {e.age:<15} {e.path}{state}")
    if args.delete:
        print(f"Deleted {len(gone)} of {len(entries)}.")
    return int(failed or bool(bad))


def _confirmed(names: Sequence[str]) -> bool:
    """Whether the user says yes; no answer at all is a no."""
    print("To be deleted: " + ", ".join(names))
    try:
        return input("Are you sure? (y/n) ").strip().lower() in ("y", "yes", "1")
    except EOFError:
        return False
