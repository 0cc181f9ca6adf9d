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
    """Opens after `limit` failures in a row or one hang; then the device is left alone, with one warning."""

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
        """A call failed; the last of `limit` in a row opens the breaker."""
        with self._lock:
            self._in_a_row += 1
            enough = self._in_a_row >= self.limit
        if enough:
            self.trip(f"{self.limit} failures in a row, the last: {reason}")

    def trip(self, reason: str) -> None:
        """Open at once: the device cannot be trusted with another call (a call that hangs blocks its worker)."""
        with self._lock:
            opened = not self.open
            if opened:
                self.open, self.last_reason = True, reason
        if opened:
            note(
                f"Warning: the {self.device} device is switched off ({reason}); the experts run locally, output is "
                "not affected."
            )
