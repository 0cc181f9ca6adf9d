"""Every family of mlx-lm with expert layers, through the exactness harness. Run: pytest tests/test_families.py"""

from __future__ import annotations

from pathlib import Path

import pytest

import families
from family_runs import SHAPES, run_family
from mlx_npumoe.activations import Activation


@pytest.mark.parametrize("name", [*families.FAMILIES, *families.WRAPPERS])
def test_an_attached_family_is_stock_with_its_experts_on_the_device(name: str, tmp_path: Path) -> None:
    outcome = run_family(name, tmp_path)
    assert outcome.error < 2e-3
    assert outcome.reasons == [None] * len(outcome.reasons) and len(outcome.reasons) >= 2
    for launches in outcome.launches:
        assert launches == dict(zip(SHAPES, (0, 1, 2, 1), strict=True))
    assert all(Activation.parse(a) for a in outcome.activations)


def test_every_file_with_switch_layers_is_here_or_has_its_reason() -> None:
    known = {*families.FAMILIES, *families.UNSUPPORTED}
    assert set(families.switch_files()) - {"switch_layers"} <= known
    assert len(families.UNSUPPORTED) <= 3
