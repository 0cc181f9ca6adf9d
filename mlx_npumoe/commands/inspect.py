"""`mlx_npumoe.inspect`: a model's experts, and what could move to a second device."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from . import parse, parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    made = parser("inspect", "Show a model's expert layers: shapes, bytes, and what could move to a second device.")
    what = made.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help="Folder, hub repository or demo:NAME; only headers are read.")
    what.add_argument("--families", action="store_true", help="The model families of the installed mlx-lm instead.")
    args = parse(made, argv)
    if args.families:
        return _families(as_json=args.json)

    from .. import loading
    from ..planning.cost import expert_bytes
    from ..program import WEIGHT_FORMATS
    from ..sites import require_sites
    from ..weights import Checkpoint, ExpertWeights

    folder = loading.locate(args.model)
    model, _ = loading.load_lazily(folder)
    checkpoint = Checkpoint(folder)
    sites = require_sites(model, args.model)
    rows = []
    for site, module in sites.items():
        programs = {
            w: site.experts * expert_bytes(site.hidden, site.width, w, site.activation.matrices) for w in WEIGHT_FORMATS
        }
        rows.append(
            {
                **asdict(site),
                "activation": str(site.activation),
                "format": site.format,
                "offloadable": site.local_reason is None,
                "read_by_offset": ExpertWeights(site, module, checkpoint).by_offset,
                "program_bytes_of_all": programs,
            }
        )
    total = {
        "model": args.model,
        "model_type": model.model_type,
        "layers": len(rows),
        "expert_bytes": sum(r["nbytes"] for r in rows),
        "sites": rows,
    }
    if args.json:
        print(json.dumps(total, indent=2))
        return 0
    print(
        f"{args.model}: {model.model_type}, {len(rows)} expert layers, {total['expert_bytes'] / 1e9:.3f} GB of experts"
    )
    print(f"{'layer':>5}  {'E':>4} {'D':>5} {'F':>5}  {'format':<18} {'MB':>8}  {'int8 MB':>8}  second device")
    for r in rows:
        verdict = "yes" if r["offloadable"] else f"no: {r['local_reason']}"
        print(
            f"{r['layer']:>5}  {r['experts']:>4} {r['hidden']:>5} {r['width']:>5}  {r['format']:<18} "
            f"{r['nbytes'] / 1e6:>8.1f}  {r['program_bytes_of_all']['int8'] / 1e6:>8.1f}  {verdict}"
        )
    return 0


def _seen(taps: dict[str, str | None] | None, name: str) -> str:
    """Whether something can be observed; `?` where that was not tried."""
    return "?" if taps is None else "yes" if taps[name] is None else "no"


def _families(*, as_json: bool) -> int:
    """Print every file of mlx-lm with expert layers."""
    from importlib.metadata import version

    from ..families import find_families

    found = find_families()
    if as_json:
        print(json.dumps({"mlx_lm": version("mlx-lm"), "families": [asdict(f) for f in found]}, indent=2))
        return 0
    print(f"mlx-lm {version('mlx-lm')}: {len(found)} families with expert layers")
    print(
        f"{'family':<20} {'experts':<10} {'activation':<24} {'attention':<10} {'logits':<7} {'gates':<6} second device"
    )
    for f in found:
        verdict = "yes" if f.reason is None else f"no: {f.reason}"
        attention, logits, gates = (_seen(f.taps, n) for n in ("attention_output", "router_logits", "gate_weights"))
        print(
            f"{f.name:<20} {', '.join(f.forms):<10} {', '.join(f.activations):<24} {attention:<10} {logits:<7} "
            f"{gates:<6} {verdict}"
        )
    print("attention, logits, gates: what --overflow prune and profiles can observe; --json has the reasons.")
    return 0
