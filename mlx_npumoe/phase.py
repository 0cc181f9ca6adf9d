"""What the experts cannot see for themselves: that a generation loop is running, and which rows are padding.

Our generate, stream and batch loops set this around each step; a bare model call sees the defaults, so every site is
offloaded there. State is per thread, as the loops are.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Phase:
    """What a loop is doing.

    `generating`: only caches of a chunk are evaluated. `decoding`: each sequence brings one token. `valid`: `(B, T)`
    bool, False where a row is padding. `unpadded`: the loop knows that no row is.
    """

    generating: bool = False
    decoding: bool = False
    valid: mx.array | None = None
    unpadded: bool = False


_BARE = Phase()
_state = threading.local()


def current() -> Phase:
    """The phase of this thread."""
    return getattr(_state, "phase", _BARE)


@contextmanager
def phase(
    *, generating: bool = False, decoding: bool = False, valid: mx.array | None = None, unpadded: bool = False
) -> Iterator[None]:
    """Set the phase of this thread for the length of a block."""
    before = current()
    _state.phase = Phase(generating, decoding, valid, unpadded)
    try:
        yield
    finally:
        _state.phase = before
