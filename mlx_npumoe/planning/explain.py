"""The plan as a table for people. Knows the plan's fields and nothing else."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ..program import LOWEST_MACOS

if TYPE_CHECKING:
    from .plan import Plan, SitePlan

_HEADER = (
    "layer", "hot", "tiers", "rows", "pads", "spilled", "device ms", "local ms", "layer ms", "stock ms",
    "gain", "from",
)  # fmt: skip


def explain(plan: Plan) -> str:
    """Per layer what goes to the device and what it should cost for a chunk, then totals and reasons."""
    rows = [_HEADER, *(_row(s) for s in plan.sites), _total(plan)]
    widths = [max(len(r[i]) for r in rows) for i in range(len(_HEADER))]
    table = ["  ".join(cell.rjust(w) for cell, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    table.insert(len(table) - 1, "-" * max(len(line) for line in table))
    head = [
        f"Plan for {plan.model_type}, chunk {plan.chunk} tokens: tiers {plan.tiers} "
        f"(quantile {plan.quantile:g}), weights {plan.weights}, layout {plan.layout}, body {plan.body}.",
        f"Times are predicted from device profile {plan.device_name} ({plan.device_kind} figures).",
        f"Programs of this weight format need macOS {LOWEST_MACOS[plan.weights]} or later.",
        "",
    ]
    return "\n".join([*head, *table, *_reasons(plan)])


def _row(site: SitePlan) -> tuple[str, ...]:
    e = site.expected
    if site.spec is None:
        blank = ("-",) * 5
        times = (_ms(t) for t in (e.local_s, e.layer_s, e.stock_s))
        return (str(site.layer), f"0/{site.experts}", *blank, *times, "-", "-")
    levels = Counter(site.spec.capacities)
    tiers = " + ".join(f"{n}x{c}" for c, n in sorted(levels.items(), reverse=True))
    return (
        str(site.layer),
        f"{len(site.hot)}/{site.experts}",
        tiers,
        f"{e.rows:.0f}",
        f"{e.pads:.0f}",
        f"{e.spilled:.1f}",
        *(_ms(t) for t in (e.device_s, e.local_s, e.layer_s, e.stock_s)),
        f"{e.gain:.1%}",
        str(site.min_chunk),
    )


def _total(plan: Plan) -> tuple[str, ...]:
    def total(key: str) -> float:
        return sum(getattr(s.expected, key) for s in plan.sites)

    stock_s = total("stock_s")
    hot, experts = sum(len(s.hot) for s in plan.sites), sum(s.experts for s in plan.sites)
    return (
        "total",
        f"{hot}/{experts}",
        "",
        f"{total('rows'):.0f}",
        f"{total('pads'):.0f}",
        f"{total('spilled'):.1f}",
        *(_ms(total(key)) for key in ("device_s", "local_s", "layer_s", "stock_s")),
        f"{1 - total('layer_s') / stock_s:.1%}" if stock_s > 0 else "-",
        "",
    )


def _reasons(plan: Plan) -> list[str]:
    """Size on the device, pad rate, and the layers that stay local by reason."""
    hot = plan.hot_sites
    lines = [
        "",
        f"{len(hot)} of {len(plan.sites)} layers offloaded in {plan.programs} program{'s' * (plan.programs != 1)}, "
        f"{plan.nbytes / 2**20:.1f} MiB of weights on the device.",
    ]
    rows, pads = sum(s.expected.rows for s in hot), sum(s.expected.pads for s in hot)
    if rows:
        lines.append(f"{pads / rows:.1%} of the device's rows are pads.")
    by_reason: dict[str, list[str]] = {}
    for site in plan.sites:
        if site.reason is not None:
            by_reason.setdefault(site.reason, []).append(str(site.layer))
    lines += [f"Local, layer{'s' * (len(at) > 1)} {', '.join(at)}: {why}." for why, at in by_reason.items()]
    return lines


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"
