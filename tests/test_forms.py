"""Programs of every body and layout, and of several functions, from emission to an attached model.

Run: pytest tests/test_forms.py, the long ones by make soak-families
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import families
import mlx_npumoe
from expert_programs import (
    HIDDEN,
    WIDTH,
    exact_expert,
    mil_program,
    random_expert,
    reference,
    relative_error,
    saved,
    tiny_spec,
)
from family_runs import SHAPES, run_family
from mlx_npumoe import preparation
from mlx_npumoe.__main__ import run as command
from mlx_npumoe.activations import Activation
from mlx_npumoe.converters import package
from mlx_npumoe.converters.builder import build_functions, build_program
from mlx_npumoe.converters.lint import Finding, check, lint
from mlx_npumoe.converters.mil import describe, function_names, load_graph, read_spec
from mlx_npumoe.devices.dataflow import Dataflow
from mlx_npumoe.devices.interpreter import Emulation, InterpreterDevice
from mlx_npumoe.devices.null import NullDevice
from mlx_npumoe.devices.tasks import Scratch
from mlx_npumoe.devices.ungroup import ungrouped
from mlx_npumoe.devices.worker import Team
from mlx_npumoe.errors import DeviceError, PreparedError, ProgramError, UsageError
from mlx_npumoe.machine import device_profile
from mlx_npumoe.planning import DeviceLimits, DeviceProfile, Form, Plan
from mlx_npumoe.planning.groups import regrouped
from mlx_npumoe.prepared import MANIFEST, PLAN, PROFILE, Prepared
from mlx_npumoe.program import BODIES, LAYOUTS, WEIGHT_FORMATS, ExpertMatrices, Group, ProgramSpec
from mlx_npumoe.routing import SlotTable, assign, combine, pack
from prepared_models import Maker, prepare_all_hot
from replay import per_token_error, run

GOLDEN = Path(__file__).parent / "golden"
FORMS = list(product(BODIES, LAYOUTS))
WEIGHTS = "Data/com.apple.CoreML/weights/weight.bin"
BIASED = Activation("swiglu_oai", (1.702, 7.0))


def biased_expert(expert: int) -> ExpertMatrices:
    """With biases of the size of the products."""
    rng = np.random.default_rng([expert, 1])
    sizes = (WIDTH, WIDTH, HIDDEN)
    return ExpertMatrices(*random_expert(expert)[:3], *(rng.standard_normal(n).astype(np.float32) for n in sizes))


def ungated_expert(expert: int) -> ExpertMatrices:
    """Without a gate matrix."""
    return random_expert(expert)._replace(gate=None)


EXPERTS = {
    "gated": (random_expert, {"up_shift": 2}),
    "biased": (biased_expert, {"activation": BIASED}),
    "biased, shifted": (biased_expert, {"up_shift": 1}),
    "ungated": (ungated_expert, {"activation": Activation("relu2")}),
}


@pytest.fixture
def device() -> Iterator[InterpreterDevice]:
    made = InterpreterDevice()
    yield made
    made.close()


def outputs(
    device: InterpreterDevice, path: Path, spec: ProgramSpec, xs: list[np.ndarray], function: str = "main"
) -> list[np.ndarray]:
    """Outputs of a program, one `(n*D, C)` a port."""
    lease = device.lease(device.load(path, spec, function))
    for surface, x in zip(lease.inputs, xs, strict=True):
        surface.host[:] = x
    done = device.submit(lease).result(30)
    found = [surface.host.copy() for surface in done.outputs]
    lease.retire()
    return found


def inputs(spec: ProgramSpec, seed: int = 0) -> list[np.ndarray]:
    """Inputs `(G*D, C)` of each group."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((len(g.experts) * spec.hidden, g.capacity)).astype(np.float16) for g in spec.groups]


def by_port(spec: ProgramSpec, groups: list[np.ndarray]) -> list[np.ndarray]:
    """What belongs to each group, port by port."""
    if spec.body != "separate":
        return groups
    return [part for g, x in zip(spec.groups, groups, strict=True) for part in np.split(x, len(g.experts))]


# --------------------------------------------------------------------------------------------------- contract, builder


@pytest.mark.parametrize("body", BODIES)
def test_ports_cover_the_slots_in_order(body: str) -> None:
    spec = tiny_spec(((3, 1), 32), ((7,), 64), body=body)
    names = {"separate": ["x0_e3", "x0_e1", "x1_e7"]}.get(body, ["x0", "x1"])
    assert [p.input for p in spec.ports] == names
    assert [p.output for p in spec.ports] == [name.replace("x", "y", 1) for name in names]
    assert tuple(e for p in spec.ports for e in p.experts) == spec.experts
    assert sum(p.slots for p in spec.ports) == spec.rows
    assert [p.shape for p in spec.ports] == [(1, len(p.experts) * HIDDEN, 1, p.capacity) for p in spec.ports]
    assert spec.ports[-1].group == 1 and spec.ports[-1].capacity == 64
    apart = replace(spec, layout="groups")
    assert spec.programs == (spec,) and [p.groups for p in apart.programs] == [(g,) for g in spec.groups]
    assert [(p.experts, p.shape) for p in apart.ports] == [
        (q.experts, q.shape) for p in apart.programs for q in p.ports
    ]
    assert ProgramSpec.from_dict(json.loads(json.dumps(apart.to_dict()))) == apart


@pytest.mark.parametrize(("body", "layout"), FORMS)
def test_emitted_programs_are_the_golden_ones(tmp_path: Path, body: str, layout: str) -> None:
    """Delete the file in tests/golden and run again to accept a change."""
    spec = ProgramSpec(
        64, 32, (Group((2, 5, 1), 32), Group((0,), 64)), weights="int8", up_shift=1, body=body, layout=layout
    )
    texts = [
        describe(load_graph(saved(program, tmp_path / f"{i}.mlpackage", exact_expert)))
        for i, program in enumerate(spec.programs)
    ]
    text = "".join(f"program {i}\n{text}" for i, text in enumerate(texts))
    golden = GOLDEN / f"form-{body}-{layout}.txt"
    if not golden.exists():
        golden.write_text(text)
        pytest.fail(f"{golden.name} did not exist and was written: look at it and run again")
    assert text == golden.read_text()


@pytest.mark.parametrize("weights", ["fp16", "int8"])
@pytest.mark.parametrize("kind", EXPERTS)
def test_every_form_computes_the_same_bits(kind: str, weights: str, tmp_path: Path, device: InterpreterDevice) -> None:
    experts, options = EXPERTS[kind]
    plain = tiny_spec(((3, 1, 4), 32), ((7,), 64), weights=weights, **options)
    xs = inputs(plain)
    want = outputs(device, saved(plain, tmp_path / "plain.mlpackage", experts), plain, xs)
    for i, x in enumerate(xs):
        assert relative_error(want[i], reference(plain, i, x, experts)) < (2e-3 if weights == "fp16" else 3e-2)
    for body, layout in FORMS[1:]:
        site = replace(plain, body=body, layout=layout)
        found: list[np.ndarray] = []
        given = iter(by_port(site, xs))
        for i, spec in enumerate(site.programs):
            path = saved(spec, tmp_path / f"{body}-{layout}-{i}.mlpackage", experts)
            check(path, spec)
            found += outputs(device, path, spec, [next(given) for _ in spec.ports])
        for got, expected in zip(found, by_port(site, want), strict=True):
            np.testing.assert_array_equal(got, expected, err_msg=f"{body}, {layout}")


@pytest.mark.parametrize("body", ["grouped", "separate"])
def test_experts_are_asked_for_once_and_in_slot_order(body: str) -> None:
    asked: list[int] = []

    def experts(expert: int) -> ExpertMatrices:
        asked.append(expert)
        return random_expert(expert)

    build_program(tiny_spec(((5, 2), 32), ((9,), 64), body=body), experts)
    assert asked == [5, 2, 9]


def test_forms_are_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from test_forms import *;"
        "[saved(tiny_spec(body=b, weights='int8'), Path(sys.argv[1]) / f'{b}.mlpackage') for b in BODIES];"
        "several(Path(sys.argv[1]) / 'functions.mlpackage', body='grouped', weights='int8')"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], env=environment, stderr=subprocess.PIPE)
    mine = tmp_path / "mine"
    for body in BODIES:
        saved(tiny_spec(body=body, weights="int8"), mine / f"{body}.mlpackage")
    several(mine / "functions.mlpackage", body="grouped", weights="int8")
    assert done.communicate() == (None, b"") and done.returncode == 0
    packages = sorted(mine.iterdir())
    assert len(packages) == 4
    for one in packages:
        other = tmp_path / one.name
        files = [p.relative_to(one) for p in one.rglob("*") if p.is_file() and p.name != package.MANIFEST]
        assert len(files) == 2 and package.content_sha256(one) == package.content_sha256(other)
        assert all((one / name).read_bytes() == (other / name).read_bytes() for name in files)


# --------------------------------------------------------------------------------------------------- several functions

CAPACITIES = (32, 64, 96)


def functions_of(body: str = "split", **options: Any) -> dict[str, ProgramSpec]:
    """A spec for each of three capacities of the first group."""
    return {f"c{c}": tiny_spec(((3, 1, 4), c), ((7,), 32), body=body, **options) for c in CAPACITIES}


def several(path: Path, experts: Callable[[int], ExpertMatrices] = random_expert, **options: Any) -> Path:
    """A package of three functions."""
    return package.write_package(build_functions(functions_of(**options), experts), path, release=True)


@pytest.mark.parametrize("weights", WEIGHT_FORMATS)
@pytest.mark.parametrize("body", BODIES)
def test_functions_share_their_weights_and_compute_what_single_programs_do(
    body: str, weights: str, tmp_path: Path, device: InterpreterDevice
) -> None:
    asked: list[int] = []

    def experts(expert: int) -> ExpertMatrices:
        asked.append(expert)
        return biased_expert(expert)

    specs = functions_of(body, activation=BIASED, weights=weights)
    path = several(tmp_path / "all.mlpackage", experts, body=body, activation=BIASED, weights=weights)
    assert asked == [3, 1, 4, 7]
    assert function_names(path) == tuple(specs) and lint(path, specs) == []
    described = read_spec(path)
    assert described.description.defaultFunctionName == "c32" and described.specificationVersion == 9  # macOS 15
    for name, spec in specs.items():
        alone = saved(spec, tmp_path / f"{name}.mlpackage", biased_expert)
        sizes = [(p / WEIGHTS).stat().st_size for p in (path, alone)]
        if weights.startswith("lut"):  # macOS 15's operation takes the codes in a type of their own
            assert abs(sizes[0] - sizes[1]) < 0.05 * sizes[1]
        else:
            assert (alone / WEIGHTS).read_bytes() == (path / WEIGHTS).read_bytes()  # each blob is there once
            assert load_graph(path, name).weight_bytes == load_graph(alone).weight_bytes
        assert package.stored_spec(path, name) == spec.to_dict() == package.stored_spec(alone)
        xs = by_port(spec, inputs(spec))
        loaded = device.load(path, spec, name)
        assert (loaded.function, loaded.spec) == (name, spec)
        for got, want in zip(outputs(device, path, spec, xs, name), outputs(device, alone, spec, xs), strict=True):
            np.testing.assert_array_equal(got, want)


def test_functions_that_do_not_belong_together_are_refused(tmp_path: Path, device: InterpreterDevice) -> None:
    a, b = tiny_spec(), tiny_spec(weights="fp16")
    for specs, message in (
        ({}, "at least one"),
        ({"a": a, "b": b}, "functions a and b .* differ"),
        ({"a": a, "b": tiny_spec(((1, 3), 32), ((7,), 64))}, "differ"),
        ({"1": a}, "cannot be called"),
        ({"a": replace(a, layout="groups")}, "a program of its own"),
    ):
        with pytest.raises(ProgramError, match=message) as error:
            build_functions(specs, random_expert)
        assert "\n" not in str(error.value)
    path = several(tmp_path / "all.mlpackage")
    specs = functions_of()
    with pytest.raises(DeviceError, match=r"no.*'main'|function 'main'"):
        device.load(path, specs["c32"])
    with pytest.raises(DeviceError, match="has the ports"):
        device.load(path, specs["c64"], "c32")
    with pytest.raises(ProgramError, match="c32, c64, c96, not main"):
        package.stored_spec(path)
    assert NullDevice().load(path, specs["c64"], "c64").function == "c64"


def test_each_function_is_linted_and_named(tmp_path: Path) -> None:
    path = several(tmp_path / "all.mlpackage")
    wrong = {**functions_of(), "c64": functions_of()["c96"]}
    assert {(f.rule, f.where) for f in lint(path, wrong)} == {("ports", "c64/x0"), ("ports", "c64/y0")}
    missing = {"c32": functions_of()["c32"], "c128": tiny_spec()}
    assert {(f.rule, f.where) for f in lint(path, missing)} == {("functions", n) for n in ("c64", "c96", "c128")}
    bad = {"c40": tiny_spec(((1,), 40))}
    assert {(f.rule, f.where) for f in lint(build_functions(bad, random_expert), bad)} == {
        ("columns", "c40/x0"),
        ("columns", "c40/y0"),
    }


# ---------------------------------------------------------------------------------------------------------------- lint


def found(spec: ProgramSpec, wanted: ProgramSpec) -> list[Finding]:
    return lint(build_program(spec, random_expert), wanted)


def test_a_program_of_another_body_is_found() -> None:
    for body, other in product(BODIES, BODIES):
        spec = tiny_spec(((3, 1), 32), ((7,), 64), body=body)
        rules = {f.rule for f in found(spec, replace(spec, body=other))}
        assert rules == (set() if body == other else {"form", "ports"} if "separate" in (body, other) else {"form"})
    alone = tiny_spec(((3,), 32), body="split")
    assert found(alone, replace(alone, body="grouped")) == []  # one expert: the same program


def chain(cut: int, axis: int, join: int, groups: int) -> Callable[..., Any]:
    """A program with a convolution of its input in parts that is no body of ours."""

    def body(mb: Any, x: Any) -> Any:
        weight = np.ones((64 // cut, 64 // cut // groups, 1, 1), np.float16)
        parts = mb.split(x=x, num_splits=cut, axis=axis, name="cut") if cut > 1 else [x]
        shaped = [mb.reshape(x=p, shape=(1, 64 // cut, 1, -1)) for p in parts]
        rows = [mb.conv(x=p, weight=weight, groups=groups, name=f"conv{i}") for i, p in enumerate(shaped)]
        return mb.concat(values=rows, axis=join, name="y0") if len(rows) > 1 else mb.relu(x=rows[0], name="y0")

    return body


def test_splits_concats_and_groups_have_to_be_the_bodys() -> None:
    spec = ProgramSpec(16, 16, (Group((0, 1, 2, 3), 32),), activation=Activation("relu2"))

    def rules(body: Callable[..., Any], shape: tuple[int, ...] = (1, 64, 1, 32), form: str = "split") -> set[str]:
        return {f.where for f in lint(mil_program(body, shape), replace(spec, body=form)) if f.rule == "form"}

    assert rules(chain(4, 1, 1, 1)) == set()
    assert rules(chain(2, 1, 1, 1)) == {"cut", "y0"}  # in halves where there are four experts
    assert rules(chain(4, 2, 1, 1), (1, 16, 4, 32)) == {"cut"}  # of another axis
    assert rules(chain(4, 1, 2, 1)) == {"y0"}
    assert rules(chain(4, 1, 1, 2)) == {"conv0"}  # grouped inside a branch
    assert rules(chain(1, 1, 1, 4), form="grouped") == {"conv0"}  # one of two convolutions
    assert rules(chain(1, 1, 1, 2), form="grouped") == {"conv0"}
    assert rules(chain(4, 1, 1, 1), form="separate") == {"cut", "y0"}


def test_more_groups_than_the_engine_likes_are_found() -> None:
    findings = lint(mil_program(chain(1, 1, 1, 16), (1, 64, 1, 32)))
    assert [(f.rule, f.where) for f in findings] == [("groups", "conv0")]
    model = mil_program(chain(1, 1, 1, 4), (1, 64, 1, 32))
    block = model._spec.mlProgram.functions["main"].block_specializations["CoreML6"]
    conv = next(op for op in block.operations if op.type == "conv")
    for op in block.operations:
        if op.outputs[0].name == conv.inputs["groups"].arguments[0].name:
            op.attributes["val"].immediateValue.tensor.ints.values[0] = 5  # coremltools itself refuses to build it
    assert [(f.rule, f.where) for f in lint(model)] == [("groups", "conv0")]


# ------------------------------------------------------------------------------------------------- grouped convolutions


def run_graph(model: Any, *xs: np.ndarray) -> tuple[list[np.ndarray], Dataflow]:
    flow = Dataflow(ungrouped(load_graph(model)))
    ys = [np.full(flow.shape(p.name), 99, np.float16) for p in flow.graph.outputs]
    team = Team([Scratch(), Scratch()], "test")
    flow.run(xs, ys, team)
    team.close()
    return ys, flow


def grouped_product(x: np.ndarray, weight: np.ndarray, groups: int) -> np.ndarray:
    """`(1, groups*in, 1, C)` and `(groups*out, in, 1, 1)` in float32, rounded to float16."""
    parts = np.split(x[0, :, 0].astype(np.float32), groups)
    matrices = np.split(weight[:, :, 0, 0].astype(np.float32), groups)
    return np.concatenate([m @ p for m, p in zip(matrices, parts, strict=True)])[None, :, None].astype(np.float16)


def test_grouped_convolutions_become_branches_only_where_they_may() -> None:
    """Values used whole, used twice, combined with a value in other parts, and convolved in other groups."""
    rng = np.random.default_rng(0)
    four, two = (rng.standard_normal(s).astype(np.float16) for s in ((64, 16, 1, 1), (64, 32, 1, 1)))
    x = rng.standard_normal((1, 64, 1, 32)).astype(np.float16)
    row = rng.standard_normal((1, 64, 1, 1)).astype(np.float16)

    def body(mb: Any, x: Any) -> list[Any]:
        a = mb.relu(x=mb.conv(x=x, weight=four, groups=4), name="a")  # in four, an output, read again
        b = mb.conv(x=a, weight=two, groups=2)  # in two
        c = mb.mul(x=b, y=mb.const(val=row), name="c")  # a constant with channels
        d = mb.add(x=a, y=b, name="d")  # four parts and two
        e = mb.mul(x=a, y=mb.conv(x=x, weight=four, groups=4), name="e")  # four and four
        return [a, c, d, e]

    (a, c, d, e), flow = run_graph(mil_program(body, x.shape), x)
    first = grouped_product(x, four, 4)
    want_a = np.maximum(first, 0)
    want_b = grouped_product(want_a, two, 2)
    for got, want in ((a, want_a), (c, want_b * row), (d, want_a + want_b), (e, want_a * first)):
        np.testing.assert_allclose(got.astype(np.float32), want.astype(np.float32), rtol=2e-3, atol=2e-3)
    assert len(flow.stages) > 1 and max(len(stage) for stage in flow.stages) == 4


def test_a_grouped_program_runs_in_as_many_branches_as_a_split_one() -> None:
    spec = tiny_spec((tuple(range(8)), 32), weights="int8")
    widest = []
    for body in ("split", "grouped"):
        model = build_program(replace(spec, body=body), random_expert)
        flow = Dataflow(ungrouped(load_graph(model)))
        widest.append([sorted(len(task.steps) for task in stage) for stage in flow.stages])
        assert flow.nbytes == 4 * 8 * 3 * HIDDEN * WIDTH
    assert widest[0] == widest[1] and max(map(len, widest[0])) == 8


def test_graphs_without_grouped_convolutions_are_left_alone() -> None:
    graph = load_graph(build_program(tiny_spec(), random_expert))
    assert ungrouped(graph) is graph


# ------------------------------------------------------------------------------------------------------------ planning


def test_group_sizes_of_each_form() -> None:
    limits = DeviceLimits(program_bytes=1000)
    cases = [
        (Form(), (2048, 768), 8),
        (Form(), (4096, 14336), 4),  # surface rows
        (Form(body="separate"), (4096, 14336), 8),  # surfaces of their own
        (Form(body="grouped"), (2048, 768), 8),
        (Form(body="grouped"), (2048, 14336), 4),  # channels inside
        (Form(body="grouped"), (64, 70000), 1),  # one expert is a dense convolution
        (Form("groups"), (64, 32), 3),  # bytes of a program
        (Form("groups", "separate"), (64, 32), 3),
        (Form(body="separate"), (16385, 32), 0),
    ]
    for form, (hidden, width), size in cases:
        assert form.group_size(hidden, width, limits, 300) == size, form
    capacities = np.array([32, 0, 64, 32, 32, 0, 64])
    assert Form().programs(capacities, 2) == 1 and Form("groups").programs(capacities, 2) == 3
    assert Form().programs(np.zeros(4, int), 2) == Form("groups").programs(np.zeros(4, int), 2) == 0


def profile_with(**limits: int) -> DeviceProfile:
    profile = device_profile()
    return replace(profile, limits=replace(profile.limits, **limits))


def plan_of(prepared: Prepared, **options: Any) -> Plan:
    """Every expert that has load, from what `prepared` saw."""
    from mlx_npumoe.calibration import RoutingProfile
    from mlx_npumoe.tensors import site_weights

    sites = [w.site for w in site_weights(prepared.model)[1]]
    profile = RoutingProfile.load(prepared.folder / PROFILE)
    return preparation.plan_for(profile, sites, **{"chunk": 512, "hot": "all", "min_chunk": 32, **options})


def test_limits_hold_for_each_program(tiny: Maker) -> None:
    prepared = tiny("qwen3_moe").prepared
    unit = 3 * 64 * 64 + 2 * (2 * 64 + 64) + 8192  # an int8 expert in a package
    small = profile_with(program_bytes=2 * unit)
    with pytest.raises(UsageError, match="use the layout groups"):
        plan_of(prepared, device=small)
    plan = plan_of(prepared, device=small, layout="groups")
    assert plan.programs == sum(len(s.spec.groups) for s in plan.sites if s.spec) >= 4 * 3
    assert all(1 <= len(p.experts) <= 2 and len(p.groups) == 1 for s in plan.sites for p in s.programs)
    assert f"in {plan.programs} programs" in plan.explain() and "layout groups" in plan.explain()
    with pytest.raises(UsageError, match=f"{plan.programs} programs"):
        plan_of(prepared, device=profile_with(program_bytes=2 * unit, programs=plan.programs - 1), layout="groups")
    assert Plan.from_json(plan.to_json()) == plan


def test_every_program_costs_a_launch_and_the_programs_of_all_sites_are_limited(tiny: Maker) -> None:
    prepared = tiny("qwen3_moe").prepared
    slow = profile_with(branches=1)
    one, each = plan_of(prepared, device=slow), plan_of(prepared, device=slow, layout="groups")
    launch = slow.launch_s.value
    for a, b in zip(one.sites, each.sites, strict=True):
        assert b.expected.device_s - a.expected.device_s == pytest.approx((len(b.programs) - 1) * launch)
    fast = replace(profile_with(branches=1, programs=5), launch_s=replace(slow.launch_s, value=0.0))
    fast = replace(fast, device_rate=replace(fast.device_rate, gflops=tuple(1e6 for _ in fast.device_rate.gflops)))
    fast = replace(fast, join_s=replace(fast.join_s, value=0.0))
    limited = plan_of(prepared, device=fast, layout="groups", hot="auto", min_chunk=None)
    assert 1 <= limited.programs <= 5
    assert plan_of(prepared, device=fast, hot="auto", min_chunk=None).programs == 3


def test_a_plan_takes_another_form(tiny: Maker) -> None:
    plan = tiny("qwen3_moe").prepared.plan
    assert plan.in_form() == plan
    for body, layout in FORMS:
        made = plan.in_form(layout, body)
        assert (made.layout, made.body) == (layout, body)
        assert Plan.from_json(made.to_json()) == made
        for was, now in zip(plan.sites, made.sites, strict=True):
            assert now.spec is not None and was.spec is not None
            assert dict(zip(now.spec.experts, now.spec.capacities, strict=True)) == dict(
                zip(was.spec.experts, was.spec.capacities, strict=True)
            )
    with pytest.raises(UsageError, match="layout 'rows' is unknown"):
        plan.in_form("rows")
    tight = replace(plan, limits=replace(plan.limits, programs=3, branches=1))
    with pytest.raises(UsageError, match="over the device's 3"):
        tight.in_form("groups")
    with pytest.raises(UsageError, match="keep the plan's layout"):
        replace(plan, limits=replace(plan.limits, program_bytes=60000)).in_form("layer")


# ---------------------------------------------------------------------------------------------------------- end to end


@pytest.mark.parametrize(("body", "layout"), FORMS)
def test_pack_and_combine_follow_the_ports(body: str, layout: str) -> None:
    rng = np.random.default_rng(0)
    spec = ProgramSpec(8, 8, (Group((2, 0), 32), Group((3,), 64)), body=body, layout=layout)
    table = SlotTable.of(spec, 5)
    x, indices = rng.standard_normal((40, 8)).astype(np.float16), rng.integers(0, 5, (40, 2))
    assignment = assign(mx.array(indices), table)
    packed = pack(mx.array(x), assignment, table)
    assert [p.shape for p in packed] == [(p.channels, p.capacity) for p in spec.ports]
    doubled = [p * 2 for p in packed]
    n = assignment.split(table).n_local
    local = 2 * mx.array(x)[assignment.local_token[:n]]
    out = combine(doubled, local, assignment, table, (40, 2, 8), mx.float16)
    np.testing.assert_array_equal(np.array(out), np.repeat(2 * x[:, None], 2, axis=1))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "nemotron_h"])
@pytest.mark.parametrize(("body", "layout"), FORMS[1:])
def test_an_attached_family_is_stock_in_every_form(name: str, body: str, layout: str, tmp_path: Path) -> None:
    outcome = run_family(name, tmp_path, body=body, layout=layout, device=profile_with(branches=2))
    assert outcome.error < 2e-3
    assert outcome.reasons == [None] * len(outcome.reasons) and len(outcome.reasons) >= 2
    assert all(n == 1 for n in outcome.programs) if layout == "layer" else min(outcome.programs) > 1
    for launches, programs in zip(outcome.launches, outcome.programs, strict=True):
        assert launches == dict(zip(SHAPES, (0, programs, 2 * programs, programs), strict=True))


@pytest.mark.soak
@pytest.mark.parametrize("weights", ["fp16", "int8"])
@pytest.mark.parametrize(("body", "layout"), FORMS)
@pytest.mark.parametrize("name", [*families.FAMILIES, *families.WRAPPERS])
def test_every_family_in_every_form(name: str, body: str, layout: str, weights: str, tmp_path: Path) -> None:
    outcome = run_family(name, tmp_path, weights=weights, body=body, layout=layout, device=profile_with(branches=2))
    assert outcome.error < (2e-3 if weights == "fp16" else 6e-2)
    assert outcome.reasons == [None] * len(outcome.reasons)
    for launches, programs in zip(outcome.launches, outcome.programs, strict=True):
        assert launches == dict(zip(SHAPES, (0, programs, 2 * programs, programs), strict=True))


def in_pairs(plan: Plan) -> Plan:
    """Layout groups with at most two experts a program."""
    plan = plan.in_form("groups")
    sites = [replace(s, spec=s.spec and replace(s.spec, groups=regrouped(s.spec.groups, 2))) for s in plan.sites]
    return replace(plan, sites=tuple(sites))


@pytest.fixture(scope="module")
def pairs(tiny: Maker, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Tiny mixtral, two programs or more a layer."""
    made = tiny("mixtral")
    prepared = preparation.prepare(
        str(made.folder),
        profile=made.prepared.folder / PROFILE,
        plan=in_pairs(made.prepared.plan),
        out=tmp_path_factory.mktemp("pairs") / "prepared",
        progress=False,
    )
    assert all(len(site.programs) >= 2 for site in prepared.sites.values())
    return prepared


def tokens(length: int) -> mx.array:
    return mx.array(np.random.default_rng(length).integers(2, 258, (1, length)))


def test_a_site_of_several_programs_in_the_manifest_and_in_checks(pairs: Prepared) -> None:
    manifest = json.loads((pairs.folder / MANIFEST).read_text())
    assert manifest["schema_version"] == 2
    for site in pairs.sites.values():
        assert [p.path for p in site.programs] == [
            f"programs/{site.path}.g{i}.mlpackage" for i in range(len(site.programs))
        ]
        assert site.error is not None
        assert site.error["relative_l2"] == max(p.error["relative_l2"] for p in site.programs)
        assert site.program_bytes == sum(package.package_bytes(pairs.folder / p.path) for p in site.programs)
    rows = preparation.check_programs(pairs, progress=False)
    assert [r["program"] for r in rows] == [p.path for s in pairs.sites.values() for p in s.programs]


@pytest.mark.parametrize("failing", [2, 3])
def test_one_failing_program_of_a_site_sends_the_call_back(failing: int, pairs: Prepared, tiny: Maker) -> None:
    model, x = tiny("mixtral").model, tokens(200)
    stock = run(model, lambda: model(x))
    device = InterpreterDevice(emulation=Emulation(fail_every=failing))
    with mlx_npumoe.attach(model, pairs, device=device) as engine:
        replayed = run(model, lambda: model(x), stock)
        totals = engine.report().totals
    assert per_token_error(replayed.logits, stock.logits).max() < 2e-3
    assert 0 < totals.fallbacks <= 3 and totals.dropped == 0
    programs = [len(s.programs) for s in pairs.sites.values()]
    assert totals.launches <= sum(programs) - totals.fallbacks * min(programs)


def test_a_hang_in_one_program_is_one_deadline_and_leaves_no_surface_in_use(pairs: Prepared, tiny: Maker) -> None:
    model, x = tiny("mixtral").model, tokens(200)
    stock = run(model, lambda: model(x))
    device = InterpreterDevice(emulation=Emulation(hang_s=60))
    leased: list[Any] = []
    lease = device.lease
    device.lease = lambda loaded: leased.append(lease(loaded)) or leased[-1]  # type: ignore[method-assign]
    with mlx_npumoe.attach(model, pairs, device=device, deadline_s=0.2) as engine:
        after = run(model, lambda: model(x), stock)
        totals = engine.report().totals
        assert "no answer" in (engine.report().layers[0].reason or "")
    np.testing.assert_array_equal(after.logits, stock.logits)
    assert totals.fallbacks == 1 and 0.2 <= totals.join_wait_s < 2
    assert len(leased) == len(next(iter(pairs.sites.values())).programs)
    assert all(one._surfaces is None for one in leased)


def test_a_site_is_loaded_whole_or_not_at_all(pairs: Prepared, tiny: Maker) -> None:
    counts = [len(s.programs) for s in pairs.sites.values()]
    limits = replace(pairs.plan.limits, programs=sum(counts) - 1)
    with mlx_npumoe.attach(tiny("mixtral").model, replace(pairs, plan=replace(pairs.plan, limits=limits))) as engine:
        assert engine._residency is not None and len(engine._residency.resident) == sum(counts[:-1])
        assert "limit" in (engine.report().layers[2].reason or "")


def test_a_program_not_accurate_enough_keeps_its_layer_local_without_remains(
    pairs: Prepared, tiny: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, calls = preparation.measure_error, []

    def second_is_wrong(*args: Any) -> dict[str, float]:
        calls.append(1)
        return measured(*args) | ({"relative_l2": 0.5} if len(calls) == 2 else {})

    monkeypatch.setattr(preparation, "measure_error", second_is_wrong)
    prepared = preparation.prepare(
        str(tiny("mixtral").folder), profile=pairs.folder / PROFILE, plan=pairs.plan, out=tmp_path / "o", progress=False
    )
    first, *others = prepared.sites.values()
    assert first.programs == () and first.error is not None and first.error["relative_l2"] == 0.5
    assert "differs from MLX" in (first.reason or "") and all(len(s.programs) >= 2 for s in others)
    assert not list((prepared.folder / "programs").glob(f"{first.path}.*"))


def _edited(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def _second(folder: Path) -> Path:
    return sorted((folder / "programs").iterdir())[1]


def _unlisted(manifest: dict[str, Any]) -> None:
    gone = manifest["sites"][0]["programs"].pop()["path"]
    manifest["files"] = {name: f for name, f in manifest["files"].items() if not name.startswith(gone)}


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "one gone": (lambda f: shutil.rmtree(_second(f)), r"g1\.mlpackage.* is missing"),
    "one truncated": (lambda f: (_second(f) / WEIGHTS).write_bytes(b"x"), r"g1\.mlpackage.*wrong size"),
    "one flipped": (
        lambda f: (_second(f) / WEIGHTS).write_bytes((_second(f) / WEIGHTS).read_bytes()[:-1] + b"\1"),
        r"g1\.mlpackage.*hash",
    ),
    "two exchanged": (lambda f: _edited(f, lambda m: m["sites"][0]["programs"].reverse()), "is not the program of"),
    "one without files": (
        lambda f: [
            shutil.rmtree(_second(f)),
            _edited(f, lambda m: m.update(files={n: v for n, v in m["files"].items() if _second_name(m) not in n})),
        ],
        "does not list the files of",
    ),
    "one not listed": (
        lambda f: [shutil.rmtree(_last_of_first(f)), _edited(f, _unlisted)],
        r"does not list .*\.g\d\.mlpackage, a program of",
    ),
    "a number too many": (
        lambda f: _edited(f, lambda m: m["sites"][0]["programs"].append(m["sites"][0]["programs"][0])),
        "is not the program of",
    ),
    "no list": (lambda f: _edited(f, lambda m: m["sites"][0].update(programs="x")), "'programs'"),
    "an older schema": (lambda f: _edited(f, lambda m: m.update(schema_version=1)), "prepare again"),
}


def _second_name(manifest: dict[str, Any]) -> str:
    return str(manifest["sites"][0]["programs"][1]["path"])


def _last_of_first(folder: Path) -> Path:
    manifest = json.loads((folder / MANIFEST).read_text())
    return folder / str(manifest["sites"][0]["programs"][-1]["path"])


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_one_of_several_programs_is_one_sentence(damage: str, pairs: Prepared, tmp_path: Path) -> None:
    break_it, message = DAMAGES[damage]
    folder = shutil.copytree(pairs.folder, tmp_path / "copy")
    break_it(folder)
    with pytest.raises(PreparedError, match=message) as error:
        Prepared.open(folder)
    assert "\n" not in str(error.value)


def test_a_program_of_another_group_is_refused(pairs: Prepared, tiny: Maker, tmp_path: Path) -> None:
    """Exchanged together with their hashes, as somebody who knows both would."""
    folder = shutil.copytree(pairs.folder, tmp_path / "copy")
    first = next(iter(pairs.sites.values()))
    a, b = (folder / p.path for p in first.programs[:2])
    a.rename(tmp_path / "a"), b.rename(a), (tmp_path / "a").rename(b)

    def exchange(manifest: dict[str, Any]) -> None:
        one, two = (p.path for p in first.programs[:2])
        swapped = {one: two, two: one}
        files = manifest["files"]
        manifest["files"] = {
            next((n.replace(k, v, 1) for k, v in swapped.items() if n.startswith(k)), n): f for n, f in files.items()
        }

    _edited(folder, exchange)
    with pytest.raises(PreparedError, match="computes something else than the plan"):
        mlx_npumoe.attach(tiny("mixtral").model, folder)


def test_a_prepare_stopped_between_two_programs_goes_on(
    pairs: Prepared, tiny: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emit = preparation.emit_program
    folder, out = str(tiny("mixtral").folder), tmp_path / "out"
    counts = [len(s.programs) for s in pairs.sites.values()]
    made: list[str] = []
    for at in (2, counts[0] + 2):  # inside the first site and inside the second, with all that was done before

        def stopping(spec: Any, experts: Any, path: Path, at: int = at) -> int:
            if len(made) == at:
                raise KeyboardInterrupt
            made.append(path.name)
            return emit(spec, experts, path)

        made.clear()
        monkeypatch.setattr(preparation, "emit_program", stopping)
        with pytest.raises(KeyboardInterrupt):
            preparation.prepare(folder, profile=pairs.folder / PROFILE, plan=pairs.plan, out=out, progress=False)
        assert not out.exists() and len(made) == at
    made.clear()
    monkeypatch.setattr(preparation, "emit_program", lambda *args: (made.append(args[2].name), emit(*args))[1])
    prepared = preparation.prepare(folder, profile=pairs.folder / PROFILE, plan=pairs.plan, out=out, progress=False)
    assert len(made) <= sum(counts[1:]) and prepared.sites == pairs.sites
    assert [p.name for p in tmp_path.iterdir() if p.name != "cache"] == ["out"]


KILLED = """
import os, signal, sys
from mlx_npumoe import preparation
emit, done = preparation.emit_program, []
def emitted(*args):
    size = emit(*args)
    done.append(args[2].name)
    if len(done) == int(sys.argv[5]):
        os.kill(os.getpid(), signal.SIGKILL)
    return size
preparation.emit_program = emitted
preparation.prepare(sys.argv[1], profile=sys.argv[2], plan=sys.argv[3], out=sys.argv[4], progress=False)
"""


def test_a_prepare_killed_between_two_programs_goes_on(pairs: Prepared, tiny: Maker, tmp_path: Path) -> None:
    counts = [len(s.programs) for s in pairs.sites.values()]
    out, model = tmp_path / "out", str(tiny("mixtral").folder)
    arguments = [model, pairs.folder / PROFILE, pairs.folder / PLAN, out, counts[0] + 1]
    killed = subprocess.run([sys.executable, "-c", KILLED, *map(str, arguments)], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL and not out.exists() and killed.stderr == ""
    (left,) = tmp_path.glob(".out.*.part")
    assert len(list((left / "programs").iterdir())) == counts[0] + 1
    prepared = preparation.prepare(model, profile=pairs.folder / PROFILE, plan=pairs.plan, out=out, progress=False)
    assert prepared.sites == pairs.sites and not left.exists()


@pytest.mark.parametrize("body", ["grouped", "separate"])
def test_int8_programs_of_other_bodies_are_those_of_split(body: str, tiny: Maker, tmp_path: Path) -> None:
    made, x = tiny("qwen3_moe", weights="int8"), tokens(300)
    with mlx_npumoe.attach(made.model, made.prepared):
        want = np.array(made.model(x))
    other = prepare_all_hot(made.folder, tmp_path / "p", "int8", body=body)
    with mlx_npumoe.attach(made.model, other) as engine:
        np.testing.assert_array_equal(np.array(made.model(x)), want)
        assert engine.report().totals.launches == 3


# ------------------------------------------------------------------------------------------------------------ commands


def test_forms_by_commands(
    tiny: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    made = tiny("mixtral")
    model, profile = str(made.folder), str(made.prepared.folder / PROFILE)

    def ask(*argv: str) -> tuple[int, str, str]:
        try:
            code = command(argv[0], [*argv[1:], "--quiet"])
        except SystemExit as e:
            code = int(e.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    planned = ("plan", "--model", model, "--profile", profile, "--chunk", "512", "--hot", "all")
    code, out, _ = ask(*planned, "--layout", "groups", "--body", "separate", "--explain")
    assert code == 0 and "layout groups, body separate" in out
    plan = Plan.load("plan.json")
    code, out, _ = ask("programs", "emit", "--model", model, "--plan", "plan.json", "--out", "a")
    assert code == 0 and len(list(Path("a").glob("*.g*.mlpackage"))) == plan.programs
    code, out, _ = ask(
        *("programs", "emit", "--model", model, "--plan", "plan.json", "--out", "b"),
        *("--layout", "layer", "--body", "grouped"),
    )
    assert code == 0 and len(list(Path("b").glob("*.mlpackage"))) == 3
    assert package.stored_spec(next(Path("b").iterdir()))["body"] == "grouped"
    code, out, _ = ask("prepare", "--model", model, "--profile", profile, "--plan", "plan.json", "--out", "c", "--json")
    assert code == 0 and json.loads(out)["programs"] == plan.programs
    code, _, err = ask(
        *("prepare", "--model", model, "--profile", profile, "--plan", "plan.json", "--out", "d", "--body", "grouped")
    )
    assert code == 2 and "contradicts the plan's 'separate'" in err and err.count("\n") == 1
    code, _, err = ask(*planned, "--layout", "rows")
    assert code == 2 and "layer" in err and "groups" in err
    code, out, _ = ask("plan", "--help")
    flat = " ".join(out.split())
    assert code == 0 and "one grouped convolution a matrix" in flat and "one program for each group" in flat
