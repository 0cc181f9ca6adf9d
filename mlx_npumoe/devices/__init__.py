"""Second devices that run expert programs: the interpreter on any machine, the null device to measure our own cost."""

from __future__ import annotations

import sys

from ..errors import UsageError
from .base import ExpertDevice

DEVICES = ("auto", "interpreter", "off")


def open_device(name: str) -> ExpertDevice | None:
    """The device of that name, None for `off`. `auto` is the best this version has on this machine.

    Raises:
        UsageError: no such device.
    """
    if name == "off":
        return None
    if name == "auto" and sys.platform == "darwin":
        return None  # the GPU is faster than the interpreter, and the Neural Engine is not driven by this version
    if name in ("auto", "interpreter"):
        from .interpreter import InterpreterDevice

        return InterpreterDevice()
    raise UsageError(f"device={name!r} is not known; choose from {', '.join(DEVICES)}.")
