"""Second devices that run expert programs: the interpreter on any machine, the null device to measure our own cost."""

from __future__ import annotations

import sys

from ..errors import UsageError
from .base import ExpertDevice

DEVICES = ("auto", "interpreter", "off")


def resolve(name: str) -> str | None:
    """The device a name stands for on this machine, None for none.

    `auto` is the best this version has: on macOS none, since the GPU is faster than the interpreter and the Neural
    Engine is not driven yet.

    Raises:
        UsageError: no such device.
    """
    if name not in DEVICES:
        raise UsageError(f"device={name!r} is not known; choose from {', '.join(DEVICES)}.")
    if name == "auto":
        return None if sys.platform == "darwin" else "interpreter"
    return None if name == "off" else name


def open_device(name: str) -> ExpertDevice | None:
    """The device of that name, as `resolve` understands it. Raises UsageError for no such device."""
    if resolve(name) is None:
        return None
    from .interpreter import InterpreterDevice

    return InterpreterDevice()
