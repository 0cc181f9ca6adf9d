"""Demo models that need no download from a hub: names a user can give instead of a model's path."""

from __future__ import annotations

from ..errors import ModelError

PREFIX = "demo:"
DEMOS = {
    "demo:smollm2": "2of4",
    "demo:smollm2-8of8": "8of8",
    "demo:smollm2-dense": "dense",
}


def resolve(model: str, progress: bool = True) -> str:
    """The folder of a demo model, built on first use with a note on stderr; any other model name as it is.

    Raises:
        ModelError: the demo is unknown or cannot be built.
    """
    if not model.startswith(PREFIX):
        return model
    if model not in DEMOS:
        raise ModelError(f"There is no demo model {model!r}; use one of {', '.join(DEMOS)}.")
    from .smollm2 import build

    return str(build(DEMOS[model], progress=progress))
