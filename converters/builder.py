"""Core ML programs from experts: one ML Program per spec, emitted the same way every time.

Layout `layer`: one program holds all groups, with an input and an output per group. Body `split`: the input is cut
into experts on the channel axis, every expert is three dense 1x1 convolutions, and the results are joined on the
channel axis. Knows neither models nor devices.

The lowest macOS that loads a program follows from its weight format (`formats.TARGETS`).
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from mlx_npumoe.errors import ProgramError
from mlx_npumoe.program import BODIES, BRANCHES, LAYOUTS, ExpertMatrices, Group, ProgramSpec

from . import activations, formats
from .mil import SPEC_KEY
from .toolkit import coremltools, no_progress_bars, writing

_one_at_a_time = threading.Lock()  # coremltools builds programs in global state
_UNSTABLE_METADATA = ("com.github.apple.coremltools.conversion_date",)


def build_program(spec: ProgramSpec, experts: Callable[[int], ExpertMatrices]) -> Any:
    """The program of `spec` as a coremltools MLModel, not yet saved.

    `experts(e)` gives the float32 matrices of expert e and is called once per expert, in slot order, so that one
    expert is in memory at a time besides the weights already encoded. The passes of coremltools are left out: what
    is built here is what is saved. Raises ProgramError where the spec or a matrix cannot be built.
    """
    _check_spec(spec)
    with _one_at_a_time:
        return _build(spec, experts)


def _build(spec: ProgramSpec, experts: Callable[[int], ExpertMatrices]) -> Any:
    ct = coremltools()
    target = getattr(ct.target, formats.TARGETS[spec.weights][0])
    program = _layer_program(spec, experts, target)
    with no_progress_bars(), writing(f"in {tempfile.gettempdir()}"):
        model = ct.convert(
            program,
            convert_to="mlprogram",
            minimum_deployment_target=target,
            compute_units=ct.ComputeUnit.CPU_AND_NE,
            pass_pipeline=ct.PassPipeline.EMPTY,
            skip_model_load=True,
        )
    for key in _UNSTABLE_METADATA:
        model.user_defined_metadata.pop(key, None)
    model.user_defined_metadata[SPEC_KEY] = json.dumps(spec.to_dict(), sort_keys=True)
    return model


def _check_spec(spec: ProgramSpec) -> None:
    def known(what: str, value: str, values: tuple[str, ...]) -> None:
        if value not in values:
            raise ProgramError(f"program {what} {value!r} is not supported: use one of {', '.join(values)}")

    known("layout", spec.layout, LAYOUTS)
    known("body", spec.body, BODIES)
    known("weight format", spec.weights, tuple(formats.EMITTERS))
    known("activation", spec.activation.name, tuple(activations.EMITTERS))
    if spec.up_shift and not spec.activation.linear:
        raise ProgramError(f"the activation {spec.activation} is not linear in up, which cannot be scaled then")
    if spec.hidden < 1 or spec.width < 1 or not spec.groups:
        raise ProgramError("a program needs a hidden size, an expert width and at least one group of experts")
    if len(set(spec.experts)) != len(spec.experts):
        raise ProgramError(f"an expert is in more than one slot of a program: {spec.experts}")
    for i, group in enumerate(spec.groups):
        if not group.experts or group.capacity < 1:
            raise ProgramError(f"group {i} of a program has no experts or no capacity")
        if len(group.experts) > BRANCHES:
            raise ProgramError(
                f"group {i} has {len(group.experts)} experts, but at most {BRANCHES} branches may meet in one "
                f"concat: divide it into groups of {BRANCHES} or fewer"
            )


def _layer_program(spec: ProgramSpec, experts: Callable[[int], ExpertMatrices], target: Any) -> Any:
    """Layout `layer`: one function with ports `x0, x1, ...` and `y0, y1, ...`."""
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import Function, Program, types

    ports = {f"x{i}": mb.TensorSpec(shape=spec.port_shape(i), dtype=types.fp16) for i in range(len(spec.groups))}
    program = Program()
    with Function(ports, opset_version=target) as function:
        function.set_outputs(
            [_split_group(mb, spec, i, function.inputs[f"x{i}"], experts) for i in range(len(spec.groups))]
        )
    program.add_function("main", function)
    return program


def _split_group(mb: Any, spec: ProgramSpec, index: int, x: Any, experts: Callable[[int], ExpertMatrices]) -> Any:
    """Body `split`: `(1, G*D, 1, C)` to `(1, G*D, 1, C)`. A group of one expert needs no split and no concat."""
    group: Group = spec.groups[index]
    name = f"y{index}"
    if len(group.experts) == 1:
        return _expert(mb, spec, group.experts[0], x, experts, name)
    parts = mb.split(x=x, num_splits=len(group.experts), axis=1, name=f"x{index}_split")
    results = [
        _expert(mb, spec, e, part, experts, f"e{e}_down") for e, part in zip(group.experts, parts, strict=True)
    ]  # each (1, D, 1, C)
    return mb.concat(values=results, axis=1, name=name)


def _expert(
    mb: Any, spec: ProgramSpec, expert: int, x: Any, experts: Callable[[int], ExpertMatrices], name: str
) -> Any:
    """`down(activation(gate(x), up(x)))` of one expert, `(1, D, 1, C)` to `(1, D, 1, C)`, called `name`."""
    m = _checked(spec, expert, experts(expert))
    p = f"e{expert}"
    scale = np.float32(2.0**-spec.up_shift)

    def conv(matrix: np.ndarray, bias: np.ndarray | None, x: Any, name: str) -> Any:
        weight = formats.emit(mb, spec.weights, matrix, f"{name}_weight")
        if bias is None:
            return mb.conv(x=x, weight=weight, name=name)
        constant = mb.const(val=formats.to_float16(bias, f"{name}_bias"), name=f"{name}_bias")
        return mb.conv(x=x, weight=weight, bias=constant, name=name)

    gate = conv(m.gate, m.gate_bias, x, f"{p}_gate") if m.gate is not None else None  # (1, F, 1, C)
    up = conv(m.up * scale, None if m.up_bias is None else m.up_bias * scale, x, f"{p}_up")  # (1, F, 1, C)
    hidden = activations.emit(mb, spec.activation, gate, up, p)  # (1, F, 1, C)
    return conv(m.down, None if m.down_bias is None else m.down_bias * scale, hidden, name)


def _checked(spec: ProgramSpec, expert: int, matrices: ExpertMatrices) -> ExpertMatrices:
    F, D = spec.width, spec.hidden
    shapes = ExpertMatrices((F, D), (F, D), (D, F), (F,), (F,), (D,))  # type: ignore[arg-type]
    for name, matrix, shape in zip(matrices._fields, matrices, shapes, strict=True):
        wanted = shape if spec.activation.gated or not name.startswith("gate") else None
        found = None if matrix is None else matrix.shape
        if found != wanted and not (found is None and name.endswith("bias")):
            raise ProgramError(f"{name} of expert {expert} has shape {found}, the program needs {wanted}")
    return matrices.astype(np.float32)
