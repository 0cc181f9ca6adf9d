"""Groups: hot experts of one capacity that share ports or a program, and the forms programs have.

Knows sizes and limits, not why experts are hot.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..program import CHANNELS, Group
from .device_profile import DeviceLimits


@dataclass(frozen=True)
class Form:
    """Into how many programs a site's groups go, and what a program does with a group's experts."""

    layout: str = "layer"
    body: str = "split"

    def group_size(self, hidden: int, width: int, limits: DeviceLimits, expert_bytes: int = 0) -> int:
        """Most experts a group may hold, 0 where not even one fits.

        At most `branches` in every body. A group's experts share a surface of `surface_rows` where they have no ports
        of their own, all channels inside a grouped body, and with layout `groups` a program of `program_bytes`, of
        which each takes `expert_bytes`.
        """
        if hidden > limits.surface_rows:
            return 0
        size = limits.branches
        if self.body != "separate":
            size = min(size, limits.surface_rows // hidden)
        if self.body == "grouped":
            size = min(size, max(1, CHANNELS // width))  # one expert is a dense convolution
        if self.layout == "groups" and expert_bytes:
            size = min(size, limits.program_bytes // expert_bytes)
        return size

    def programs(self, capacities: np.ndarray, size: int) -> int:
        """Programs a site has with these capacities `(E,)`, 0 for cold experts, in groups of at most `size`."""
        levels, counts = np.unique(capacities[capacities > 0], return_counts=True)
        return min(1, len(levels)) if self.layout == "layer" else int((-(-counts // size)).sum())


LAYER_SPLIT = Form()


def pack_groups(capacities: np.ndarray, demand: np.ndarray, size: int) -> tuple[Group, ...]:
    """Pack every expert with a capacity into groups of at most `size`.

    A group holds one capacity only (papers 1.2, grouped execution) and neighbours in demand. Larger
    capacities come first; within a capacity experts go by falling demand, ties by index.

    Args:
        capacities: `(E,)` rows an expert, 0 for cold ones.
        demand: `(E,)` expected load.
        size: most experts a group, `Form.group_size`.

    """
    groups: list[Group] = []
    for capacity in sorted({int(c) for c in capacities if c > 0}, reverse=True):
        members = np.flatnonzero(capacities == capacity)
        members = members[np.argsort(-demand[members], kind="stable")]
        groups += cut([int(e) for e in members], capacity, size)
    return tuple(groups)


def regrouped(groups: tuple[Group, ...], size: int) -> tuple[Group, ...]:
    """The same experts and capacities in the same order, in groups of at most `size`."""
    found: list[Group] = []
    for capacity in dict.fromkeys(group.capacity for group in groups):
        found += cut([e for group in groups if group.capacity == capacity for e in group.experts], capacity, size)
    return tuple(found)


def cut(experts: list[int], capacity: int, size: int) -> list[Group]:
    """Experts of one capacity, in groups of `size` and a last one of what is left."""
    return [Group(tuple(experts[start : start + size]), capacity) for start in range(0, len(experts), size)]
