"""Decides which experts go to the device, in which groups and capacities. Knows no device, no model code."""

from .cost import SiteLoads, expert_bytes
from .device_profile import DeviceLimits, DeviceProfile, Figure, RateTable, load_profile
from .groups import Form, pack_groups
from .placement import Placement, place
from .plan import Expectation, Plan, SitePlan, make_plan
from .tiers import ExpectedRows, TierPolicy, choose_capacities, expected

__all__ = [
    "DeviceLimits",
    "DeviceProfile",
    "Expectation",
    "ExpectedRows",
    "Figure",
    "Form",
    "Placement",
    "Plan",
    "RateTable",
    "SiteLoads",
    "SitePlan",
    "TierPolicy",
    "choose_capacities",
    "expected",
    "expert_bytes",
    "load_profile",
    "make_plan",
    "pack_groups",
    "place",
]
