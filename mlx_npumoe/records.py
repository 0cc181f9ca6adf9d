"""Strict reading and safe writing of our small JSON files.

Knows no schema, only how to refuse a wrong one clearly.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from .cache import whole_file
from .errors import PreparedError

_LARGEST = 2**53  # integers beyond are not exact in every JSON reader
_NUMBER_LIST = re.compile(r"\[\n\s+([-+\d.eE,\s]+?)\n\s*\]")


def _shown(value: Any) -> str:
    """A value as JSON, short enough for one sentence."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


class Record:
    """One JSON object under inspection; every getter raises PreparedError naming the file and the field."""

    def __init__(self, data: Any, where: str, remedy: str) -> None:
        self._where, self._remedy = where, remedy
        if not isinstance(data, dict):
            self.fail(f"a JSON object was expected, not {_shown(data)}")
        self._data: dict[str, Any] = data

    def fail(self, problem: str) -> NoReturn:
        """Refuse the record."""
        raise PreparedError(f"{self._where}: {problem}; {self._remedy}")

    def get(self, key: str) -> Any:
        """The raw value of a key that has to be there."""
        if key not in self._data:
            self.fail(f"the key {key!r} is missing")
        return self._data[key]

    def names(self) -> list[str]:
        """The keys."""
        return list(self._data)

    def optional(self, key: str) -> Record | None:
        """A nested object, None where the value is null."""
        return None if self.get(key) is None else self.record(key)

    def text(self, key: str, choices: Sequence[str] = ()) -> str:
        """A non-empty string, one of `choices` where given."""
        value = self.get(key)
        if not isinstance(value, str) or not value.strip():
            self.fail(f"{key!r} should be a text, not {_shown(value)}")
        if choices and value not in choices:
            self.fail(f"{key!r} is {_shown(value)} but should be one of {', '.join(choices)}")
        return value

    def integer(self, key: str, least: int = 0, most: int | None = None) -> int:
        """An integer of at least `least` and at most `most`."""
        value = self._integer(self.get(key), repr(key), least)
        if most is not None and value > most:
            self.fail(f"{key!r} should be at most {most}, not {value}")
        return value

    def number(self, key: str, least: float | None = 0.0, *, above: bool = False) -> float:
        """A finite number of at least `least`, or above it."""
        return self._number(self.get(key), repr(key), least, above)

    def integers(self, key: str, least: int = 0) -> tuple[int, ...]:
        """A non-empty list of integers."""
        return tuple(self._integer(v, f"{key!r}[{i}]", least) for i, v in enumerate(self.items(key)))

    def numbers(self, key: str, least: float | None = 0.0, *, above: bool = False) -> tuple[float, ...]:
        """A non-empty list of finite numbers."""
        return tuple(self._number(v, f"{key!r}[{i}]", least, above) for i, v in enumerate(self.items(key)))

    def items(self, key: str, *, empty: bool = False) -> list[Any]:
        """A list, non-empty unless allowed."""
        value = self.get(key)
        if not isinstance(value, list) or not (value or empty):
            self.fail(f"{key!r} should be a {'' if empty else 'non-empty '}list, not {_shown(value)}")
        return value

    def record(self, key: str) -> Record:
        """A nested object."""
        return Record(self.get(key), f"{self._where}, {key!r}", self._remedy)

    def records(self, key: str, *, empty: bool = False) -> list[Record]:
        """A list of nested objects."""
        items = self.items(key, empty=empty)
        return [Record(v, f"{self._where}, {key!r}[{i}]", self._remedy) for i, v in enumerate(items)]

    def schema(self, known: int) -> None:
        """Accept `schema_version` `known` and no other."""
        version = self.integer("schema_version", least=1)
        if version > known:
            raise PreparedError(
                f"{self._where}: schema version {version} is newer than this package's {known}; "
                "upgrade mlx_npumoe or prepare again with this version"
            )
        if version != known:
            self.fail(f"schema version {version} is not the supported {known}")

    def _integer(self, value: Any, name: str, least: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _LARGEST:
            self.fail(f"{name} should be an integer of at least {least}, not {_shown(value)}")
        return value

    def _number(self, value: Any, name: str, least: float | None, above: bool) -> float:
        good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e300
        if good and least is not None:
            good = value > least if above else value >= least
        if not good:
            bound = "" if least is None else f" {'above' if above else 'of at least'} {least:g}"
            self.fail(f"{name} should be a number{bound}, not {_shown(value)}")
        return float(value)


def parse(text: str | bytes, where: str, remedy: str) -> Record:
    """A JSON object from text. Raises PreparedError where it is not one; NaN and infinities are refused."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not a JSON number")

    try:
        data = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise PreparedError(f"{where}: not valid JSON ({error}); {remedy}") from error
    return Record(data, where, remedy)


def read(path: str | Path, what: str, remedy: str) -> Record:
    """A JSON object from a file. Raises PreparedError where it is missing, unreadable or not one."""
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise PreparedError(f"{what} {path}: cannot be read ({reason}); {remedy}") from error
    return parse(text, f"{what} {path}", remedy)


def dump(data: dict[str, Any]) -> str:
    """JSON a person can read: two spaces a level, lists of numbers on one line."""
    text = json.dumps(data, indent=2, allow_nan=False)
    return _NUMBER_LIST.sub(lambda m: "[" + " ".join(m.group(1).split()) + "]", text) + "\n"


def write(path: str | Path, text: str) -> None:
    """Write a file whole or not at all: temporary name beside it, fsync, rename.

    Raises PreparedError where the folder cannot be written.
    """
    try:
        with whole_file(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise PreparedError(f"{path}: cannot be written ({reason}); choose another place") from error


def plain(value: float) -> float | int:
    """A float as an integer where it is one, for shorter files."""
    return int(value) if math.isfinite(value) and value == int(value) and abs(value) < _LARGEST else value
