"""Trust in a device: finite outputs, and a circuit breaker after repeated failures."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from ..progress import note

_EXPONENT = np.uint16(0x7C00)  # all ones in float16: inf or NaN


def finite(surface: np.ndarray, hidden: int, rows: Sequence[int]) -> bool:
    """Whether each expert's first `rows[g]` columns of `(G*hidden, C)` float16 hold only finite numbers."""
    bits = surface.view(np.uint16)
    return not any(
        n and ((bits[g * hidden : (g + 1) * hidden, :n] & _EXPONENT) == _EXPONENT).any() for g, n in enumerate(rows)
    )


class Breaker:
    """Opens after `limit` failures in a row; then the device is left alone, with one warning."""

    def __init__(self, device: str, limit: int = 3) -> None:
        self.device = device
        self.limit = limit
        self.open = False
        self.last_reason = ""
        self._in_a_row = 0
        self._lock = threading.Lock()

    def success(self) -> None:
        """A call went well."""
        with self._lock:
            self._in_a_row = 0

    def failure(self, reason: str) -> None:
        """A call failed. The first of the last `limit` in a row to do so opens the breaker."""
        with self._lock:
            self.last_reason = reason
            self._in_a_row += 1
            opened = self._in_a_row >= self.limit and not self.open
            self.open = self.open or opened
        if opened:
            note(
                f"Warning: the {self.device} device is switched off after {self.limit} failures in a row (last: "
                f"{reason}); the experts run locally, output is not affected."
            )
