"""Reads an ML Program, saved or in memory, into plain Python: operations, values, constants.

The one place that knows the protocol buffers and the weight file. Lint, the interpreter and the golden dumps stand
on it. Knows nothing of experts, and computes nothing.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlx_npumoe.errors import ProgramError
from mlx_npumoe.program import MAIN

from . import bits
from .toolkit import protobufs

SPEC_KEY = "mlx_npumoe.spec"  # in a package's metadata: what it computes, as JSON

MODEL_FILE = "Data/com.apple.CoreML/model.mlmodel"
WEIGHTS_FOLDER = "Data/com.apple.CoreML/weights"
_BLOB_ROOT = "@model_path/weights/"
_BLOB_HEADER = struct.Struct("<IIQQ")  # sentinel, type, bytes, offset; 64 bytes with what is reserved
_BLOB_SENTINEL = 0xDEADBEEF
_NUMPY = {
    "FLOAT16": np.float16, "FLOAT32": np.float32, "FLOAT64": np.float64, "BOOL": np.bool_,
    "INT8": np.int8, "INT16": np.int16, "INT32": np.int32, "INT64": np.int64,
    "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64,
}  # fmt: skip
_SUB_BYTE = {"INT4": 4, "UINT1": 1, "UINT2": 2, "UINT3": 3, "UINT4": 4, "UINT6": 6}  # bits of packed types
_BLOB_TYPES = {
    "FLOAT16": 1, "FLOAT32": 2, "UINT8": 3, "INT8": 4, "INT16": 6, "UINT16": 7, "INT4": 8, "UINT1": 9, "UINT2": 10,
    "UINT4": 11, "UINT3": 12, "UINT6": 13, "INT32": 14, "UINT32": 15,
}  # fmt: skip


@dataclass(frozen=True)
class Type:
    """Element type, as Core ML spells it (`FLOAT16`), and shape; None is a dimension known only at run time."""

    dtype: str
    shape: tuple[int | None, ...] = ()

    def __str__(self) -> str:
        return f"{self.dtype.lower()}({', '.join('?' if d is None else str(d) for d in self.shape)})"


@dataclass(frozen=True)
class Constant:
    """A value known when the program is built: in the program itself, or in the weight file at `offset`."""

    type: Type
    value: Any = None
    file: Path | None = None
    offset: int = 0

    def array(self) -> np.ndarray:
        """The value; one in the weight file is mapped, not read. Of less than a byte, each takes one, as uint8 or int8.

        Raises ProgramError where the file is damaged.
        """
        if self.file is None:
            return np.asarray(self.value)
        if self.type.dtype not in _BLOB_TYPES:
            raise ProgramError(
                f"weight file {self.file} holds {self.type}, a type that cannot be read; prepare it again"
            )
        shape = tuple(int(d) for d in self.type.shape if d is not None)
        try:
            with self.file.open("rb") as blob:
                blob.seek(self.offset)
                sentinel, stored_as, nbytes, start = _BLOB_HEADER.unpack(blob.read(_BLOB_HEADER.size))
            if sentinel != _BLOB_SENTINEL or stored_as != _BLOB_TYPES[self.type.dtype] or nbytes != self.nbytes:
                raise ValueError("no weight of the expected type and size there")
            if self.type.dtype in _SUB_BYTE:
                return _unpacked(np.memmap(self.file, np.uint8, "r", start, (nbytes,)), self.type.dtype, shape)
            return np.memmap(self.file, np.dtype(_NUMPY[self.type.dtype]), "r", start, shape)
        except (OSError, ValueError, struct.error) as error:
            raise ProgramError(
                f"weight file {self.file} is damaged at byte {self.offset}: {error}; prepare it again"
            ) from error

    @property
    def nbytes(self) -> int:
        """Bytes of the value, wherever it is kept."""
        count = math.prod(d or 0 for d in self.type.shape)
        if self.type.dtype in _SUB_BYTE:
            return bits.packed_bytes(_SUB_BYTE[self.type.dtype], count)
        return np.dtype(_NUMPY[self.type.dtype]).itemsize * count if self.type.dtype in _NUMPY else 0


def _unpacked(packed: np.ndarray, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers of a packed type, a byte each."""
    width = _SUB_BYTE[dtype]
    values = bits.unpack(packed, width, math.prod(shape))
    return (bits.signed(values, width) if dtype.startswith("INT") else values).reshape(shape)


@dataclass(frozen=True)
class Port:
    """A named value an operation, a block or a program gives out or takes in."""

    name: str
    type: Type


@dataclass(frozen=True)
class Operation:
    """One operation. An argument is the name of a value or a constant."""

    kind: str
    name: str
    inputs: dict[str, tuple[str | Constant, ...]]
    outputs: tuple[Port, ...]
    constants: dict[str, Constant]  # attributes: the value of a const, the parts of a constexpr op
    nested: bool = False  # has blocks of its own (cond, while_loop)

    def operands(self) -> tuple[str, ...]:
        """Names of the values it reads, in order."""
        return tuple(a for args in self.inputs.values() for a in args if isinstance(a, str))


@dataclass(frozen=True)
class Graph:
    """One function of a program: operations in order, with the types of what goes in and out."""

    source: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    operations: tuple[Operation, ...]
    flexible: tuple[str, ...] = ()  # ports whose description allows more than one shape

    def constant(self, op: Operation, argument: str, default: Any = None) -> Any:
        """A constant argument of `op` as NumPy array (one element: as Python scalar); `default` if left out.

        Raises ProgramError where the argument is computed at run time.
        """
        args = op.inputs.get(argument)
        if args is None:
            return default
        found = [self.find_constant(a) for a in args]
        if any(c is None for c in found):
            raise ProgramError(f"{argument} of {op.kind} {op.name} is not a constant in {self.source}")
        arrays = [c.array() for c in found if c is not None]
        value = arrays[0] if len(arrays) == 1 else np.stack(arrays)
        return value.item() if value.ndim == 0 else value

    def find_constant(self, argument: str | Constant) -> Constant | None:
        """What `argument` stands for if that is a constant, otherwise None."""
        if isinstance(argument, Constant):
            return argument
        op = self.producers.get(argument)
        return op.constants.get("val") if op is not None and op.kind == "const" else None

    @property
    def producers(self) -> dict[str, Operation]:
        """The operation each value comes from."""
        cached = self.__dict__.get("_producers")
        if cached is None:
            cached = {port.name: op for op in self.operations for port in op.outputs}
            object.__setattr__(self, "_producers", cached)
        return cached

    @property
    def weight_bytes(self) -> int:
        """Bytes of all constants."""
        given = (c for op in self.operations for args in op.inputs.values() for c in args if isinstance(c, Constant))
        return sum(c.nbytes for op in self.operations for c in op.constants.values()) + sum(c.nbytes for c in given)


def load_graph(model: Path | str | Any, function: str = MAIN) -> Graph:
    """The graph of a function of a saved package (a path) or of a coremltools MLModel.

    Raises ProgramError where there is no readable ML Program with that function.
    """
    source, spec, weights = _opened(model)
    if spec.WhichOneof("Type") != "mlProgram" or function not in spec.mlProgram.functions:
        raise ProgramError(f"{source} is not an ML Program with a function {function!r}")
    _, mil = protobufs()
    return _Reader(mil, source, weights).graph(_description(spec, function), spec.mlProgram.functions[function])


def function_names(model: Path | str | Any) -> tuple[str, ...]:
    """The functions of a saved package (a path) or of a coremltools MLModel, in alphabetical order.

    Raises ProgramError where there is no readable ML Program.
    """
    source, spec, _ = _opened(model)
    if spec.WhichOneof("Type") != "mlProgram":
        raise ProgramError(f"{source} is not an ML Program")
    return tuple(sorted(spec.mlProgram.functions))


def _opened(model: Path | str | Any) -> tuple[str, Any, Path]:
    """How to call a model, its specification, and the folder of its weight files."""
    if isinstance(model, str | Path):
        return str(model), read_spec(Path(model)), Path(model) / WEIGHTS_FOLDER
    return "program in memory", model.get_spec(), Path(model.weights_dir or "")


def _description(spec: Any, function: str) -> Any:
    """The ports a function has for Core ML's users: its own description where there are several functions."""
    return next((d for d in spec.description.functions if d.name == function), spec.description)


def read_spec(package: Path) -> Any:
    """The Core ML specification of a saved package. Raises ProgramError where it is missing or damaged."""
    path = package / MODEL_FILE
    model_pb2, _ = protobufs()
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    spec = model_pb2.Model()
    try:
        spec.ParseFromString(path.read_bytes())
    except (OSError, DecodeError) as error:
        raise ProgramError(f"cannot read the program {package}: {error}; prepare it again") from error
    return spec


class _Reader:
    """Protocol buffers to the classes above."""

    def __init__(self, mil: Any, source: str, weights: Path) -> None:
        self.mil = mil
        self.source = source
        self.weights = weights

    def graph(self, description: Any, function: Any) -> Graph:
        block = function.block_specializations[function.opset]
        inputs = tuple(Port(port.name, self.type(port.type)) for port in function.inputs)
        operations = tuple(self.operation(op) for op in block.operations)
        types = {port.name: port.type for op in operations for port in op.outputs}
        types.update({port.name: port.type for port in inputs})
        described = (*description.input, *description.output)
        flexible = tuple(d.name for d in described if d.type.multiArrayType.WhichOneof("ShapeFlexibility") is not None)
        outputs = tuple(Port(name, types[name]) for name in block.outputs)
        return Graph(self.source, inputs, outputs, operations, flexible)

    def operation(self, op: Any) -> Operation:
        attributes = dict(op.attributes)
        name = attributes.pop("name", None)
        outputs = tuple(Port(port.name, self.type(port.type)) for port in op.outputs)
        return Operation(
            kind=op.type,
            name=str(self.value(name).value) if name is not None else (outputs[0].name if outputs else op.type),
            inputs={
                key: tuple(
                    a.name if a.WhichOneof("binding") == "name" else self.value(a.value) for a in argument.arguments
                )
                for key, argument in sorted(op.inputs.items())
            },
            outputs=outputs,
            constants={key: self.value(value) for key, value in sorted(attributes.items())},
            nested=len(op.blocks) > 0,
        )

    def type(self, value_type: Any) -> Type:
        if value_type.WhichOneof("type") != "tensorType":
            return Type(str(value_type.WhichOneof("type")).removesuffix("Type").upper())
        tensor = value_type.tensorType
        shape = tuple(
            int(d.constant.size) if d.WhichOneof("dimension") == "constant" else None for d in tensor.dimensions
        )
        return Type(self.mil.DataType.Name(tensor.dataType), shape)

    def value(self, value: Any) -> Constant:
        type_ = self.type(value.type)
        if value.WhichOneof("value") == "blobFileValue":
            blob = value.blobFileValue
            return Constant(type_, None, self.weights / blob.fileName.removeprefix(_BLOB_ROOT), int(blob.offset))
        immediate = value.immediateValue
        if immediate.WhichOneof("value") != "tensor":
            return Constant(type_)
        field = immediate.tensor.WhichOneof("value")
        if field is None:
            return Constant(type_, np.zeros(type_.shape, _NUMPY.get(type_.dtype, np.uint8)))
        raw = getattr(immediate.tensor, field).values
        if field == "strings":
            return Constant(type_, raw[0] if type_.shape == () else list(raw))
        if type_.dtype in _SUB_BYTE:
            shape = tuple(d or 0 for d in type_.shape)
            return Constant(type_, _unpacked(np.frombuffer(raw, np.uint8), type_.dtype, shape))
        if type_.dtype not in _NUMPY:
            raise ProgramError(f"{self.source} has a constant {type_}, a type that cannot be read; prepare it again")
        dtype = _NUMPY[type_.dtype]
        flat: np.ndarray = np.frombuffer(raw, dtype) if field == "bytes" else np.array(list(raw), dtype)
        return Constant(type_, flat.reshape([d or 0 for d in type_.shape]))


def describe(graph: Graph) -> str:
    """The graph as text, the same for the same program: one operation a line, weights by hash."""
    lines = [f"inputs  {', '.join(f'{p.name}: {p.type}' for p in graph.inputs)}"]
    for op in graph.operations:
        if op.kind == "const":
            continue
        arguments = {key: [_shown(graph, a) for a in args] for key, args in op.inputs.items()} | {
            key: [_shown(graph, c)] for key, c in op.constants.items()
        }
        listed = ", ".join(
            f"{key}={values[0]}" if len(values) == 1 else f"{key}=({', '.join(values)})"
            for key, values in arguments.items()
        )
        lines.append(f"{', '.join(f'{p.name}: {p.type}' for p in op.outputs)} = {op.kind}({listed})")
    lines.append(f"outputs {', '.join(f'{p.name}: {p.type}' for p in graph.outputs)}")
    return "\n".join(lines) + "\n"


def _shown(graph: Graph, argument: str | Constant) -> str:
    constant = graph.find_constant(argument)
    if constant is None:
        return str(argument)
    if constant.file is None:
        value = constant.array()
        return str(value.tolist()) if value.dtype.kind != "U" else repr(str(constant.value))
    digest = hashlib.sha256(np.ascontiguousarray(constant.array()).tobytes()).hexdigest()
    return f"{constant.type} sha256:{digest[:12]}"
