"""Shared fixtures. Tests use no network and keep their cache to themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import replay
from mlx_npumoe import progress
from prepared_models import Maker, maker


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """`(family, bits=None, weights="fp16")` to a tiny model with its Prepared folder; made once a session."""
    return maker(tmp_path_factory.mktemp("models"))


@pytest.fixture
def replay_router() -> Callable[..., replay.Run]:
    """`(model, forward, stock=None)`: run with the routers watched, their outputs replayed from a stock run."""
    return replay.run


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own for every test."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("MLX_NPUMOE_CACHE", str(cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(progress, "_quiet", False)  # a command run with --quiet in this process sets it for good
    return cache
