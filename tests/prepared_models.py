"""Tiny models with a Prepared folder each, made once a test session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.nn as nn

import mlx_npumoe
import tiny_models
from mlx_npumoe.planning.plan import Plan
from mlx_npumoe.preparation import plan_for, prepare
from mlx_npumoe.prepared import Prepared
from mlx_npumoe.tensors import site_weights

CHUNK = 512
MIN_CHUNK = 32


@dataclass(frozen=True)
class Made:
    """A tiny model: its folder, what was prepared of it, and a loaded stock copy shared by tests."""

    family: str
    folder: Path
    prepared: Prepared
    model: nn.Module


Maker = Callable[..., Made]


def maker(root: Path) -> Maker:
    """A function `(family, bits=None, weights="fp16")` that makes each tiny model once."""

    @cache
    def stock(family: str, bits: int | None) -> tuple[Path, nn.Module]:
        model = tiny_models.build(family, quantize=bits)
        return tiny_models.save(model, root / f"{family}-{bits}", family, quantize=bits), model

    @cache
    def make(family: str, bits: int | None = None, weights: str = "fp16") -> Made:
        folder, model = stock(family, bits)
        return Made(family, folder, prepare_all_hot(folder, root / f"{folder.name}-{weights}", weights), model)

    return make


def prepare_all_hot(
    folder: Path, out: Path, weights: str = "fp16", change: Callable[[Plan], Plan] = lambda plan: plan, **form: Any
) -> Prepared:
    """Prepare a tiny model with every expert that has load on the device, whatever the cost rule says of its size.

    `form` goes to `plan_for`.
    """
    name = str(folder)
    profile = mlx_npumoe.calibrate(name, max_tokens=1536, sequence=CHUNK, progress=False)
    sites = [w.site for w in site_weights(name)[1]]
    plan = plan_for(profile, sites, chunk=CHUNK, weights=weights, hot="all", min_chunk=MIN_CHUNK, **form)
    return prepare(name, profile=profile, plan=change(plan), out=out, progress=False)
