"""Turns a graph into stages of tasks and runs them on a team of workers.

Operations between splits and concats fall into branches that do not touch each other; those are the tasks the
workers share. Knows values and operations, not experts. Three things make it fast: convolutions that read the same
value become one product of matrices, values stay in float32 (on the float16 grid) inside a branch, and a branch
writes its result straight into its part of the output.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..converters.mil import Graph, Operation
from ..errors import DeviceError
from .fp16 import widen
from .kernels import COMPUTES, VIEWS, Compute, Constants, conv1x1, is_constant, unknown
from .tasks import Scratch, Step, Task, Values
from .worker import Team

_JOINS = ("split", "concat")


@dataclass(frozen=True)
class Part:
    """Where a value lies in an output: `output[start:stop]` along `axis`."""

    value: str
    output: str
    axis: int
    start: int
    stop: int

    @property
    def key(self) -> str:
        """Name of the part's memory among the values."""
        return f"{self.output}[{self.start}:{self.stop}]"

    def of(self, output: np.ndarray) -> np.ndarray:
        """The part of `output`."""
        return output[(slice(None),) * self.axis + (slice(self.start, self.stop),)]


class Dataflow:
    """A graph ready to run, its weights in float32. Raises DeviceError where the graph holds something unknown."""

    def __init__(self, graph: Graph, *, saturate: bool = False, last_axis_fault: bool = False) -> None:
        self.graph = graph
        self.saturate = saturate
        self.last_axis_fault = last_axis_fault
        self.constants = Constants(graph)
        self.shapes = {port.name: port.type.shape for port in graph.inputs}
        self.shapes.update({port.name: port.type.shape for op in graph.operations for port in op.outputs})
        self.half = {port.name for port in graph.inputs}  # values that lie in memory as float16
        operations = [op for op in graph.operations if not is_constant(op)]
        self._check(operations)
        self.uses = Counter(name for op in operations for name in op.operands())
        self.uses.update(port.name for port in graph.outputs)
        self.parts = self._find_parts(operations)  # by output
        self.direct = self._find_direct(operations)  # by value
        self.stages = self._plan(operations)
        self._check_operands()
        written = {part.output for part in self.direct.values()} | set(self.parts)
        self._copies = [port.name for port in graph.outputs if port.name not in written]

    @property
    def nbytes(self) -> int:
        """Bytes of the float32 weights of matrices."""
        return self._weight_bytes

    def run(self, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], team: Team[Scratch]) -> None:
        """Compute `outputs` from `inputs`, float16 arrays of the ports' shapes, in the order of the graph's ports."""
        values: Values = {p.name: x for p, x in zip(self.graph.inputs, inputs, strict=True)}
        results = {p.name: y for p, y in zip(self.graph.outputs, outputs, strict=True)}
        parts = [*self.direct.values(), *(part for parts in self.parts.values() for part in parts)]
        values.update((part.key, part.of(results[part.output])) for part in parts)

        def bound(task: Task) -> Callable[[Scratch], None]:
            return lambda scratch: task.execute(values, scratch)

        for stage in self.stages:
            team.run([bound(task) for task in stage])
        with np.errstate(all="ignore"):
            for name in self._copies:
                np.copyto(results[name], values[name], casting="same_kind")

    def _check(self, operations: Iterable[Operation]) -> None:
        for op in operations:
            known = op.kind in COMPUTES or op.kind in VIEWS or op.kind == "concat"
            if op.nested or not known or (op.kind == "concat" and self.graph.constant(op, "interleave", False)):
                raise unknown(op, self.graph)
            if any(None in port.type.shape for port in op.outputs):
                raise DeviceError(f"{op.kind} {op.name} of {self.graph.source} has a shape that is not fixed")
        for port in (*self.graph.inputs, *self.graph.outputs):
            if port.type.dtype != "FLOAT16":
                raise DeviceError(f"port {port.name} of {self.graph.source} is {port.type}; it has to be float16")

    def _check_operands(self) -> None:
        steps = [step for stage in self.stages for task in stage for step in task.steps]
        known = {port.name for port in self.graph.inputs} | {name for step in steps for name in step.names}
        known |= {part.key for parts in self.parts.values() for part in parts}
        for step in steps:
            if missing := [name for name in step.operands if name not in known]:
                raise DeviceError(
                    f"{missing[0]} of {self.graph.source} is a constant where the interpreter expects a computed value"
                )

    def _find_parts(self, operations: Iterable[Operation]) -> dict[str, list[Part]]:
        """The parts of outputs that are a concat nothing else reads."""
        outputs = {port.name for port in self.graph.outputs}
        found = {}
        for op in operations:
            name = op.outputs[0].name
            if op.kind != "concat" or name not in outputs or self.uses[name] != 1:
                continue
            axis = int(self.graph.constant(op, "axis")) % len(op.outputs[0].type.shape)
            stops = np.cumsum([self.shape(str(a))[axis] for a in op.inputs["values"]])
            starts = [0, *stops[:-1]]
            found[name] = [
                Part(str(a), name, axis, int(start), int(stop))
                for a, start, stop in zip(op.inputs["values"], starts, stops, strict=True)
            ]
        return found

    def _find_direct(self, operations: Iterable[Operation]) -> dict[str, Part]:
        """Computed values that only an output reads: they are written straight into it."""
        computed = {op.outputs[0].name for op in operations if op.kind in COMPUTES}
        single = {name for name in computed if self.uses[name] == 1}
        whole = [Part(p.name, p.name, 0, 0, self.shape(p.name)[0]) for p in self.graph.outputs]
        parts = [*whole, *(part for parts in self.parts.values() for part in parts)]
        return {part.value: part for part in parts if part.value in single}

    def shape(self, value: str) -> tuple[int, ...]:
        """Shape of a value."""
        return tuple(int(d or 0) for d in self.shapes[value])

    def _plan(self, operations: Sequence[Operation]) -> list[list[Task]]:
        """Stages run one after the other, the tasks of a stage at the same time."""
        level = self._levels(operations)
        stages = []
        self._weight_bytes = 0
        for at in range(max(level.values(), default=-1) + 1):
            here = [op for op in operations if level[op.outputs[0].name] == at]
            joins = [op for op in here if op.kind in _JOINS]
            others = [op for op in here if op.kind not in _JOINS]
            for branches in ([joins] if joins else [], _branches(others)):
                tasks = [Task(_Branch(self, ops).steps) for ops in branches]
                if any(task.steps for task in tasks):
                    stages.append(sorted(tasks, key=lambda task: -task.flops))
        return stages

    def _levels(self, operations: Iterable[Operation]) -> dict[str, int]:
        """How often a value's history has changed between joins (split, concat) and other operations."""
        level: dict[str, int] = {}
        joined: dict[str, bool] = {}
        for op in operations:
            joins = op.kind in _JOINS
            before = [level[name] + (joined[name] != joins) for name in op.operands() if name in level]
            at = max([int(not joins), *before])
            for port in op.outputs:
                level[port.name], joined[port.name] = at, joins
        return level

    def count_weight(self, weight: np.ndarray) -> None:
        """Account for a weight kept for running."""
        self._weight_bytes += weight.nbytes


def _branches(operations: Sequence[Operation]) -> list[list[Operation]]:
    """Operations grouped so that no value passes between groups, in their order."""
    group: dict[str, list[Operation]] = {}  # by value
    for op in operations:
        met = [group[name] for name in op.operands() if name in group]
        mine = met[0] if met else []
        for other in met[1:]:
            if other is not mine:
                mine.extend(other)
                group.update((port.name, mine) for o in other for port in o.outputs)
        mine.append(op)
        group.update((port.name, mine) for port in op.outputs)
    order = {id(op): i for i, op in enumerate(operations)}
    unique = {id(ops): ops for ops in group.values()}
    return [sorted(ops, key=lambda op: order[id(op)]) for ops in unique.values()]


class _Branch:
    """The steps of one task."""

    def __init__(self, flow: Dataflow, operations: Sequence[Operation]) -> None:
        self.flow = flow
        self.steps: list[Step] = []
        self._widened: set[str] = set()
        self._outliving = self._find_outliving(operations)
        computes = {
            op.outputs[0].name: COMPUTES[op.kind](op, flow.graph, flow.constants)
            for op in operations
            if op.kind in COMPUTES
        }
        stacks = self._find_stacks(operations, computes)
        for op in operations:
            name = op.outputs[0].name
            if op.kind == "concat":
                self._concat(op)
            elif op.kind in VIEWS:
                self._view(op)
            elif name in stacks:
                if stacks[name][0] is op:
                    self._stack(stacks[name], [computes[o.outputs[0].name] for o in stacks[name]])
            else:
                self._add([op], computes[name])

    def _find_outliving(self, operations: Sequence[Operation]) -> set[str]:
        """Values read by other tasks or copied to an output, and what those are views of."""
        local = Counter(name for op in operations for name in op.operands())
        found: set[str] = set()
        for op in reversed(operations):
            names = [port.name for port in op.outputs]
            if any(self.flow.uses[name] > local[name] or name in found for name in names):
                found.update(names if op.kind not in VIEWS else [*names, *op.operands()])
        return found - set(self.flow.direct)

    def _find_stacks(self, operations: Sequence[Operation], computes: dict[str, Compute]) -> dict[str, list[Operation]]:
        """Convolutions that read the same value and whose results stay in the branch: one product does for all."""
        readers: dict[tuple[str, ...], list[Operation]] = {}
        for op in operations:
            name = op.outputs[0].name
            if name in computes and computes[name].weight is not None and name not in self.flow.direct:
                readers.setdefault((computes[name].operands[0], op.outputs[0].type.dtype), []).append(op)
        return {op.outputs[0].name: ops for ops in readers.values() if len(ops) > 1 for op in ops}

    def _stack(self, operations: Sequence[Operation], computes: Sequence[Compute]) -> None:
        weights = [c.weight for c in computes if c.weight is not None]
        bias = None
        if any(c.bias is not None for c in computes):
            pairs = zip(computes, weights, strict=True)
            bias = np.concatenate([np.zeros(len(w), np.float32) if c.bias is None else c.bias for c, w in pairs])
        columns = math.prod(self.flow.shape(operations[0].outputs[0].name)[2:])
        self._add(operations, conv1x1(computes[0].operands[0], np.concatenate(weights), columns, bias))

    def _add(self, operations: Sequence[Operation], compute: Compute) -> None:
        names = tuple(op.outputs[0].name for op in operations)
        if compute.weight is not None:
            self.flow.count_weight(compute.weight)
        part = self.flow.direct.get(names[0])
        step = Step(
            operands=tuple(self._wide(name) for name in compute.operands),
            names=names,
            shapes=tuple(self.flow.shape(name) for name in names),
            run=compute.run,
            rounds=operations[0].outputs[0].type.dtype == "FLOAT16",
            saturates=compute.accumulates and self.flow.saturate,
            sink=part.key if part else None,
            flops=compute.flops,
        )
        if self._outliving.intersection(names):
            step.fixed = np.empty(step.size, np.float32)
        self.steps.append(step)

    def _wide(self, name: str) -> str:
        """The float32 form of a value, which a step makes once where it lies in memory as float16."""
        if name not in self.flow.half:
            return name
        key = f"{name} in float32"
        if key not in self._widened:
            self._widened.add(key)
            shape = self.flow.shape(name)
            self.steps.append(Step((name,), (key,), (shape,), run=lambda operands, out: widen(operands[0], out)))
        return key

    def _view(self, op: Operation) -> None:
        operand = str(op.inputs["x"][0])
        names = tuple(port.name for port in op.outputs)
        if operand in self.flow.half:
            self.flow.half.update(names)
        self.steps.append(Step((operand,), names, view=VIEWS[op.kind](op, self.flow.graph, self.flow.last_axis_fault)))

    def _concat(self, op: Operation) -> None:
        name = op.outputs[0].name
        parts = self.flow.parts.get(name)
        if parts is None:
            axis, shape = int(self.flow.graph.constant(op, "axis")), self.flow.shape(name)

            def join(operands: Sequence[np.ndarray], out: np.ndarray) -> None:
                np.concatenate(operands, axis=axis, out=out)

            fixed = np.empty(math.prod(shape), np.float32)
            pieces = tuple(str(a) for a in op.inputs["values"])
            self.steps.append(Step(pieces, (name,), (shape,), run=join, fixed=fixed))
            return
        left = [part for part in parts if part.value not in self.flow.direct]
        if left:
            pairs = tuple(key for part in left for key in (part.value, part.key))
            self.steps.append(Step(pairs, run=_place))


def _place(pairs: Sequence[np.ndarray], out: np.ndarray) -> None:
    """Copy each value to its part of an output."""
    for value, part in zip(pairs[::2], pairs[1::2], strict=True):
        np.copyto(part, value, casting="same_kind")
