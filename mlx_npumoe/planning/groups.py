"""Groups: hot experts of one capacity that share an input and an output.

Knows sizes and limits, not why experts are hot.
"""

from __future__ import annotations

import numpy as np

from ..errors import PreparedError
from ..program import Group
from .device_profile import DeviceLimits


def group_size(hidden: int, limits: DeviceLimits) -> int:
    """Most experts a group may hold: `min(branches, surface_rows // D)`; 0 where not even one fits."""
    return min(limits.branches, limits.surface_rows // hidden)


def pack_groups(capacities: np.ndarray, demand: np.ndarray, hidden: int, limits: DeviceLimits) -> tuple[Group, ...]:
    """Pack every expert with a capacity into groups.

    A group holds one capacity only (papers 1.2, grouped execution) and neighbours in demand. Larger
    capacities come first; within a capacity experts go by falling demand, ties by index.

    Args:
        capacities: `(E,)` rows an expert, 0 for cold ones.
        demand: `(E,)` expected load.
        hidden: D, rows of a surface an expert takes.
        limits: of the device.

    Raises:
        PreparedError: where one expert alone is over the surface limit.

    """
    size = group_size(hidden, limits)
    if size < 1:
        raise PreparedError(
            f"hidden size {hidden} is over the device's {limits.surface_rows} surface rows; keep this site local"
        )
    groups = []
    for capacity in sorted({int(c) for c in capacities if c > 0}, reverse=True):
        members = np.flatnonzero(capacities == capacity)
        members = members[np.argsort(-demand[members], kind="stable")]
        for start in range(0, len(members), size):
            groups.append(Group(tuple(int(e) for e in members[start : start + size]), capacity))
    return tuple(groups)
