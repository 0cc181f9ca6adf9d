"""What each ML Program operation means, in NumPy.

Two tables: VIEWS rearrange values without touching them, COMPUTES write new ones. A new operation is a new entry in
one of the rooms they come from. Values are float32 arrays; where they are rounded to float16, and in which memory they
lie, is not known here.
"""

from __future__ import annotations

from collections.abc import Callable

from ..converters.mil import Graph, Operation
from .compute import Compute, unknown
from .constants import Constants, is_constant
from .convolution import conv, conv1x1
from .elementwise import ELEMENTWISE
from .views import VIEWS

COMPUTES: dict[str, Callable[[Operation, Graph, Constants], Compute]] = {**ELEMENTWISE, "conv": conv}

__all__ = ["COMPUTES", "VIEWS", "Compute", "Constants", "conv1x1", "is_constant", "unknown"]
