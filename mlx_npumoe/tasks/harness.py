"""Hands a model, attached or not, to lm-evaluation-harness (extra `evaluate`). Its tasks, its metrics, its data."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.nn as nn

from ..errors import ModelError, UsageError


def run_tasks(
    model: nn.Module,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    folder: str | Path | None = None,
    limit: int | None = None,
    seed: int = 123,
) -> dict[str, dict[str, float]]:
    """Results of the harness by task and metric, named as `lm_eval.simple_evaluate` does.

    Args:
        tasks: names the harness knows, or that YAML files in `folder` define.
        folder: of tasks of one's own.
        limit: questions a task.

    Raises:
        UsageError: the harness is not installed or knows no such task.
        ModelError: a task's data cannot be had, or the harness failed.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
        from mlx_lm.evaluate import MLXLM
    except ImportError as e:
        raise UsageError(
            f"The tasks {', '.join(tasks)} need lm-evaluation-harness ({e}); install mlx_npumoe[evaluate]."
        ) from e

    class Attached(MLXLM):
        def __init__(self) -> None:
            lm_eval.api.model.LM.__init__(self)
            self._model, self.tokenizer = model, tokenizer
            self._max_tokens, self._batch_size, self._sampler = None, 8, None
            self.use_chat_template = False

    if folder is not None and not Path(folder).is_dir():
        raise UsageError(f"The folder of tasks {folder} does not exist.")
    manager = TaskManager(include_path=str(folder), include_defaults=False) if folder is not None else None
    if manager is None or not set(tasks) <= set(manager.all_tasks):
        manager = TaskManager(include_path=None if folder is None else str(folder))  # reads thousands of files
    unknown = [task for task in tasks if task not in manager.all_tasks]
    if unknown:
        raise UsageError(f"lm-evaluation-harness knows no task {', '.join(unknown)}; see `lm_eval ls tasks`.")
    try:
        found = lm_eval.simple_evaluate(
            model=Attached(),
            tasks=list(tasks),
            task_manager=manager,
            limit=limit,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
            bootstrap_iters=0,
        )
    except Exception as e:  # the harness and its data sets raise whatever they like
        said = str(e).strip().splitlines()
        raise ModelError(
            f"lm-evaluation-harness could not run {', '.join(tasks)}: {said[0] if said else type(e).__name__}"
        ) from e
    return {
        task: {name: float(value) for name, value in values.items() if name != "alias" and _number(value)}
        for task, values in found["results"].items()
    }


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
