"""coremltools, imported late and quietly.

Importing it takes seconds and, away from a Mac, logs that its Apple libraries are missing; neither belongs in a
command that only prints help. Everything in this package that needs coremltools asks here.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlx_npumoe.errors import ProgramError


@contextmanager
def _quiet() -> Iterator[None]:
    """Only errors are logged meanwhile: coremltools and what it imports configure their own loggers on the way."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)


@functools.cache
def coremltools() -> Any:
    """The coremltools module."""
    with _quiet():
        import coremltools
    return coremltools


def protobufs() -> tuple[Any, Any]:
    """The generated modules of the Core ML model format: `(Model_pb2, MIL_pb2)`."""
    coremltools()
    from coremltools.proto import MIL_pb2, Model_pb2

    return Model_pb2, MIL_pb2


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Convert without a progress bar for each pass pipeline, however few passes it holds."""
    coremltools()
    from coremltools.converters.mil.mil.passes import pass_pipeline

    shown = pass_pipeline.tqdm
    pass_pipeline.tqdm = lambda items, **_: items
    try:
        with _quiet():
            yield
    finally:
        pass_pipeline.tqdm = shown


@contextmanager
def writing(where: Path | str) -> Iterator[None]:
    """Turns what coremltools raises for a disk that is full or read-only into one sentence.

    Its weight writer is C++ and throws a RuntimeError without the operating system's reason.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "Writer" not in str(error):
            raise
        raise ProgramError(f"cannot write the program {where}: {error}; check the disk and its free space") from error
