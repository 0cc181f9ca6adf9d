"""The families of the installed mlx-lm that have expert layers, and whether programs can express their activations.

Found by reading mlx-lm's files, so that a release with new ones needs no change here; a file is imported only to look
up the classes it names. Models are not needed.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

from .data import family_taps
from .sites import expressible

_OWN = "switch_layers"
_FORMS = {"SwitchGLU": "SwiGLU", "SwitchMLP": "nn.GELU"}  # with the activation each has by default, as _OWN spells it

# Families that cannot be tried away from a Mac, or stay local for good.
EXCEPTIONS = {
    "muse_spark": "its attention, router and weighted sum are Metal kernels, so it runs on Apple's GPU only and was "
    "never tried; its experts carry a module of their own and stay local",
}


@dataclass(frozen=True)
class Family:
    """One file of `mlx_lm.models`. `reason` says why its experts stay local, None where they can move.

    `taps`: what can be observed around the experts, each None or the reason why not; None where that was never tried.
    """

    name: str
    forms: tuple[str, ...]  # SwitchGLU, SwitchMLP
    activations: tuple[str, ...]  # classes
    reason: str | None
    taps: dict[str, str | None] | None = None


def find_families() -> list[Family]:
    """Every file of `mlx_lm.models` that uses switch_layers, by name."""
    import mlx_lm.models

    found, tried = [], family_taps()
    for file in sorted(Path(mlx_lm.models.__path__[0]).glob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        if file.stem != _OWN and any(isinstance(n, ast.ImportFrom) and n.module == _OWN for n in ast.walk(tree)):
            found.append(replace(_family(file.stem, tree), taps=tried.get(file.stem)))
    return found


def _family(name: str, tree: ast.Module) -> Family:
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and _called(n) in _FORMS]
    forms = tuple(sorted({_called(call) for call in calls}))
    spelled = sorted({activation for call in calls for activation in _activations(call, tree)})
    classes = tuple(activation.rpartition(".")[-1] for activation in spelled)
    if name in EXCEPTIONS:
        return Family(name, forms, classes, EXCEPTIONS[name])
    if not forms:
        return Family(name, forms, classes, "it makes no SwitchGLU and no SwitchMLP of its own")
    unknown = [activation for activation in spelled if not _expressible(name, activation)]
    reason = f"activation {', '.join(unknown)} has no program form yet" if unknown else None
    return Family(name, forms, classes, reason)


def _called(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[-1]


def _activations(call: ast.Call, tree: ast.Module) -> Iterator[str]:
    """What stands for the activation in a call of SwitchGLU or SwitchMLP, as the file names the class."""
    given = [k.value for k in call.keywords if k.arg == "activation"] + call.args[3:4]
    yield from _classes(given[0], tree) if given else (_FORMS[_called(call)],)


def _classes(value: ast.expr, tree: ast.Module) -> Iterator[str]:
    if isinstance(value, ast.Call):
        yield ast.unparse(value.func)
    elif isinstance(value, ast.IfExp):
        yield from _classes(value.body, tree)
        yield from _classes(value.orelse, tree)
    elif isinstance(value, ast.Name):
        assigned = [n.value for n in ast.walk(tree) if isinstance(n, ast.Assign) and _assigns(n, value.id)]
        for other in assigned:
            yield from _classes(other, tree)
        if not assigned:
            yield value.id
    else:
        yield ast.unparse(value)


def _assigns(node: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)


def _expressible(family: str, spelled: str) -> bool:
    """Whether the class a file calls `spelled` (`SwiGLU`, `nn.ReLU2`) has a formula."""
    file = _OWN if spelled in _FORMS.values() else family
    try:
        return expressible(reduce(getattr, spelled.split("."), importlib.import_module(f"mlx_lm.models.{file}")))
    except AttributeError:
        return False
