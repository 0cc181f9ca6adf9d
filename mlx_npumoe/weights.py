"""One expert's matrices, read by offset from safetensors or out of a module, never materialising the other experts.

Knows checkpoints and (quantised) expert tensors; knows nothing of programs or devices. All values are handed out as
stored: half precision that was widened at load is the same content.
"""

from __future__ import annotations

import ctypes
import json
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from .errors import ModelError
from .program import ExpertMatrices
from .sites import ExpertSite, projection_names

_DTYPES = {
    "F32": (np.float32, mx.float32),
    "F16": (np.float16, mx.float16),
    "BF16": (np.uint16, mx.bfloat16),
    "U32": (np.uint32, mx.uint32),
    "U8": (np.uint8, mx.uint8),
}
_PROJECTION_ALIASES = {"gate_proj": ("gate_proj", "w1"), "up_proj": ("up_proj", "w3"), "down_proj": ("down_proj", "w2")}


class _Entry(NamedTuple):
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    nbytes: int


class Checkpoint:
    """Index of a folder's `model*.safetensors`: where each tensor lies. Reads bytes by offset."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, _Entry] = {}
        for file in sorted(folder.glob("model*.safetensors")):
            self.entries.update(_read_index(file))

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Bytes `start` to `stop` of a tensor."""
        entry = self.entries[name]
        with open(entry.file, "rb", buffering=0) as file:
            file.seek(entry.offset + start)
            data = file.read(stop - start)
        if len(data) != stop - start:
            raise ModelError(f"{entry.file} ends inside tensor {name}; download the model again.")
        return data


def _read_index(file: Path) -> dict[str, _Entry]:
    try:
        with open(file, "rb") as f:
            (length,) = struct.unpack("<Q", f.read(8))
            if length > file.stat().st_size:
                raise ValueError("header longer than the file")
            header = json.loads(f.read(length))
    except (OSError, ValueError, struct.error) as e:
        raise ModelError(f"{file} is not a readable safetensors file ({e}); download the model again.") from e
    base = 8 + length
    return {
        name: _Entry(
            file,
            t["dtype"],
            tuple(t["shape"]),
            base + t["data_offsets"][0],
            t["data_offsets"][1] - t["data_offsets"][0],
        )
        for name, t in header.items()
        if name != "__metadata__"
    }


class Seal:
    """Remembers a site's activation, arrays and where they lie, to notice any later change, in place or not.

    A second reference to each buffer keeps MLX from writing into it, so that an update moves the data.
    """

    def __init__(self, module: nn.Module) -> None:
        self._held = [(array, array[...]) for array in _arrays(module)]
        mx.eval([shadow for _, shadow in self._held])
        self._places = [_address(shadow) for _, shadow in self._held]
        self._activation = module.activation

    def broken(self, module: nn.Module) -> bool:
        """Whether an array was added, taken away, exchanged or written since."""
        now = _arrays(module)
        if module.activation is not self._activation:
            return True
        return len(now) != len(self._held) or any(
            array is not held or _address(array) != place
            for array, (held, _), place in zip(now, self._held, self._places, strict=True)
        )


def _arrays(module: nn.Module) -> list[mx.array]:
    return [array for _, array in tree_flatten(module.parameters())]


def _address(array: mx.array) -> int | None:
    """Where an array's data lies; None where it does not lie in one piece."""
    try:
        view = memoryview(cast(Any, array))
        return ctypes.addressof(ctypes.c_char.from_buffer(view.cast("B")))
    except (TypeError, ValueError, RuntimeError):
        return None


class StoredTensor(NamedTuple):
    """One parameter of a site (such as `gate_proj.weight`), stacked over experts, as stored."""

    name: str
    shape: tuple[int, ...]  # (E, ...)
    dtype: mx.Dtype


class ExpertWeights:
    """The expert tensors of one site, expert by expert.

    With a checkpoint whose tensors can be found by name (stacked, or one tensor an expert), bytes are read by offset
    and the module is only asked for shapes. Otherwise the module's own arrays are used.

    Args:
        reopen: gives the site's module of a lazily loaded model anew. Arrays that had to be evaluated are then let go
            by `release`.
    """

    def __init__(
        self,
        site: ExpertSite,
        module: nn.Module,
        checkpoint: Checkpoint | None = None,
        reopen: Callable[[], nn.Module] | None = None,
    ) -> None:
        self.site = site
        self._module: nn.Module | None = module
        self._reopen = reopen
        self._checkpoint = checkpoint
        self._names: dict[str, str | list[str]] = {}
        self.tensors: list[StoredTensor] = []
        for projection in projection_names(module):
            for parameter, array in sorted(module[projection].items()):
                if isinstance(array, mx.array):
                    self._add(projection, parameter, array)
        if self._checkpoint is not None and len(self._names) != len(self.tensors):
            self._names, self._checkpoint = {}, None

    @property
    def module(self) -> nn.Module:
        """The site's module."""
        if self._module is None and self._reopen is not None:
            self._module = self._reopen()
        assert self._module is not None
        return self._module

    def release(self) -> None:
        """Let go of what was evaluated, where it can be had again."""
        if self._reopen is not None and not self.by_offset:
            self._module = None

    @property
    def by_offset(self) -> bool:
        """Whether bytes come straight from the files."""
        return self._checkpoint is not None

    def _add(self, projection: str, parameter: str, array: mx.array) -> None:
        name, dtype = f"{projection}.{parameter}", array.dtype
        if self._checkpoint is not None:
            found = _find(self._checkpoint, self.site.path, projection, parameter, tuple(array.shape))
            if found is not None:
                self._names[name] = found
                first = found if isinstance(found, str) else found[0]
                dtype = _DTYPES[self._checkpoint.entries[first].dtype][1]
        self.tensors.append(StoredTensor(name, tuple(array.shape), dtype))

    def raw(self, name: str, expert: int) -> np.ndarray:
        """One expert's part of a tensor as stored; bfloat16 comes as its uint16 bits."""
        if self._checkpoint is not None:
            where = self._names[name]
            key = where if isinstance(where, str) else where[expert]
            entry = self._checkpoint.entries[key]
            stacked = isinstance(where, str)
            size = entry.nbytes // entry.shape[0] if stacked else entry.nbytes
            start = expert * size if stacked else 0
            shape = entry.shape[1:] if stacked else entry.shape
            data = self._checkpoint.read(key, start, start + size)
            return np.frombuffer(data, _DTYPES[entry.dtype][0]).reshape(shape)
        projection, parameter = name.split(".")
        return np.asarray(_bits(self.module[projection][parameter])[expert])

    def matrices(self, expert: int) -> ExpertMatrices:
        """One expert's matrices and biases in float32, dequantised where need be."""
        names = projection_names(self.module)
        found: list[Any] = [self._matrix(projection, expert) for projection in names]
        if len(names) == 2:
            found.insert(0, (None, None))
        gate, up, down = found
        return ExpertMatrices(gate[0], up[0], down[0], gate[1], up[1], down[1])

    def _matrix(self, projection: str, expert: int) -> tuple[np.ndarray, np.ndarray | None]:
        """A projection's weight `(out, in)` and its bias `(out,)`, None where it has none."""
        parts = {
            t.name.split(".")[1]: _as_mlx(self.raw(t.name, expert), t.dtype)
            for t in self.tensors
            if t.name.startswith(projection + ".")
        }
        weight = parts["weight"]
        if "scales" in parts:
            q = self.module[projection]
            if q.mode == "affine":  # half-precision scales would round the weights to their own type
                parts.update((name, parts[name].astype(mx.float32)) for name in ("scales", "biases"))
            weight = mx.dequantize(
                weight,
                parts["scales"],
                parts.get("biases"),
                group_size=q.group_size,
                bits=q.bits,
                mode=q.mode,
                global_scale=parts.get("global_scale"),
                dtype=mx.float32,
            )
        bias = parts.get("bias")
        return np.array(weight.astype(mx.float32)), None if bias is None else np.array(bias.astype(mx.float32))

    def blocks(self, tensor: StoredTensor) -> Iterator[np.ndarray]:
        """A tensor's content as stored, one contiguous array an expert."""
        for expert in range(tensor.shape[0]):
            yield np.ascontiguousarray(self.raw(tensor.name, expert))


def _find(
    checkpoint: Checkpoint, path: str, projection: str, parameter: str, shape: tuple[int, ...]
) -> str | list[str] | None:
    """Name of the stacked tensor, or one name an expert, if shapes and dtypes are what the module says."""
    entries = checkpoint.entries
    stacked = f"{path}.{projection}.{parameter}"
    if stacked in entries:
        return stacked if entries[stacked].shape == shape and entries[stacked].dtype in _DTYPES else None
    parent = path.rpartition(".")[0]
    for alias in _PROJECTION_ALIASES.get(projection, ()):
        names = [f"{parent}.experts.{e}.{alias}.{parameter}" for e in range(shape[0])]
        if all(n in entries and entries[n].shape == shape[1:] and entries[n].dtype in _DTYPES for n in names):
            return names
    return None


def _bits(array: mx.array) -> np.ndarray:
    """NumPy view of an array, bfloat16 as uint16."""
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def _as_mlx(data: np.ndarray, dtype: mx.Dtype) -> mx.array:
    array = mx.array(data)
    return array.view(mx.bfloat16) if dtype == mx.bfloat16 and array.dtype == mx.uint16 else array


def sample_positions(shape: Sequence[int], runs: int = 4, length: int = 16) -> np.ndarray:
    """Flat element positions `(E, runs*length)` of the fixed blocks that stand for a tensor at load."""
    experts = shape[0]
    size = int(np.prod(shape[1:]))
    length = min(length, size)
    rng = np.random.default_rng([experts, size])
    starts = rng.integers(0, size - length + 1, (experts, runs))
    return (starts[:, :, None] + np.arange(length)).reshape(experts, -1)


def as_stored(values: np.ndarray, dtype: mx.Dtype) -> np.ndarray | None:
    """Widened half-precision values back in their stored form; None if they never were of that dtype."""
    array = mx.array(values)
    if array.dtype == dtype:
        return _bits(array)
    narrow = array.astype(dtype)
    if not mx.array_equal(narrow.astype(array.dtype), array).item():
        return None
    return _bits(narrow)
