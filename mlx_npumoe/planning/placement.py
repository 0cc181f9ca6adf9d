"""Which experts are hot: the best prefix by demand of each site, then one device budget shared by all sites.

Knows the cost rule and the limits, not where a profile or the loads come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ..errors import UsageError
from ..program import Group, WeightFormat
from .cost import PACKAGE_ALLOWANCE, LayerTimes, SiteCost, SiteLoads, expert_bytes
from .device_profile import DeviceLimits, DeviceProfile
from .groups import LAYER_SPLIT, Form, pack_groups
from .tiers import ExpectedRows, TierChooser, TierPolicy, expected

Hot = Literal["auto", "all"] | int


@dataclass(frozen=True)
class Placement:
    """Where one site's experts go, and what that is expected to cost for a chunk."""

    groups: tuple[Group, ...]  # empty where everything stays local
    reason: str | None  # why everything stays local, where it does
    min_chunk: int  # least tokens at which the device still helps, 0 where everything stays local
    rows: ExpectedRows
    times: LayerTimes
    stock_s: float  # everything local


@dataclass
class _Candidate:
    """One site while the budget is shared out: what the h most demanded experts would give, for every h."""

    site: SiteLoads
    cost: SiteCost
    chooser: TierChooser
    order: np.ndarray  # (H,) experts with load, by falling demand, ties by index
    unit_bytes: int  # of one expert in a package
    form: Form
    group_size: int
    layer_s: np.ndarray = field(default_factory=lambda: np.zeros(1))  # [h], 0 <= h <= what the programs hold
    programs: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))  # [h], likewise
    hot: int = 0
    reason: str | None = None

    def capacities(self, hot: int) -> np.ndarray:
        """Capacities `(E,)` with the first `hot` experts of the order."""
        return self.chooser.capacities(self.order[:hot])

    def programs_of(self, hot: int) -> int:
        """Programs they take."""
        return self.form.programs(self.capacities(hot), self.group_size)


def place(
    sites: Sequence[SiteLoads],
    profile: DeviceProfile,
    *,
    chunk: int,
    policy: TierPolicy,
    weights: WeightFormat,
    hot: Hot = "auto",
    min_chunk: int | None = None,
    form: Form = LAYER_SPLIT,
) -> list[Placement]:
    """Decide the hot set, groups and least chunk of every site.

    Per site every prefix of the experts by demand is tried. Capacities are chosen anew for each prefix: the
    few levels there are should serve the experts that are hot, not those that stay local. Then the sites
    share the device's bytes and programs, see `share_budget`. With `hot` "all" or a number the cost rule is
    not asked, and what does not fit the limits is an error.

    Args:
        sites: in layer order.
        profile: figures and limits of the device.
        chunk: tokens a chunk, the one the loads were counted for.
        policy: of the capacities.
        weights: format on the device.
        hot: "auto", or every expert with load, or that many a site.
        min_chunk: overrides the least chunk of all hot sites; by default the cost rule's, or one grain with
            a forced `hot`, so that decode stays local.
        form: of the programs.

    Raises:
        UsageError: where a forced hot set does not fit.

    """
    if isinstance(hot, bool) or (hot not in ("auto", "all") and (not isinstance(hot, int) or hot < 0)):
        raise UsageError(f"hot {hot!r} is neither 'auto', 'all' nor a number of experts; use one of them")
    if min_chunk is not None and not 1 <= min_chunk <= chunk:
        raise UsageError(f"a least chunk of {min_chunk} is outside 1 to the chunk of {chunk}; choose one inside")
    candidates = [_candidate(site, profile, chunk, policy, weights, form) for site in sites]
    if hot == "auto":
        for c in candidates:
            _try_prefixes(c, profile.limits)
        share_budget(candidates, profile.limits)
    else:
        _force(candidates, profile.limits, hot)
    forced_chunk = min_chunk if min_chunk is not None or hot == "auto" else min(profile.limits.grain, chunk)
    return [_placement(c, profile.limits, chunk, forced_chunk) for c in candidates]


def _candidate(
    site: SiteLoads, profile: DeviceProfile, chunk: int, policy: TierPolicy, weights: WeightFormat, form: Form
) -> _Candidate:
    unit_bytes = expert_bytes(site.hidden, site.width, weights, site.activation.matrices) + PACKAGE_ALLOWANCE
    demand = site.demand
    order = np.argsort(-demand, kind="stable")
    candidate = _Candidate(
        site=site,
        cost=SiteCost(site, profile, weights),
        chooser=TierChooser(site.loads, chunk, policy),
        order=order[demand[order] > 0],
        unit_bytes=unit_bytes,
        form=form,
        group_size=form.group_size(site.hidden, site.width, profile.limits, unit_bytes),
    )
    limits = profile.limits
    if site.reason is not None:
        candidate.reason = site.reason
    elif site.activation.formula is None:
        candidate.reason = f"activation {site.activation} has no program yet"
    elif site.up_shift and not site.activation.linear:
        candidate.reason = (
            f"values came near the float16 limit, and {site.activation.name} is not linear in what could be scaled"
        )
    elif site.hidden > limits.surface_rows:
        candidate.reason = f"hidden size {site.hidden} is over the device's {limits.surface_rows} surface rows"
    elif candidate.unit_bytes > min(limits.program_bytes, limits.total_bytes):
        candidate.reason = f"one expert of {_mib(candidate.unit_bytes)} is over the device's limit"
    elif not len(candidate.order):
        candidate.reason = "calibration routed no token here"
    return candidate


def _try_prefixes(candidate: _Candidate, limits: DeviceLimits) -> None:
    """Fill in the layer time and the programs of every prefix they can hold."""
    stock_s = candidate.cost.stock_s()
    if candidate.reason is not None:
        candidate.layer_s = np.array([stock_s])
        return
    most = len(candidate.order)
    if candidate.form.layout == "layer":
        most = min(most, limits.program_bytes // candidate.unit_bytes)
    times, programs = [stock_s], [0]
    for h in range(1, most + 1):
        capacities = candidate.capacities(h)
        programs.append(candidate.form.programs(capacities, candidate.group_size))
        times.append(candidate.cost.times(capacities, programs=programs[-1]).layer_s)
    candidate.layer_s, candidate.programs = np.array(times), np.array(programs)
    best = float(candidate.layer_s[1:].min())
    if best >= stock_s:
        candidate.reason = f"no split helps: local alone {_ms(stock_s)}, the best split {_ms(best)}"
        candidate.layer_s = candidate.layer_s[:1]


def share_budget(candidates: Sequence[_Candidate], limits: DeviceLimits) -> None:
    """Give experts to the device, most seconds saved a byte first, until nothing more helps or fits (ours).

    A move takes one site from its h hot experts to any larger h; looking past the next expert matters because
    a launch pays off only with several. Where bytes and programs suffice, each site ends at its best prefix;
    where they do not, those left out are the experts that save least a byte: the mirror of dropping the least
    valuable until it fits, without overshooting. Sites that get nothing get a reason.
    """
    left, programs = limits.total_bytes, limits.programs
    while True:
        moves = []
        for index, c in enumerate(candidates):
            reach = min(len(c.layer_s) - 1, c.hot + left // c.unit_bytes)
            more = np.arange(1, reach - c.hot + 1)
            if not len(more):
                continue
            saved = (c.layer_s[c.hot] - c.layer_s[c.hot + 1 : reach + 1]) / (more * c.unit_bytes)
            saved[c.programs[c.hot + 1 : reach + 1] - c.programs[c.hot] > programs] = 0
            best = int(saved.argmax())
            if saved[best] > 0:
                moves.append((float(saved[best]), -index, int(more[best])))
        if not moves:
            break
        _, index, step = max(moves)
        chosen = candidates[-index]
        programs -= int(chosen.programs[chosen.hot + step] - chosen.programs[chosen.hot])
        chosen.hot += step
        left -= step * chosen.unit_bytes
    for c in candidates:
        if c.hot == 0 and c.reason is None:
            spent = f"{limits.programs} programs" if programs == 0 else f"{_mib(limits.total_bytes)}"
            c.reason = f"the device's {spent} go to layers that gain more"


def _force(candidates: Sequence[_Candidate], limits: DeviceLimits, hot: Literal["all"] | int) -> None:
    """Make the asked number of experts hot wherever programs are possible at all."""
    total = programs = 0
    for c in candidates:
        if c.reason is not None:
            continue
        c.hot = len(c.order) if hot == "all" else min(hot, len(c.order))
        if c.hot == 0:
            c.reason = "hot experts were forced to none"
            continue
        if c.form.layout == "layer" and c.hot * c.unit_bytes > limits.program_bytes:
            raise UsageError(
                f"{c.site.path}: {c.hot} hot experts take {_mib(c.hot * c.unit_bytes)}, over the program "
                f"limit of {_mib(limits.program_bytes)}; force fewer, or use the layout groups"
            )
        total, programs = total + c.hot * c.unit_bytes, programs + c.programs_of(c.hot)
    if total > limits.total_bytes or programs > limits.programs:
        raise UsageError(
            f"the forced hot experts take {programs} programs of {_mib(total)}, over the device's "
            f"{limits.programs} and {_mib(limits.total_bytes)}; force fewer"
        )


def _placement(candidate: _Candidate, limits: DeviceLimits, chunk: int, forced_chunk: int | None) -> Placement:
    site, cost = candidate.site, candidate.cost
    capacities = candidate.capacities(candidate.hot)
    programs = candidate.programs_of(candidate.hot)
    groups: tuple[Group, ...] = ()
    least = 0
    if candidate.hot:
        groups = pack_groups(capacities, site.demand, candidate.group_size)
        least = forced_chunk or least_chunk(cost, capacities, chunk, limits.grain, programs)
    return Placement(
        groups=groups,
        reason=candidate.reason,
        min_chunk=least,
        rows=expected(site.loads, capacities),
        times=cost.times(capacities, programs=programs),
        stock_s=cost.stock_s(),
    )


def least_chunk(cost: SiteCost, capacities: np.ndarray, chunk: int, grain: int, programs: int = 1) -> int:
    """Least tokens, a multiple of the grain, from which on the split beats local alone up to a whole chunk.

    Loads are scaled in proportion; the programs' capacities are fixed, so short chunks pay for pads.
    """
    least = chunk
    for tokens in range((chunk - 1) // grain * grain, 0, -grain):
        scale = tokens / chunk
        if cost.times(capacities, scale, programs).layer_s >= cost.stock_s(scale):
            break
        least = tokens
    return least


def _mib(size: int) -> str:
    return f"{size / 2**20:.4g} MiB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
