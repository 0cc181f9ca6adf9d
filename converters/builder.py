"""Core ML programs from experts: one ML Program per spec, emitted the same way every time.

Layout `layer`: one program holds all groups of a site; layout `groups`: a program each. What a program does with the
experts of a group is its body:

* `split`: the group's input is cut into experts on the channel axis, every expert is three dense 1x1 convolutions, and
  the results are joined on the channel axis.
* `grouped`: the group's matrices are stacked, and each of the three is one convolution in as many groups as experts.
* `separate`: every expert has an input and an output of its own and is neither cut out nor joined.

A package can hold several functions of one set of experts, one for each set of capacities, that share their weights.
Knows neither models nor devices.

The lowest macOS that loads a program follows from its weight format (`formats.TARGETS`); several functions need macOS
15.
"""

from __future__ import annotations

import json
import re
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mlx_npumoe.errors import ProgramError
from mlx_npumoe.program import BODIES, BRANCHES, CHANNELS, LAYOUTS, MAIN, ExpertMatrices, ProgramSpec

from . import activations, formats
from .mil import SPEC_KEY
from .toolkit import coremltools, no_progress_bars, writing

Experts = Callable[[int], ExpertMatrices]

FUNCTIONS_TARGET = ("iOS18", "15.0")  # deployment target and macOS that packages of several functions need
_FUNCTION_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_one_at_a_time = threading.Lock()  # coremltools builds programs in global state
_UNSTABLE_METADATA = ("com.github.apple.coremltools.conversion_date",)


def build_program(spec: ProgramSpec, experts: Experts) -> Any:
    """The program of `spec` as a coremltools MLModel, not yet saved.

    `experts(e)` gives the float32 matrices of expert e and is called once per expert, in slot order, so that one
    expert (of a grouped body: one group) is in memory at a time besides the weights already encoded. The passes of
    coremltools are left out: what is built here is what is saved. Of a site with layout `groups` build each of
    `spec.programs`. Raises ProgramError where the spec or a matrix cannot be built.
    """
    _check_spec(spec)
    with _one_at_a_time:
        return _build({MAIN: spec}, experts)


def build_functions(specs: Mapping[str, ProgramSpec], experts: Experts) -> Any:
    """One program with a function for each spec, as a coremltools MLModel, not yet saved.

    The specs differ in their groups' capacities and in nothing else, so the functions share every weight, in memory
    and in the saved package. The first is the default. `experts` is asked as by `build_program`, once. Core ML picks
    a function when it loads the package (macOS 15). Raises ProgramError.
    """
    if not specs:
        raise ProgramError("a program of several functions needs at least one")
    first, *others = specs
    for name, spec in specs.items():
        if not _FUNCTION_NAME.fullmatch(name):
            raise ProgramError(f"a program's function cannot be called {name!r}: use letters, digits and underscores")
        _check_spec(spec)
    for name in others:
        if _without_capacities(specs[name]) != _without_capacities(specs[first]):
            raise ProgramError(
                f"the functions {first} and {name} of a program differ in more than their groups' capacities; give "
                "them packages of their own"
            )
    with _one_at_a_time:
        return _build(specs, experts, several=True)


def _without_capacities(spec: ProgramSpec) -> ProgramSpec:
    return replace(spec, groups=tuple(replace(group, capacity=0) for group in spec.groups))


def _build(specs: Mapping[str, ProgramSpec], experts: Experts, several: bool = False) -> Any:
    ct = coremltools()
    from coremltools.converters.mil.mil import Program

    first = next(iter(specs.values()))
    target = getattr(ct.target, FUNCTIONS_TARGET[0] if several else formats.TARGETS[first.weights][0])
    program = Program()
    convolutions = _Convolutions(first, experts)
    for name, spec in specs.items():
        program.add_function(name, _function(spec, convolutions, target))
    if several:
        program.default_function_name = next(iter(specs))
        program.export_as_multifunction = True
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
    said: Any = first.to_dict()
    if several:
        said = {"functions": {name: spec.to_dict() for name, spec in specs.items()}}
    model.user_defined_metadata[SPEC_KEY] = json.dumps(said, sort_keys=True)
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
    if len(spec.programs) != 1:
        raise ProgramError(
            f"layout {spec.layout} gives each of the {len(spec.groups)} groups a program of its own: build them one "
            "by one"
        )
    for i, group in enumerate(spec.groups):
        count = len(group.experts)
        if not group.experts or group.capacity < 1:
            raise ProgramError(f"group {i} of a program has no experts or no capacity")
        if count > BRANCHES:
            raise ProgramError(
                f"group {i} has {count} experts, but at most {BRANCHES} branches may meet in one "
                f"concat: divide it into groups of {BRANCHES} or fewer"
            )
        if spec.body == "grouped" and count > 1 and count * spec.width > CHANNELS:
            raise ProgramError(
                f"group {i} has {count} experts of width {spec.width} in a grouped body, more than {CHANNELS} channels "
                f"inside: divide it into groups of {max(1, CHANNELS // spec.width)} or fewer"
            )


def _function(spec: ProgramSpec, convolutions: _Convolutions, target: Any) -> Any:
    """A function with the ports of `spec`."""
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import Function, types

    inputs = {port.input: mb.TensorSpec(shape=port.shape, dtype=types.fp16) for port in spec.ports}
    body = _BODIES[spec.body]
    with Function(inputs, opset_version=target) as function:
        results = [y for i in range(len(spec.groups)) for y in body(mb, spec, i, function.inputs, convolutions)]
        function.set_outputs(results)
    return function


def _split_group(
    mb: Any, spec: ProgramSpec, index: int, inputs: Mapping[str, Any], convolutions: _Convolutions
) -> list[Any]:
    """`(1, G*D, 1, C)` to `(1, G*D, 1, C)`. A group of one expert needs no split and no concat."""
    experts, x, name = spec.groups[index].experts, inputs[f"x{index}"], f"y{index}"
    if len(experts) == 1:
        return [_chain(mb, spec, experts, x, f"e{experts[0]}", name, convolutions)]
    parts = mb.split(x=x, num_splits=len(experts), axis=1, name=f"x{index}_split")
    results = [
        _chain(mb, spec, (e,), part, f"e{e}", f"e{e}_down", convolutions)
        for e, part in zip(experts, parts, strict=True)
    ]  # each (1, D, 1, C)
    return [mb.concat(values=results, axis=1, name=name)]


def _grouped_group(
    mb: Any, spec: ProgramSpec, index: int, inputs: Mapping[str, Any], convolutions: _Convolutions
) -> list[Any]:
    """`(1, G*D, 1, C)` to `(1, G*D, 1, C)`, inside `(1, G*F, 1, C)`."""
    experts = spec.groups[index].experts
    prefix = f"e{experts[0]}" if len(experts) == 1 else f"g{index}"
    return [_chain(mb, spec, experts, inputs[f"x{index}"], prefix, f"y{index}", convolutions)]


def _separate_group(
    mb: Any, spec: ProgramSpec, index: int, inputs: Mapping[str, Any], convolutions: _Convolutions
) -> list[Any]:
    """An input and an output `(1, D, 1, C)` for each expert."""
    return [
        _chain(mb, spec, port.experts, inputs[port.input], f"e{port.experts[0]}", port.output, convolutions)
        for port in spec.ports
        if port.group == index
    ]


_BODIES: dict[str, Callable[..., list[Any]]] = {
    "split": _split_group,
    "grouped": _grouped_group,
    "separate": _separate_group,
}


def _chain(
    mb: Any,
    spec: ProgramSpec,
    experts: tuple[int, ...],
    x: Any,
    prefix: str,
    name: str,
    convolutions: _Convolutions,
) -> Any:
    """`down(activation(gate(x), up(x)))` of n experts side by side, `(1, n*D, 1, C)` to the same, called `name`."""
    gate = convolutions.emit(mb, "gate", experts, x, f"{prefix}_gate") if spec.activation.gated else None
    up = convolutions.emit(mb, "up", experts, x, f"{prefix}_up")  # (1, n*F, 1, C)
    hidden = activations.emit(mb, spec.activation, gate, up, prefix)
    return convolutions.emit(mb, "down", experts, hidden, name)


class _Convolutions:
    """Emits experts' matrices as convolutions. A weight is made once; later functions share it."""

    def __init__(self, spec: ProgramSpec, experts: Experts) -> None:
        self._spec = spec
        self._experts = experts
        self._scale = np.float32(2.0**-spec.up_shift)
        self._members: tuple[int, ...] = ()
        self._matrices: list[ExpertMatrices] = []  # of the members
        self._made: dict[str, Any] = {}  # operations by name, None for a bias there is not

    def emit(self, mb: Any, part: str, experts: tuple[int, ...], x: Any, name: str) -> Any:
        """`part` (gate, up or down) of `experts` as one convolution in as many groups, called `name`."""
        weight = self._constant(
            mb,
            f"{name}_weight",
            lambda key: formats.emit(mb, self._spec.weights, self._stacked(part, experts), key),
        )
        bias = self._constant(mb, f"{name}_bias", lambda key: self._bias(mb, part, experts, key))
        groups = {"groups": len(experts)} if len(experts) > 1 else {}
        biases = {} if bias is None else {"bias": bias}
        return mb.conv(x=x, weight=weight, name=name, **biases, **groups)

    def _constant(self, mb: Any, name: str, make: Callable[[str], Any]) -> Any:
        """What `make(name)` emits, the first time; in a later function a copy that shares its values."""
        if name in self._made:
            return None if self._made[name] is None else _copied(mb, self._made[name])
        made = make(name)
        self._made[name] = None if made is None else made.op
        if made is not None:
            _mark_shared(made.op, name)
        return made

    def _bias(self, mb: Any, part: str, experts: tuple[int, ...], name: str) -> Any:
        biases = [getattr(m, f"{part}_bias") for m in self._load(experts)]
        if all(bias is None for bias in biases):
            return None
        size = self._spec.hidden if part == "down" else self._spec.width
        stacked = np.concatenate([np.zeros(size, np.float32) if b is None else b for b in biases])
        if part != "gate":  # what up is scaled by reaches down's output, too
            stacked = stacked * self._scale
        return mb.const(val=formats.to_float16(stacked, name), name=name)

    def _stacked(self, part: str, experts: tuple[int, ...]) -> np.ndarray:
        """`(n*out, in)` float32."""
        matrices = [getattr(m, part) for m in self._load(experts)]
        stacked: np.ndarray = matrices[0] if len(matrices) == 1 else np.concatenate(matrices)
        return stacked * self._scale if part == "up" else stacked

    def _load(self, experts: tuple[int, ...]) -> list[ExpertMatrices]:
        """The matrices of a chain's experts; those of the chain before are let go."""
        if self._members != experts:
            self._matrices = []
            self._matrices = [_checked(self._spec, e, self._experts(e)) for e in experts]
            self._members = experts
        return self._matrices


def _mark_shared(op: Any, name: str) -> None:
    """Give every constant an operation is made of a name in the weight file, under which it is written once."""
    if op.op_type == "const":
        op.weight_id = name
        return
    for key, value in op.inputs.items():
        if value is not None and value.op is not None:
            _mark_shared(value.op, f"{name}.{key}")


def _copied(mb: Any, op: Any) -> Any:
    """The same constant in the function under construction, its values and weight file entries shared."""
    if op.op_type == "const":
        made = mb.const(val=op.outputs[0].val, name=op.name)
    else:
        operands = {}
        for key, value in op.inputs.items():
            if value is not None:
                nested = value.op is not None and value.op.op_type != "const"
                operands[key] = _copied(mb, value.op) if nested else value.val
        made = getattr(mb, op.op_type)(**operands, name=op.name)
    _share(made.op, op)
    return made


def _share(copy: Any, op: Any) -> None:
    if op.op_type == "const":
        if copy.weight_id is None:
            copy.weight_id = op.weight_id
        return
    for key, value in op.inputs.items():
        if value is not None and value.op is not None:
            _share(copy.inputs[key].op, value.op)


def _checked(spec: ProgramSpec, expert: int, matrices: ExpertMatrices) -> ExpertMatrices:
    F, D = spec.width, spec.hidden
    shapes = ExpertMatrices((F, D), (F, D), (D, F), (F,), (F,), (D,))  # type: ignore[arg-type]
    for name, matrix, shape in zip(matrices._fields, matrices, shapes, strict=True):
        wanted = shape if spec.activation.gated or not name.startswith("gate") else None
        found = None if matrix is None else matrix.shape
        if found != wanted and not (found is None and name.endswith("bias")):
            raise ProgramError(f"{name} of expert {expert} has shape {found}, the program needs {wanted}")
    return matrices.astype(np.float32)
