"""A progress bar with rate and time left on stderr; silent when stderr is no terminal or `quiet` is asked for."""

from __future__ import annotations

import sys
import time

_quiet = False


def set_quiet(quiet: bool) -> None:
    """Silence bars and notes of this process (`--quiet`)."""
    global _quiet
    _quiet = quiet


class Progress:
    """Counts work done. Use as a context manager."""

    def __init__(self, what: str, total: int, unit: str = "", *, show: bool = True) -> None:
        self.what, self.total, self.unit = what, max(total, 1), unit
        self.done = 0
        self._show = show and not _quiet and sys.stderr.isatty()
        self._start = time.monotonic()
        self._drawn = 0.0

    def __enter__(self) -> Progress:
        """Start the clock."""
        self._draw()
        return self

    def __exit__(self, *exc: object) -> None:
        """Clear the line."""
        if self._show:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def advance(self, n: int = 1) -> None:
        """`n` more units are done."""
        self.done += n
        if time.monotonic() - self._drawn > 0.1 or self.done >= self.total:
            self._draw()

    def _draw(self) -> None:
        if not self._show:
            return
        self._drawn = now = time.monotonic()
        rate = self.done / max(now - self._start, 1e-9)
        left = (self.total - self.done) / rate if self.done else 0.0
        filled = min(24, 24 * self.done // self.total)
        bar = "#" * filled + "." * (24 - filled)
        print(
            f"\r\033[K{self.what} [{bar}] {self.done}/{self.total} {self.unit} {rate:.1f}/s {left:.0f} s left",
            end="",
            file=sys.stderr,
            flush=True,
        )


def note(text: str) -> None:
    """One line on stderr, terminal or not."""
    if not _quiet:
        print(text, file=sys.stderr, flush=True)
