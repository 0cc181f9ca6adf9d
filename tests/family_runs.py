"""One run of a family through the exactness harness: what its sites did, and how far from stock it was.

Writes docs/families.md: make families, or python tests/family_runs.py [NAME ...] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

import families
import mlx_npumoe
from mlx_npumoe.calibration import RoutingProfile
from mlx_npumoe.preparation import plan_for, prepare
from mlx_npumoe.prepared import Prepared
from mlx_npumoe.recording import record
from mlx_npumoe.sites import find_sites
from mlx_npumoe.taps import prove
from mlx_npumoe.tensors import site_fingerprint, site_weights
from replay import per_token_error, require_close_flips, run
from stored_formats import store

CHUNK, MIN_CHUNK = 128, 32
TAPS = ("attention_output", "router_logits", "gate_weights")
SHAPES = ((1, 1), (1, 40), (1, 200), (2, 40))  # (B, T) of the calls


@dataclass(frozen=True)
class Outcome:
    """What a family's run showed. Lists have an entry a site."""

    name: str
    activations: list[str]
    offloaded: list[int]  # experts in programs
    programs: list[int]
    launches: list[dict[tuple[int, int], int]]  # by (B, T)
    reasons: list[str | None]
    error: float  # worst token's logits with routing replayed, relative L2
    flips: int  # first flips of the free runs, all shown to be close
    spilled: int
    taps: dict[str, str | None]  # what can be observed: None, or the reason why not


def tokens(batch: int, length: int) -> mx.array:
    """Random token ids `(B, T)`."""
    return mx.array(np.random.default_rng([batch, length]).integers(2, 300, (batch, length)))


def taps_of(model: nn.Module) -> dict[str, str | None]:
    """For each of TAPS, None where all sites of a model have it, else the first reason why one has not."""
    proofs = prove(model, list(find_sites(model))).values()
    reasons = {
        "attention_output": [p.attention_reason for p in proofs],
        "router_logits": [p.logits_reason for p in proofs],
        "gate_weights": [p.gates_reason for p in proofs],
    }
    return {name: next((r for r in found if r is not None), None) for name, found in reasons.items()}


def prepare_family(
    model: nn.Module, name: str, folder: Path, stored: str = "float32", weights: str = "fp16", **form: Any
) -> Prepared:
    """Write a model where mlx-lm would load it from, and prepare it with every expert on the device.

    `stored` is one of STORED; the model becomes what a load would give. `form` goes to `plan_for`.
    """
    config = families.config(name) | store(model, stored)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    model.set_dtype(mx.float32)  # as load widens it here
    model_type, experts = site_weights(str(folder))
    profile = RoutingProfile(
        fingerprint=site_fingerprint(experts, model_type),
        model_type=model_type,
        source="random tokens",
        phase="prefill",
        sequence=CHUNK,
        sites=record(model, tokens(4, CHUNK).tolist(), progress=False),
    )
    sites = [w.site for w in experts]
    plan = plan_for(profile, sites, chunk=CHUNK, weights=weights, hot="all", min_chunk=MIN_CHUNK, **form)
    return prepare(str(folder), profile=profile, plan=plan, out=folder / "prepared", progress=False)


def run_family(name: str, folder: Path, stored: str = "float32", weights: str = "fp16", **form: Any) -> Outcome:
    """Prepare, attach and compare with stock; asserts all but the error's size."""
    model = families.build(name)
    prepared = prepare_family(model, name, folder, stored, weights, **form)
    taps = taps_of(model)
    stock = {shape: run(model, lambda shape=shape: model(tokens(*shape))) for shape in SHAPES}
    with mlx_npumoe.attach(model, prepared, device="off"):
        off = model(tokens(1, 200))
    assert np.array_equal(np.array(off).reshape(stock[1, 200].logits.shape), stock[1, 200].logits)
    errors, flips = [], 0
    sites = list(find_sites(model))
    launches: list[dict[tuple[int, int], int]] = [{} for _ in sites]
    with mlx_npumoe.attach(model, prepared) as engine:
        for shape, want in stock.items():
            before = [layer.counters.launches for layer in engine.report().layers]
            replayed = run(model, lambda shape=shape: model(tokens(*shape)), want)
            for site, was, layer in zip(launches, before, engine.report().layers, strict=True):
                site[shape] = layer.counters.launches - was
            errors.append(float(per_token_error(replayed.logits, want.logits).max()))
            if shape[0] == 1:
                flips += require_close_flips(want, replayed, run(model, lambda shape=shape: model(tokens(*shape))))
        report = engine.report()
    assert report.totals.fallbacks == report.totals.dropped == 0
    return Outcome(
        name=name,
        activations=[str(site.activation) for site in sites],
        offloaded=[len(prepared.plan.site(site.path).hot) for site in sites],  # type: ignore[union-attr]
        programs=[len(site.programs) for site in prepared.sites.values()],
        launches=launches,
        reasons=[layer.reason for layer in report.layers],
        error=max(errors),
        flips=flips,
        spilled=report.totals.spilled,
        taps=taps,
    )


def table(outcomes: list[Outcome]) -> str:
    """The page docs/families.md."""
    rows = [_HEAD.format(mlx_lm=version("mlx-lm"), count=len(outcomes))]
    head = ("family", "sites", "experts moved", "activation", "worst token", "first flips", "spilled", "local")
    rows.append(f"| {' | '.join([*head, *(name.replace('_', ' ') for name in TAPS)])} |")
    rows.append("|---" * (len(head) + len(TAPS)) + "|")
    notes: list[str] = []
    for o in outcomes:
        local = "; ".join(sorted({r for r in o.reasons if r is not None})) or "nothing"
        moved = ", ".join(map(str, o.offloaded))
        activations = "; ".join(dict.fromkeys(o.activations))
        rows.append(
            f"| {o.name} | {len(o.reasons)} | {moved} | {activations} | {o.error:.1e} | {o.flips} | {o.spilled} "
            f"| {local} | {' | '.join(_note(o.taps[name], notes) for name in TAPS)} |"
        )
    rows.append("")
    rows += [f"{n}. {reason}" for n, reason in enumerate(notes, 1)]
    rows.append("\nNot here:\n")
    rows += [f"* {name}: {reason}." for name, reason in families.UNSUPPORTED.items()]
    return "\n".join(rows) + "\n"


def _note(reason: str | None, notes: list[str]) -> str:
    """A cell: `yes`, or `no` with the number of its reason."""
    if reason is None:
        return "yes"
    if reason not in notes:
        notes.append(reason)
    return f"no ({notes.index(reason) + 1})"


_HEAD = """# Families

Written by `make families` ({count} model types, mlx-lm {mlx_lm}); do not edit. Measured here, on the interpreter.

A tiny random model of every file of mlx-lm with expert layers, and of the model types that wrap one, is prepared with
float16 programs for all experts that got tokens, attached, and compared with stock at (B, T) of (1, 1), (1, 40),
(1, 200) and (2, 40), chunk 128. *Worst token* is the largest relative L2 error of a token's logits with the stock run's
routing replayed (limit 2e-3). *First flips* are routing decisions of the free runs that differ from stock with no
other flip before them; each was shown to come from rounding. *Spilled* pairs found no slot and were computed by MLX.
With the device off, every model's logits are bit-identical to stock. All calls but (1, 1) launched at every site, those
of one chunk once, (1, 200) twice. The last three columns say what can be observed around the experts, proved in a trial
call of each site; numbers are reasons, below the table.
"""


def main(argv: list[str]) -> None:
    """Run families and write or print the page."""
    parser = argparse.ArgumentParser(description="Every family through the exactness harness.")
    parser.add_argument("names", nargs="*", help="All where none is given.")
    parser.add_argument("--out", type=Path, help="Write the page there.")
    parser.add_argument("--taps", type=Path, help="Write what can be observed there, as JSON.")
    args = parser.parse_args(argv)
    outcomes = []
    for name in args.names or [*families.FAMILIES, *families.WRAPPERS]:
        with tempfile.TemporaryDirectory() as folder:
            outcomes.append(run_family(name, Path(folder)))
        assert all(list(site.values()) == [0, 1, 2, 1] for site in outcomes[-1].launches), outcomes[-1]
    if args.taps:
        shown = {"mlx_lm": version("mlx-lm"), "families": {o.name: o.taps for o in outcomes}}
        args.taps.write_text(json.dumps(shown, indent=1) + "\n")
    if args.out:
        args.out.write_text(table(outcomes))
    else:
        print(table(outcomes))


if __name__ == "__main__":
    main(sys.argv[1:])
