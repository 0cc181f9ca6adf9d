"""The plan of a model: per site which experts share which program, what stays local and why.

A JSON file a person can read. Knows no weights and no device implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from ..activations import Activation
from ..errors import UsageError
from ..program import BODIES, LAYOUTS, WEIGHT_FORMATS, Group, ProgramSpec, WeightFormat
from ..records import Record, dump, parse, read, write
from .cost import PACKAGE_ALLOWANCE, SiteLoads, expert_bytes
from .device_profile import KINDS, DeviceLimits, DeviceProfile, read_limits
from .explain import explain
from .groups import Form, regrouped
from .placement import Hot, Placement, place
from .tiers import TIER_POLICIES, TierPolicy, round_up

PLAN_SCHEMA = 1
_REMEDY = "run mlx_npumoe.plan or mlx_npumoe.prepare again"


@dataclass(frozen=True)
class Expectation:
    """What one layer is expected to do with a whole chunk, means over the calibration's chunks."""

    rows: float  # computed on the device, pads included
    pads: float
    spilled: float  # pairs over capacity, computed locally
    device_s: float  # launch, arithmetic and weights on the device
    local_s: float  # cold and spilled pairs, at the same time
    layer_s: float  # both halves with pack, join and unpack
    stock_s: float  # everything local
    gain: float  # share of stock_s saved, 0 for local sites


@dataclass(frozen=True)
class SitePlan:
    """One MoE site: its programs, or the reason why it stays local."""

    path: str
    layer: int
    experts: int  # E
    spec: ProgramSpec | None  # of all its programs together
    reason: str | None  # why everything stays local
    min_chunk: int  # shorter inputs stay local; 0 for sites without a program
    expected: Expectation

    @property
    def hot(self) -> tuple[int, ...]:
        """Hot experts in slot order."""
        return self.spec.experts if self.spec else ()

    @property
    def programs(self) -> tuple[ProgramSpec, ...]:
        """The spec of each program, in slot order."""
        return self.spec.programs if self.spec else ()

    @property
    def nbytes(self) -> int:
        """Weight bytes on the device."""
        spec = self.spec
        if spec is None:
            return 0
        return len(spec.experts) * expert_bytes(spec.hidden, spec.width, spec.weights, spec.activation.matrices)


@dataclass(frozen=True)
class Plan:
    """Sites of one model in layer order, with what the plan was made for and from."""

    model_fingerprint: str
    model_type: str
    chunk: int  # tokens
    tiers: str
    quantile: float
    weights: WeightFormat
    layout: str
    body: str
    device_name: str  # of the profile the times come from
    device_kind: str  # its weakest figure: measured, published or estimated
    limits: DeviceLimits  # of the device planned for
    sites: tuple[SitePlan, ...]

    @property
    def hot_sites(self) -> tuple[SitePlan, ...]:
        """Sites with a program."""
        return tuple(s for s in self.sites if s.spec is not None)

    @property
    def nbytes(self) -> int:
        """Weight bytes on the device."""
        return sum(s.nbytes for s in self.sites)

    @property
    def programs(self) -> int:
        """Programs of all sites."""
        return sum(len(s.programs) for s in self.sites)

    def in_form(self, layout: str | None = None, body: str | None = None) -> Plan:
        """The same experts and capacities in programs of another layout or body; None keeps the plan's.

        Expected times stay those of the plan. Raises UsageError where a form is unknown or its programs do not fit the
        device.
        """
        form = Form(layout or self.layout, body or self.body)
        _require_form(form)
        sites = []
        for site in self.sites:
            spec = site.spec
            if spec is not None:
                unit = expert_bytes(spec.hidden, spec.width, spec.weights, spec.activation.matrices) + PACKAGE_ALLOWANCE
                size = form.group_size(spec.hidden, spec.width, self.limits, unit)
                if not size or (form.layout == "layer" and len(spec.experts) * unit > self.limits.program_bytes):
                    raise UsageError(
                        f"{site.path}: {len(spec.experts)} hot experts are over what a program of layout "
                        f"{form.layout} may hold on the device; keep the plan's layout"
                    )
                spec = replace(spec, groups=regrouped(spec.groups, size), layout=form.layout, body=form.body)
            sites.append(replace(site, spec=spec))
        made = replace(self, layout=form.layout, body=form.body, sites=tuple(sites))
        if made.programs > self.limits.programs:
            raise UsageError(
                f"layout {form.layout} takes {made.programs} programs, over the device's {self.limits.programs}; use "
                "the layout layer"
            )
        return made

    def site(self, path: str) -> SitePlan | None:
        """The site of a module path."""
        return next((s for s in self.sites if s.path == path), None)

    def explain(self) -> str:
        """A table of every layer with totals and reasons."""
        return explain(self)

    def to_json(self) -> str:
        """As readable JSON."""
        data: dict[str, Any] = {"schema_version": PLAN_SCHEMA}
        data |= {key: getattr(self, key) for key in _SCALARS}
        data["device"] = {
            "name": self.device_name,
            "kind": self.device_kind,
            "limits": asdict(self.limits),
        }
        data["sites"] = [
            {
                "path": s.path,
                "layer": s.layer,
                "experts": s.experts,
                "min_chunk": s.min_chunk,
                "reason": s.reason,
                "program": s.spec and s.spec.to_dict(),
                "expected": asdict(s.expected),
            }
            for s in self.sites
        ]
        return dump(data)

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "plan") -> Plan:
        """Back from `to_json`. Raises PreparedError where it is no valid plan of this schema."""
        return _plan(parse(text, where, _REMEDY))

    def save(self, path: str | Path) -> None:
        """Write the file whole or not at all. Raises PreparedError where it cannot be written."""
        write(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a file. Raises PreparedError where it is missing or no valid plan of this schema."""
        return _plan(read(path, "plan", _REMEDY))


_SCALARS = (
    "model_fingerprint",
    "model_type",
    "chunk",
    "tiers",
    "quantile",
    "weights",
    "layout",
    "body",
)


def make_plan(
    sites: Sequence[SiteLoads],
    *,
    model_fingerprint: str,
    model_type: str,
    chunk: int,
    profile: DeviceProfile,
    tiers: str | TierPolicy = "quantile",
    weights: str = "int8",
    layout: str = "layer",
    body: str = "split",
    hot: Hot = "auto",
    min_chunk: int | None = None,
) -> Plan:
    """Plan a model from the loads of its sites.

    Args:
        sites: in layer order, loads counted per chunk of `chunk` tokens.
        model_fingerprint: of the model the loads come from.
        model_type: of its configuration.
        chunk: tokens a chunk.
        profile: figures and limits of the device.
        tiers: policy of the capacities, by name or in full.
        weights: format on the device.
        layout: "layer", one program a site, or "groups", one a group.
        body: what a program does with a group's experts: "split", "grouped" or "separate".
        hot: "auto" by the cost rule, "all" experts with load, or that many a site.
        min_chunk: overrides the least chunk of all hot sites.

    Raises:
        UsageError: where an argument is unknown or a forced hot set does not fit the device.

    """
    if chunk < 1:
        raise UsageError(f"a chunk of {chunk} tokens is impossible; use at least 1")
    form = Form(layout, body)
    _require_form(form)
    if weights not in WEIGHT_FORMATS:
        raise UsageError(f"weights {weights!r} is unknown; use one of {', '.join(WEIGHT_FORMATS)}")
    weight_format: WeightFormat = weights
    policy = tiers if isinstance(tiers, TierPolicy) else TierPolicy(name=tiers)
    policy = replace(policy, grain=profile.limits.grain)
    placements = place(
        sites, profile, chunk=chunk, policy=policy, weights=weight_format, hot=hot, min_chunk=min_chunk, form=form
    )
    plan = Plan(
        model_fingerprint=model_fingerprint,
        model_type=model_type,
        chunk=chunk,
        tiers=policy.name,
        quantile=policy.quantile,
        weights=weight_format,
        layout=layout,
        body=body,
        device_name=profile.name,
        device_kind=profile.kind,
        limits=profile.limits,
        sites=tuple(_site_plan(s, p, weight_format, form) for s, p in zip(sites, placements, strict=True)),
    )
    return Plan.from_json(plan.to_json(), where="new plan")


def _require_form(form: Form) -> None:
    for what, value, known in (("layout", form.layout, LAYOUTS), ("body", form.body, BODIES)):
        if value not in known:
            raise UsageError(f"{what} {value!r} is unknown; use one of {', '.join(known)}")


def _site_plan(site: SiteLoads, placed: Placement, weights: WeightFormat, form: Form) -> SitePlan:
    spec = None
    if placed.groups:
        spec = ProgramSpec(
            hidden=site.hidden,
            width=site.width,
            groups=placed.groups,
            activation=site.activation,
            weights=weights,
            layout=form.layout,
            body=form.body,
            up_shift=site.up_shift,
        )
    saved = placed.stock_s - placed.times.layer_s
    return SitePlan(
        path=site.path,
        layer=site.layer,
        experts=site.experts,
        spec=spec,
        reason=placed.reason,
        min_chunk=placed.min_chunk,
        expected=Expectation(
            *placed.rows,
            device_s=placed.times.device_s,
            local_s=placed.times.local_s,
            layer_s=placed.times.layer_s,
            stock_s=placed.stock_s,
            gain=saved / placed.stock_s if spec and placed.stock_s > 0 else 0.0,
        ),
    )


def _plan(record: Record) -> Plan:
    """A checked plan."""
    record.schema(PLAN_SCHEMA)
    device = record.record("device")
    quantile = record.number("quantile", above=True)
    if quantile > 1:
        record.fail(f"'quantile' {quantile:g} is over 1")
    plan = Plan(
        model_fingerprint=record.text("model_fingerprint"),
        model_type=record.text("model_type"),
        chunk=record.integer("chunk", least=1),
        tiers=record.text("tiers", TIER_POLICIES),
        quantile=quantile,
        weights=cast(WeightFormat, record.text("weights", WEIGHT_FORMATS)),
        layout=record.text("layout", LAYOUTS),
        body=record.text("body", BODIES),
        device_name=device.text("name"),
        device_kind=device.text("kind", KINDS),
        limits=read_limits(device.record("limits")),
        sites=(),
    )
    sites = tuple(_site(r, plan) for r in record.records("sites", empty=True))
    paths = [s.path for s in sites]
    for path in paths:
        if paths.count(path) > 1:
            record.fail(f"site {path!r} is listed twice")
    return replace(plan, sites=sites)


def _site(record: Record, plan: Plan) -> SitePlan:
    experts = record.integer("experts", least=1)
    spec = None if record.get("program") is None else _spec(record.record("program"), plan, experts)
    reason = None if record.get("reason") is None else record.text("reason")
    min_chunk = record.integer("min_chunk")
    if (spec is None) == (reason is None):
        record.fail("a site has either a program or the reason why it stays local")
    if (spec is None) != (min_chunk == 0):
        record.fail("'min_chunk' should be at least 1 with a program and 0 without")
    if min_chunk > plan.chunk:
        record.fail(f"'min_chunk' {min_chunk} is over the chunk of {plan.chunk}")
    figures = record.record("expected")
    return SitePlan(
        path=record.text("path"),
        layer=record.integer("layer"),
        experts=experts,
        spec=spec,
        reason=reason,
        min_chunk=min_chunk,
        expected=Expectation(
            **{
                key: figures.number(key, least=None if key == "gain" else 0.0)
                for key in Expectation.__dataclass_fields__
            }
        ),
    )


def _spec(record: Record, plan: Plan, experts: int) -> ProgramSpec:
    groups = tuple(_group(r, plan, experts) for r in record.records("groups"))
    spec = ProgramSpec(
        hidden=record.integer("hidden", least=1),
        width=record.integer("width", least=1),
        groups=groups,
        activation=_activation(record),
        weights=cast(WeightFormat, record.text("weights", [plan.weights])),
        layout=record.text("layout", [plan.layout]),
        body=record.text("body", [plan.body]),
        up_shift=record.integer("up_shift", most=30),
    )
    if spec.up_shift and not spec.activation.linear:
        record.fail(f"'up_shift' {spec.up_shift} is impossible with the activation {spec.activation}")
    most = Form(plan.layout, plan.body).group_size(spec.hidden, spec.width, plan.limits)
    for group in groups:
        if len(group.experts) > most:
            record.fail(f"a group of {len(group.experts)} experts is over the device's limit of {most}")
    if len(set(spec.experts)) != len(spec.experts):
        twice = next(e for e in spec.experts if spec.experts.count(e) > 1)
        record.fail(f"expert {twice} is listed twice")
    return spec


def _activation(record: Record) -> Activation:
    try:
        return Activation.parse(record.text("activation"))
    except ValueError as error:
        record.fail(f"'activation': {error}")


def _group(record: Record, plan: Plan, experts: int) -> Group:
    members = record.integers("experts")
    if max(members) >= experts:
        record.fail(f"expert {max(members)} does not exist among {experts}")
    capacity = record.integer("capacity", least=1)
    if capacity % plan.limits.grain:
        record.fail(f"'capacity' {capacity} is not a multiple of {plan.limits.grain}")
    if capacity > round_up(plan.chunk, plan.limits.grain):
        record.fail(f"'capacity' {capacity} is over the chunk of {plan.chunk} tokens")
    return Group(members, capacity)
