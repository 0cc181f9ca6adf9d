"""Run Mixture-of-Experts models on Apple Silicon with MLX and a second device: the package's public face.

Names are imported on first use, so that light commands stay light. No module may share a name with one of them:
importing it would put the module where the function is expected.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import NpumoeError
    from .generation import batch_generate, generate, load, stream_generate
    from .preparation import prepare
    from .prepared import Prepared
    from .recording import RoutingLog, calibrate
    from .report import Report
    from .runtime import Engine, attach, detach, engine

_HOME = {
    "Engine": "runtime",
    "attach": "runtime",
    "detach": "runtime",
    "engine": "runtime",
    "NpumoeError": "errors",
    "batch_generate": "generation",
    "generate": "generation",
    "load": "generation",
    "stream_generate": "generation",
    "RoutingLog": "recording",
    "calibrate": "recording",
    "prepare": "preparation",
    "Prepared": "prepared",
    "Report": "report",
}
__all__ = [
    "Engine",
    "NpumoeError",
    "Prepared",
    "Report",
    "RoutingLog",
    "attach",
    "batch_generate",
    "calibrate",
    "detach",
    "engine",
    "generate",
    "load",
    "prepare",
    "stream_generate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value
