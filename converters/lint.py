"""Refuses programs the Neural Engine would silently move to the CPU, or compute wrongly.

Core ML reports none of this: a program that breaks a rule loads, runs, and is slow. Each rule is a small function
over the graph; the figures behind the limits are published measurements (M1 to M4), kept in one dataclass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mlx_npumoe.errors import ProgramError
from mlx_npumoe.program import BRANCHES, CHANNELS, MAIN, PROGRAM_BYTES, SURFACE_ROWS, ProgramSpec

from . import compressed, formats
from .mil import Graph, Operation, Port, function_names, load_graph

KNOWN_OPERATIONS = frozenset(
    {
        *("const", "constexpr_affine_dequantize", "constexpr_lut_to_dense", "constexpr_blockwise_shift_scale"),
        *("conv", "linear", "matmul", "add", "sub", "mul", "square", "clip", "relu", "sigmoid", "silu", "softmax"),
        *("gelu", "tanh", "minimum", "maximum"),
        *("concat", "split", "slice_by_index", "reshape", "transpose", "expand_dims", "squeeze", "identity", "cast"),
    }
)


@dataclass(frozen=True)
class Limits:
    """What the Neural Engine takes. Sizes in elements unless they say bytes."""

    rank: int = 5
    spatial: int = 16384  # each of the last two axes (M1 to M3)
    channels: int = CHANNELS
    surface_rows: int = SURFACE_ROWS  # height of the image an input or output lies in
    column_multiple: int = 32  # 64 bytes of float16
    branches: int = BRANCHES  # that meet in one concat
    weight_bytes: int = PROGRAM_BYTES
    operations: frozenset[str] = KNOWN_OPERATIONS


DEFAULT_LIMITS = Limits()
_WIDE_OFFSET = ("constexpr_blockwise_shift_scale", "offset")  # may be float32: the weight it gives is float16


@dataclass(frozen=True)
class Finding:
    """One broken rule: what is wrong, where, and what to do."""

    rule: str
    where: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.fix} [{self.rule}]"


Rule = Callable[[Graph, Limits], Iterator[Finding]]


Specs = ProgramSpec | Mapping[str, ProgramSpec]  # one function, or several by name


def lint(model: Path | str | Any, spec: Specs | None = None, limits: Limits = DEFAULT_LIMITS) -> list[Finding]:
    """All rules a program breaks, given as saved package (path) or coremltools MLModel; empty if none.

    Every function is looked at; of several, findings name theirs. With `spec` functions and ports have to be those it
    asks for, and the operations those of its body. Raises ProgramError where there is no readable ML Program.
    """
    names = function_names(model)
    several = names != (MAIN,)
    specs = {MAIN: spec} if isinstance(spec, ProgramSpec) else spec
    findings = [] if specs is None else [*_functions(names, specs)]
    for name in names:
        graph = load_graph(model, name)
        found = [finding for rule in RULES for finding in rule(graph, limits)]
        if specs is not None and name in specs:
            found += [finding for rule in FORM_RULES for finding in rule(graph, specs[name])]
        findings += [replace(f, where=f"{name}/{f.where}") for f in found] if several else found
    return findings


def check(model: Path | str | Any, spec: Specs | None = None, limits: Limits = DEFAULT_LIMITS) -> None:
    """Raise ProgramError with every finding where a program breaks a rule."""
    findings = lint(model, spec, limits)
    if findings:
        listed = "\n".join(f"  {finding}" for finding in findings)
        raise ProgramError(f"this program would not run on the Neural Engine as planned:\n{listed}")


def _surfaces(graph: Graph) -> tuple[Port, ...]:
    return (*graph.inputs, *graph.outputs)


def _activations(graph: Graph) -> Iterator[Port]:
    """Everything computed at run time; constants are weights, to which the limits of tensors do not apply."""
    yield from graph.inputs
    for op in graph.operations:
        if op.kind != "const" and not op.kind.startswith("constexpr_"):
            yield from op.outputs


def _sizes(port: Port) -> list[int]:
    return [d for d in port.type.shape if d is not None]


def _unknown_operations(graph: Graph, limits: Limits) -> Iterator[Finding]:
    for op in graph.operations:
        if op.nested or op.kind not in limits.operations:
            yield Finding(
                "operation",
                op.name,
                f"the operation {op.kind} is not known to run on the Neural Engine",
                "express it with convolutions and elementwise operations",
            )


def _rank(graph: Graph, limits: Limits) -> Iterator[Finding]:
    for port in _activations(graph):
        if len(port.type.shape) > limits.rank:
            yield Finding(
                "rank", port.name, f"rank {len(port.type.shape)} is over {limits.rank}", "merge axes before this"
            )


def _axis_sizes(graph: Graph, limits: Limits) -> Iterator[Finding]:
    for port in _activations(graph):
        shape = port.type.shape
        for axis in range(max(0, len(shape) - 2), len(shape)):
            size = shape[axis]
            channels = len(shape) >= 3 and axis == 1  # of a (N, C, W) tensor
            if size is not None and not channels and size > limits.spatial:
                what = f"axis {axis} has {size} elements, over {limits.spatial}"
                yield Finding("spatial", port.name, what, "use smaller chunks")
        if len(shape) >= 3 and (shape[1] or 0) > limits.channels:
            yield Finding(
                "channels",
                port.name,
                f"{shape[1]} channels are over {limits.channels}",
                "put fewer experts into a group",
            )


def _static_shapes(graph: Graph, limits: Limits) -> Iterator[Finding]:
    for port in _activations(graph):
        if None in port.type.shape:
            yield Finding("static", port.name, f"its shape {port.type} is not fixed", "build a program per shape")
        if any(size == 0 for size in _sizes(port)):
            yield Finding("empty", port.name, f"{port.type} has a dimension of zero", "leave it out")
    for name in graph.flexible:
        yield Finding("static", name, "its description allows several shapes", "build a program per shape")


def _surface_shapes(graph: Graph, limits: Limits) -> Iterator[Finding]:
    for port in _surfaces(graph):
        if None in port.type.shape or not port.type.shape:
            continue
        *leading, columns = _sizes(port)
        rows = math.prod(leading)
        if rows > limits.surface_rows:
            yield Finding(
                "surface",
                port.name,
                f"a surface of {rows} rows is over {limits.surface_rows}",
                "divide the group over several inputs and outputs",
            )
        if columns % limits.column_multiple:
            yield Finding(
                "columns",
                port.name,
                f"its last axis has {columns} elements, not a multiple of {limits.column_multiple}",
                f"round the capacity up to {-(-columns // limits.column_multiple) * limits.column_multiple}",
            )


def _float32(graph: Graph, limits: Limits) -> Iterator[Finding]:
    def wide(name: str, what: str) -> Finding:
        return Finding("float32", name, f"{what} is float32, which takes its operation off the engine", "use float16")

    for port in graph.inputs:
        if port.type.dtype == "FLOAT32":
            yield wide(port.name, "this input")
    for op in graph.operations:
        parts = [
            c
            for key, args in op.inputs.items()
            for c in args
            if not isinstance(c, str) and (op.kind, key) != _WIDE_OFFSET
        ]
        if op.kind != "const":
            parts += op.constants.values()
        if any(c.type.dtype == "FLOAT32" for c in parts):
            yield wide(op.name, f"a constant argument of {op.kind}")
        for port in op.outputs:
            if port.type.dtype == "FLOAT32":
                yield wide(port.name, "this constant" if op.kind == "const" else "this tensor")


def _last_axis(graph: Graph, limits: Limits) -> Iterator[Finding]:
    for op in graph.operations:
        if op.kind == "split" and _splits_last_axis(graph, op):
            cut = "split"
        elif op.kind == "slice_by_index" and _slices_last_axis(graph, op):
            cut = "slice"
        elif op.kind in ("slice_by_size", "crop"):
            cut = op.kind
        else:
            continue
        yield Finding(
            "last-axis",
            op.name,
            f"a {cut} of the last axis turns values over 4094 into infinity on M1 and M2",
            "cut along the channel axis",
        )


def _shape_of(graph: Graph, argument: Any) -> tuple[int | None, ...]:
    for port in graph.inputs:
        if port.name == argument:
            return port.type.shape
    op = graph.producers.get(argument) if isinstance(argument, str) else None
    return next((p.type.shape for p in op.outputs if p.name == argument), ()) if op is not None else ()


def _splits_last_axis(graph: Graph, op: Operation) -> bool:
    rank = len(op.outputs[0].type.shape)
    return len(op.outputs) > 1 and int(graph.constant(op, "axis")) % rank == rank - 1


def _slices_last_axis(graph: Graph, op: Operation) -> bool:
    """Whether the slice leaves out a part of the last axis; one that takes all of it copies nothing."""
    shape = _shape_of(graph, op.inputs["x"][0])

    def last(name: str, default: int) -> int:
        value = graph.constant(op, name)
        return default if value is None else int(np.atleast_1d(value)[-1])

    size = shape[-1] if shape else None
    try:
        begin = 0 if last("begin_mask", 0) else last("begin", 0)
        whole_end = bool(last("end_mask", 0)) or last("end", -1) == size
    except ProgramError:  # bounds computed at run time
        return True
    return begin != 0 or not whole_end or last("stride", 1) != 1 or bool(last("squeeze_mask", 0))


def _branches(graph: Graph, limits: Limits) -> Iterator[Finding]:
    for op in graph.operations:
        count = len(op.inputs.get("values", ()))
        if op.kind == "concat" and count > limits.branches:
            yield Finding(
                "branches",
                op.name,
                f"{count} branches meet here, over {limits.branches}: the engine's compiler explodes",
                "divide the group",
            )


def _weights(graph: Graph, limits: Limits) -> Iterator[Finding]:
    if graph.weight_bytes > limits.weight_bytes:
        yield Finding(
            "weights",
            graph.source,
            f"{graph.weight_bytes} bytes of weights are over {limits.weight_bytes}: all of it would go to the CPU",
            "put fewer experts into a program or use smaller weights",
        )


def _groups(graph: Graph, limits: Limits) -> Iterator[Finding]:
    for op in graph.operations:
        if op.kind != "conv" or (groups := _convolution_groups(graph, op)) == 1:
            continue
        channels = _shape_of(graph, op.inputs["x"][0]), op.outputs[0].type.shape
        if any(len(shape) < 2 or (shape[1] or 0) % groups for shape in channels):
            what = f"{groups} groups do not divide its channels"
        elif groups > limits.branches:
            what = f"{groups} groups are over {limits.branches}"
        else:
            continue
        yield Finding("groups", op.name, what, "divide the experts into groups of equal shape")


def _convolution_groups(graph: Graph, op: Operation) -> int:
    return int(graph.constant(op, "groups", 1))


def _functions(names: tuple[str, ...], specs: Mapping[str, ProgramSpec]) -> Iterator[Finding]:
    for name in sorted({*names} ^ {*specs}):
        here, there = ("the program", "the plan") if name in names else ("the plan", "the program")
        yield Finding("functions", name, f"{here} has this function, {there} has not", "prepare it again")


def _form(graph: Graph, spec: ProgramSpec) -> Iterator[Finding]:
    """The operations that make out a body: how groups are cut and joined, and in how many groups convolutions are."""

    def wrong(where: str, what: str) -> Finding:
        return Finding("form", where, f"{what}, which is not the body {spec.body}", "prepare it again")

    sizes = [len(group.experts) for group in spec.groups if len(group.experts) > 1]
    joined = sizes if spec.body == "split" else []
    for kind, wanted in (("split", joined), ("concat", joined)):
        found = [op for op in graph.operations if op.kind == kind]
        counts = [len(op.outputs) if kind == "split" else len(op.inputs["values"]) for op in found]
        if counts != wanted:
            yield wrong(found[0].name if found else graph.source, f"it has {kind}s of {counts}, the plan {wanted}")
        for op in found:
            if int(graph.constant(op, "axis")) % len(op.outputs[0].type.shape) != 1:
                yield wrong(op.name, f"a {kind} of another axis than the channels")
    grouped = sizes if spec.body == "grouped" else []
    found = [op for op in graph.operations if op.kind == "conv" and _convolution_groups(graph, op) > 1]
    counts = [_convolution_groups(graph, op) for op in found]
    if counts != [size for size in grouped for _ in range(spec.activation.matrices)]:
        yield wrong(found[0].name if found else graph.source, f"it has convolutions in {counts} groups")


def _ports(graph: Graph, spec: ProgramSpec) -> Iterator[Finding]:
    for side, ports in (("input", graph.inputs), ("output", graph.outputs)):
        found = {p.name: (p.type.dtype, p.type.shape) for p in ports}
        wanted = {getattr(port, side): ("FLOAT16", port.shape) for port in spec.ports}
        for name in sorted(found.keys() | wanted.keys()):
            if found.get(name) != wanted.get(name):
                yield Finding(
                    "ports",
                    name,
                    f"the program has {found.get(name, 'no such port')}, the plan {wanted.get(name, 'no such port')}",
                    "prepare it again",
                )


def _formats(graph: Graph, spec: ProgramSpec) -> Iterator[Finding]:
    """Every convolution's weight is kept in the spec's format."""
    wanted = formats.OPERATIONS[spec.weights]
    for op in graph.operations:
        weight = op.inputs.get("weight", (None,))[0]
        source = graph.producers.get(weight) if isinstance(weight, str) else None
        if op.kind != "conv" or source is None:
            continue
        found = (source.kind, compressed.table_size(source))
        if found != wanted:
            shown = f"{found[0]} with a table of {found[1]}" if found[1] else found[0]
            yield Finding("format", op.name, f"its weight is a {shown}, not {spec.weights}", "prepare it again")


def _compressed_weights(graph: Graph, limits: Limits) -> Iterator[Finding]:
    """Compressed weights decompress to what they declare; all of them are read."""
    for op in graph.operations:
        if compressed.is_compressed(op):
            try:
                compressed.decompressed(graph, op)
            except ProgramError as error:
                yield Finding("compressed", op.name, str(error).partition(";")[0], "prepare it again")


RULES: tuple[Rule, ...] = (
    _unknown_operations,
    _rank,
    _axis_sizes,
    _static_shapes,
    _surface_shapes,
    _float32,
    _last_axis,
    _branches,
    _groups,
    _weights,
    _compressed_weights,
)
FORM_RULES: tuple[Callable[[Graph, ProgramSpec], Iterator[Finding]], ...] = (_ports, _form, _formats)
