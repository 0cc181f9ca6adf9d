"""Every activation: mlx-lm's own numbers, as text and back, and as a program. Run: pytest tests/test_activations.py"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import activations as shared
from mlx_lm.models.deepseek_v41 import DeepseekV41SwiGLU
from mlx_lm.models.gemma4_text import GeGLU
from mlx_lm.models.kimi_k3 import SiTU
from mlx_lm.models.muse_spark import PreciseSwiGLU
from mlx_lm.models.step3p5 import ClampedSwiGLU
from mlx_lm.models.switch_layers import SwiGLU, SwitchGLU, SwitchMLP

from expert_programs import HIDDEN, WIDTH, random_expert, reference, relative_error, saved, tiny_spec
from mlx_npumoe.activations import FORMULAS, SILU, Activation
from mlx_npumoe.converters import activations as spelled
from mlx_npumoe.converters import lint
from mlx_npumoe.converters.builder import build_program
from mlx_npumoe.devices.interpreter import InterpreterDevice
from mlx_npumoe.errors import ModelError, ProgramError
from mlx_npumoe.program import ExpertMatrices, ProgramSpec
from mlx_npumoe.sites import find_sites, require_formula

KNOWN = {
    "silu": SwiGLU(),
    "silu of muse_spark": PreciseSwiGLU(),
    "silu of deepseek_v41 without a limit": DeepseekV41SwiGLU(0.0),
    "geglu": GeGLU(),
    "swiglu_oai(alpha=1.702, limit=7.0)": shared.SwigluOAI(),
    "swiglu_oai(alpha=1.5, limit=0.5)": shared.SwigluOAI(1.5, 0.5),
    "swiglu_clamped_before(limit=0.5)": DeepseekV41SwiGLU(0.5),
    "swiglu_clamped_after(limit=0.25)": ClampedSwiGLU(0.25),
    "situ(beta=1.5)": SiTU(1.5),
    "situ_bounded(beta=1.5, linear_beta=2.0)": SiTU(1.5, 2.0),
    "relu2": nn.ReLU2(),
    "gelu_tanh": nn.GELU(approx="precise"),
}
GRID = np.linspace(-12, 12, 401, dtype=np.float32)
EACH = [Activation(name, (1.5, 0.75)[: len(formula.parameters)]) for name, formula in FORMULAS.items()]


def site_of(activation: nn.Module, *, gated: bool = True):  # type: ignore[no-untyped-def]
    cls = SwitchGLU if gated else SwitchMLP
    model = nn.Module()
    model.layers = [cls(8, 16, 2, activation=activation)]
    return next(iter(find_sites(model)))


@pytest.mark.parametrize("name", KNOWN)
def test_formulas_are_mlx_lms(name: str) -> None:
    module = KNOWN[name]
    gated = name.split("(")[0] not in ("relu2", "gelu_tanh")
    site = site_of(module, gated=gated)
    assert site.local_reason is None and str(site.activation) == name.partition(" of ")[0]
    gate, up = (np.broadcast_to(a, (len(GRID), len(GRID))).copy() for a in (GRID[:, None], GRID))
    want = np.array(module(mx.array(up), mx.array(gate)) if gated else module(mx.array(up)))
    for xp in (np, mx):
        got = np.array(site.activation.apply(xp, xp.array(gate) if gated else None, xp.array(up)))
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("activation", "gated"),
    [(nn.Tanh(), True), (nn.GELU(), False), (nn.GELU(approx="fast"), False), (SwiGLU(), False), (nn.ReLU2(), True)],
)
def test_others_stay_local_with_their_name(activation: nn.Module, gated: bool) -> None:
    site = site_of(activation, gated=gated)
    assert site.local_reason == f"activation {site.activation} has no program form yet"


def test_a_class_that_computes_something_else_is_noticed() -> None:
    site = site_of(KNOWN["relu2"], gated=False)
    module = SwitchMLP(8, 16, 2, activation=nn.ReLU2())
    require_formula(module, site.activation)
    module.activation = nn.GELU()
    with pytest.raises(ModelError, match="something else than relu2"):
        require_formula(module, site.activation)


def test_two_tables_have_the_same_entries() -> None:
    assert list(spelled.EMITTERS) == list(FORMULAS)


@pytest.mark.parametrize("activation", EACH, ids=str)
def test_text_and_back(activation: Activation) -> None:
    assert Activation.parse(str(activation)) == activation
    spec = tiny_spec(activation=activation)
    assert ProgramSpec.from_dict(spec.to_dict()) == spec


@pytest.mark.parametrize(
    "text",
    [
        "",
        "elu",
        "silu(limit=1)",
        "situ",
        "situ(beta=nan)",
        "situ(beta=x)",
        "situ(limit=1)",
        "swiglu_oai(alpha=1)",
        "silu) (",
    ],
)
def test_text_that_is_no_activation_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"should give|known activation|not finite|could not convert"):
        Activation.parse(text)


def biased_expert(expert: int, gated: bool) -> ExpertMatrices:
    m = random_expert(expert)
    rng = np.random.default_rng([expert, 1])
    biases = [rng.standard_normal(n).astype(np.float32) for n in (WIDTH, WIDTH, HIDDEN)]
    if not gated:
        return ExpertMatrices(None, m.up, m.down, None, *biases[1:])
    return ExpertMatrices(*m[:3], *biases)


@pytest.fixture(scope="module")
def device() -> Iterator[InterpreterDevice]:
    made = InterpreterDevice()
    yield made
    made.close()


@pytest.mark.parametrize("weights", ["fp16", "int8"])
@pytest.mark.parametrize("activation", EACH, ids=str)
def test_programs_with_biases_compute_the_formula(
    activation: Activation, weights: str, device: InterpreterDevice, tmp_path: Path
) -> None:
    spec = tiny_spec(activation=activation, weights=weights, up_shift=3 if activation.linear else 0)

    def experts(expert: int) -> ExpertMatrices:
        return biased_expert(expert, activation.gated)

    path = saved(spec, tmp_path / "p.mlpackage", experts)
    lint.check(path, spec)
    lease = device.lease(device.load(path, spec))
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal(s.host.shape).astype(np.float16) for s in lease.inputs]
    for surface, x in zip(lease.inputs, inputs, strict=True):
        surface.host[:] = x
    done = device.submit(lease).result(60)
    for i, surface in enumerate(done.outputs):
        want = reference(spec, i, inputs[i], experts)
        assert relative_error(surface.host, want) < (2e-3 if weights == "fp16" else 2e-2)
    lease.retire()


def test_what_is_not_linear_cannot_be_shifted() -> None:
    with pytest.raises(ProgramError, match="not linear"):
        build_program(tiny_spec(activation=Activation("relu2"), up_shift=1), random_expert)


@pytest.mark.parametrize("gated", [True, False])
def test_matrices_have_to_fit_the_activation(gated: bool) -> None:
    spec = tiny_spec(activation=SILU if gated else Activation("relu2"))
    with pytest.raises(ProgramError, match="gate of expert"):
        build_program(spec, lambda e: biased_expert(e, not gated))
