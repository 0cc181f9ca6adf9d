"""Rewrites grouped convolutions, and what lies between them, into a branch a group between a split and a concat.

The interpreter shares branches out to its workers and stacks convolutions that read the same value; a grouped
convolution is one operation to it. The numbers stay the same to the bit of the equal program with a split body. Knows
graphs, not experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from ..converters.compressed import decompressed, is_compressed
from ..converters.mil import Constant, Graph, Operation, Port, Type
from ..errors import ProgramError

AFFINE = "constexpr_affine_dequantize"
# Operations that act on each channel apart, where their other operands are single numbers.
ELEMENTWISE = frozenset(
    {
        *("add", "clip", "gelu", "maximum", "minimum", "mul", "relu", "sigmoid", "silu", "square", "sub", "tanh"),
    }
)


def ungrouped(graph: Graph) -> Graph:
    """The same function without grouped convolutions, as far as their weights are constants."""
    if not any(op.kind == "conv" and _groups(graph, op) > 1 for op in graph.operations):
        return graph
    return replace(graph, operations=tuple(_Rewriting(graph).operations()))


def _groups(graph: Graph, op: Operation) -> int:
    try:
        return int(graph.constant(op, "groups", 1))
    except ProgramError:  # computed at run time: left to whoever runs it to refuse
        return 1


class _Rewriting:
    """One pass over a graph. `parts` holds, for each value that exists in parts, their names by their number."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.types = {port.name: port.type for port in graph.inputs}
        self.types.update({port.name: port.type for op in graph.operations for port in op.outputs})
        self.parts: dict[str, dict[int, tuple[str, ...]]] = {}
        self.whole = set(self.types)

    def operations(self) -> Iterator[Operation]:
        """The operations of the new graph, in order."""
        for op in self.graph.operations:
            if op.kind == "conv" and (count := _groups(self.graph, op)) > 1:
                weights = self._cut_constant(op, "weight", count)
                biases: Sequence[Operation | None] | None = [None] * count
                if "bias" in op.inputs:
                    biases = self._cut_constant(op, "bias", count)
                if weights is not None and biases is not None and None not in self.types[op.outputs[0].name].shape:
                    yield from self._convolutions(op, count, weights, biases)
                    continue
            elif (found := self._parts_of(op)) is not None:
                yield from self._elementwise(op, *found)
                continue
            for name in op.operands():
                yield from self._join(name)
            yield op
        for port in self.graph.outputs:
            yield from self._join(port.name)

    def _parts_of(self, op: Operation) -> tuple[int, set[str]] | None:
        """How many branches an elementwise operation falls into, and which operands it has in parts."""
        if op.kind not in ELEMENTWISE or len(op.outputs) != 1:
            return None
        computed = {name for name in op.operands() if self.graph.find_constant(name) is None}
        counts = set.intersection(*({*self.parts.get(name, ())} for name in computed)) if computed else set()
        constants = [self.graph.find_constant(a) for args in op.inputs.values() for a in args]
        single = all(c is None or c.type.shape == () for c in constants)
        same_shape = all(self.types[name].shape == op.outputs[0].type.shape for name in computed)
        return (max(counts), computed) if counts and single and same_shape else None

    def _elementwise(self, op: Operation, count: int, computed: set[str]) -> Iterator[Operation]:
        for g in range(count):
            inputs = {
                key: tuple(self.parts[a][count][g] if isinstance(a, str) and a in computed else a for a in args)
                for key, args in op.inputs.items()
            }
            yield replace(
                op, name=f"{op.name}[{g}]", inputs=inputs, outputs=(self._part(op.outputs[0].name, g, count),)
            )
        self._in_parts(op.outputs[0].name, count)

    def _convolutions(
        self, op: Operation, count: int, weights: Sequence[Operation], biases: Sequence[Operation | None]
    ) -> Iterator[Operation]:
        x = str(op.inputs["x"][0])
        if count not in self.parts.get(x, {}):
            yield from self._join(x)
            yield self._split(x, count)
        for g, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            yield weight
            inputs = {key: args for key, args in op.inputs.items() if key not in ("groups", "bias")}
            inputs |= {"x": (self.parts[x][count][g],), "weight": (weight.outputs[0].name,)}
            if bias is not None:
                yield bias
                inputs["bias"] = (bias.outputs[0].name,)
            yield replace(
                op, name=f"{op.name}[{g}]", inputs=inputs, outputs=(self._part(op.outputs[0].name, g, count),)
            )
        self._in_parts(op.outputs[0].name, count)

    def _part(self, value: str, g: int, count: int) -> Port:
        return Port(f"{value}[{g} of {count}]", _cut_type(self.types[value], 1, count))

    def _in_parts(self, value: str, count: int) -> None:
        """Note that a value is made in parts and not as a whole."""
        self._have(value, count)
        self.whole.discard(value)

    def _have(self, value: str, count: int) -> None:
        self.parts.setdefault(value, {})[count] = tuple(self._part(value, g, count).name for g in range(count))

    def _split(self, value: str, count: int) -> Operation:
        self._have(value, count)
        numbers = {"axis": (_number(1),), "num_splits": (_number(count),)}
        outputs = tuple(self._part(value, g, count) for g in range(count))
        return Operation("split", f"{value} in {count}", {"x": (value,), **numbers}, outputs, {})

    def _join(self, value: str) -> Iterator[Operation]:
        """The whole of a value somebody needs, once."""
        if value in self.whole:
            return
        self.whole.add(value)
        inputs: dict[str, tuple[str | Constant, ...]] = {
            "axis": (_number(1),),
            "interleave": (Constant(Type("BOOL"), np.bool_(False)),),
            "values": next(iter(self.parts[value].values())),
        }
        yield Operation("concat", value, inputs, (Port(value, self.types[value]),), {})

    def _cut_constant(self, op: Operation, argument: str, count: int) -> list[Operation] | None:
        """A constant in `count` parts along its first axis, or None where it is none that can be cut.

        Plain and int8 parts look at the weight file; tables and blocks are unpacked.
        """
        (value,) = op.inputs[argument]
        name = value if isinstance(value, str) else f"{op.name}_{argument}"
        constant = self.graph.find_constant(value)
        producer = self.graph.producers.get(name)
        if constant is not None:
            kind, whole = "const", {"val": constant}
        elif producer is None or not is_compressed(producer):
            return None
        elif producer.kind == AFFINE and not producer.inputs and int(producer.constants["axis"].array()) == 0:
            kind, whole = producer.kind, producer.constants
        else:
            unpacked = decompressed(self.graph, producer)
            if self.types[name].dtype == "FLOAT16":
                unpacked = unpacked.astype(np.float16)
            kind, whole = "const", {"val": Constant(self.types[name], unpacked)}
        type_ = constant.type if constant is not None else self.types[name]
        if not type_.shape or (type_.shape[0] or 0) % count:
            return None
        return [
            Operation(
                kind,
                f"{name}[{g}]",
                {},
                (Port(f"{name}[{g}]", _cut_type(type_, 0, count)),),
                {key: _cut(c, g, count, type_.shape[0]) for key, c in whole.items()},
            )
            for g in range(count)
        ]


def _cut(constant: Constant, g: int, count: int, size: int | None) -> Constant:
    """The g-th part of a constant along its first axis; what is not as long as the matrix belongs to all parts."""
    if not constant.type.shape or constant.type.shape[0] != size:
        return constant
    array = constant.array()  # of the weight file: mapped, not read
    step = len(array) // count
    return Constant(_cut_type(constant.type, 0, count), array[g * step : (g + 1) * step])


def _cut_type(type_: Type, axis: int, count: int) -> Type:
    shape = list(type_.shape)
    shape[axis] = int(shape[axis] or 0) // count
    return Type(type_.dtype, tuple(shape))


def _number(value: int) -> Constant:
    return Constant(Type("INT32"), np.int32(value))
