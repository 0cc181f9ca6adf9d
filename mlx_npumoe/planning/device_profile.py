"""What a device can do: launch and join times, rates by rows, bandwidths, limits, each with its source.

Knows no device implementation: a profile is a small JSON file, shipped or written by `doctor --measure`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import PreparedError
from ..program import BRANCHES, PROGRAM_BYTES, SURFACE_ROWS
from ..records import Record, dump, parse, plain, read, write
from .tiers import GRAIN

Kind = str  # one of KINDS
KINDS = ("measured", "published", "estimated")  # from the strongest to the weakest
PROFILE_SCHEMA = 1
SHIPPED = ("apple", "interpreter")
_REMEDY = "fix or delete it, or write a new one with mlx_npumoe.doctor --measure"


@dataclass(frozen=True)
class Figure:
    """One number, how it is known and from where."""

    value: float
    kind: Kind
    source: str


@dataclass(frozen=True)
class RateTable:
    """GFLOP/s of a unit by rows an expert, how known and from where."""

    rows: tuple[int, ...]  # strictly ascending
    gflops: tuple[float, ...]
    kind: Kind
    source: str

    def seconds(self, rows: np.ndarray | float, flops_per_row: float) -> np.ndarray:
        """Time for `rows` of one expert, elementwise; 0 for 0 rows.

        Between two entries the *time* is linear in the rows (a fixed part plus a part per row); outside the
        table the rate of the nearest entry holds.
        """
        counts = np.asarray(rows, dtype=np.float64)
        points = np.array(self.rows, dtype=np.float64)
        times = points / np.array(self.gflops)
        inside = np.interp(counts, points, times)
        below = counts / self.gflops[0]
        above = counts / self.gflops[-1]
        units = np.where(counts < points[0], below, np.where(counts > points[-1], above, inside))
        return units * (flops_per_row / 1e9)


@dataclass(frozen=True)
class DeviceLimits:
    """What one process may ask of the device. Defaults: coreml 1.1, 1.2 and 7, for public Core ML."""

    program_bytes: int = PROGRAM_BYTES  # weights of one program
    programs: int = 100  # loaded in one process
    total_bytes: int = 3 * 2**30  # weights of all of them
    surface_rows: int = SURFACE_ROWS  # G*D of one input or output
    branches: int = BRANCHES  # experts meeting in one concat
    grain: int = GRAIN  # capacities are multiples of it
    kind: Kind = "published"
    source: str = "limits others measured on Apple chips, with a margin"


@dataclass(frozen=True)
class DeviceProfile:
    """Figures of the device and of the local unit that works beside it.

    `device_rate` is arithmetic alone where `weight_gbps` is given, and includes reading the weights where it
    is None. `local_rate` always includes them.
    """

    name: str
    chip: str
    launch_s: Figure  # start of one program
    join_s: Figure  # hand-over back to the local unit, once a launch
    device_rate: RateTable
    local_rate: RateTable
    pack_gbps: Figure  # into the input surfaces
    unpack_gbps: Figure  # out of the output surfaces
    weight_gbps: Figure | None  # the device reading its weights
    local_overhead_s: Figure  # once a layer that computes any expert locally
    limits: DeviceLimits = DeviceLimits()

    @property
    def kind(self) -> Kind:
        """The weakest kind among the times and rates: `measured` only where all are."""
        parts = [getattr(self, f) for f in (*_FIGURES, *_TABLES) if getattr(self, f) is not None]
        return max((p.kind for p in parts), key=KINDS.index)

    def replace_measured(
        self,
        source: str,
        *,
        name: str | None = None,
        chip: str | None = None,
        figures: Mapping[str, float | None] | None = None,
        device_rate: Mapping[int, float] | None = None,
        local_rate: Mapping[int, float] | None = None,
        limits: DeviceLimits | None = None,
    ) -> DeviceProfile:
        """The profile with measured figures in place of some, or all, of its own.

        Args:
            source: what was measured, when and on which machine, for every figure given.
            name: new name of the profile.
            chip: new chip.
            figures: values by field name (`launch_s`, `join_s`, `pack_gbps`, `unpack_gbps`, `weight_gbps`,
                `local_overhead_s`); `weight_gbps` None says that `device_rate` includes reading the weights.
            device_rate: GFLOP/s by rows an expert.
            local_rate: the same of the local unit.
            limits: new limits.

        Raises:
            PreparedError: where a value is impossible.

        """
        changes: dict[str, Any] = {}
        for key, value in (figures or {}).items():
            if key not in _FIGURES:
                raise PreparedError(f"{key!r} is no figure of a device profile; use one of {', '.join(_FIGURES)}")
            changes[key] = None if value is None else Figure(float(value), "measured", source)
        for key, table in (("device_rate", device_rate), ("local_rate", local_rate)):
            if table is not None:
                rows = tuple(sorted(table))
                changes[key] = RateTable(rows, tuple(float(table[r]) for r in rows), "measured", source)
        for key, given in (("name", name), ("chip", chip), ("limits", limits)):
            if given is not None:
                changes[key] = given
        changed = replace(self, **changes)
        return DeviceProfile.from_json(changed.to_json(), where="measured device profile")

    def to_json(self) -> str:
        """As readable JSON."""
        data: dict[str, Any] = {"schema_version": PROFILE_SCHEMA, "name": self.name, "chip": self.chip}
        for key in _FIGURES:
            figure: Figure | None = getattr(self, key)
            data[key] = figure and {**asdict(figure), "value": plain(figure.value)}
        for key in _TABLES:
            table: RateTable = getattr(self, key)
            data[key] = {**asdict(table), "gflops": [plain(g) for g in table.gflops]}
        data["limits"] = asdict(self.limits)
        return dump(data)

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "device profile") -> DeviceProfile:
        """Back from `to_json`. Raises PreparedError where it is not a profile of this schema."""
        return _profile(parse(text, where, _REMEDY))

    @classmethod
    def load(cls, path: str | Path) -> DeviceProfile:
        """Read a file. Raises PreparedError where it is missing, damaged or of another schema."""
        return _profile(read(path, "device profile", _REMEDY))

    def save(self, path: str | Path) -> None:
        """Write the file whole or not at all. Raises PreparedError where it cannot be written."""
        write(path, self.to_json())


_FIGURES = ("launch_s", "join_s", "pack_gbps", "unpack_gbps", "weight_gbps", "local_overhead_s")
_TABLES = ("device_rate", "local_rate")


def load_profile(name_or_path: str | Path) -> DeviceProfile:
    """A shipped profile by name (`interpreter`, `apple`) or one from a file.

    Raises:
        PreparedError: where there is none, or it is damaged or of another schema.

    """
    if isinstance(name_or_path, str) and name_or_path in SHIPPED:
        text = resources.files("mlx_npumoe.data").joinpath(f"device_{name_or_path}.json").read_bytes()
        return DeviceProfile.from_json(text, where=f"shipped device profile {name_or_path!r}")
    if not Path(name_or_path).is_file():
        raise PreparedError(
            f"device profile {str(name_or_path)!r} is neither a file nor one of {', '.join(SHIPPED)}; "
            "give a path or one of these names"
        )
    return DeviceProfile.load(name_or_path)


def _profile(record: Record) -> DeviceProfile:
    """A checked profile."""
    record.schema(PROFILE_SCHEMA)
    figures = {
        key: None if key == "weight_gbps" and record.get(key) is None else _figure(record.record(key), key)
        for key in _FIGURES
    }
    tables = {key: _table(record.record(key)) for key in _TABLES}
    values: dict[str, Any] = {**figures, **tables}
    return DeviceProfile(
        name=record.text("name"),
        chip=record.text("chip"),
        limits=read_limits(record.record("limits")),
        **values,
    )


def _figure(record: Record, key: str) -> Figure:
    # A bandwidth divides, so it has to be above zero; a time may be zero.
    value = record.number("value", above=key.endswith("_gbps"))
    return Figure(value, record.text("kind", KINDS), record.text("source"))


def _table(record: Record) -> RateTable:
    rows, gflops = record.integers("rows", least=1), record.numbers("gflops", above=True)
    if len(rows) != len(gflops):
        record.fail(f"{len(rows)} row counts and {len(gflops)} rates do not pair up")
    if any(a >= b for a, b in pairwise(rows)):
        record.fail("row counts have to ascend")
    return RateTable(rows, gflops, record.text("kind", KINDS), record.text("source"))


def read_limits(record: Record) -> DeviceLimits:
    """Checked limits, of a profile or a plan. Raises PreparedError where one is impossible."""
    numbers = {f.name: record.integer(f.name, least=1) for f in fields(DeviceLimits) if f.type == "int"}
    limits = DeviceLimits(**numbers, kind=record.text("kind", KINDS), source=record.text("source"))
    if limits.grain % GRAIN:
        record.fail(f"'grain' {limits.grain} is not a multiple of {GRAIN}")
    return limits
