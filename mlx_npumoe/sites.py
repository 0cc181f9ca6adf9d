"""Finds the MoE sites of any mlx-lm model and swaps modules in and out of it.

The only room that knows mlx-lm's module trees. A site is a `SwitchGLU` (or `SwitchMLP`): the experts of one layer,
called with `(x, indices)` and returning one row per (token, expert) pair; router and weighted sum belong to the
block around it. Modules are matched by type, never by attribute name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from .activations import SILU, Activation
from .errors import ModelError


@dataclass(frozen=True)
class ExpertSite:
    """The experts of one MoE layer.

    `quantization` is None for float experts, else `{"group_size", "bits", "mode"}`. `local_reason` says why no
    program can be made of them, None where one can.
    """

    path: str
    layer: int
    experts: int  # E
    hidden: int  # D
    width: int  # F
    activation: Activation
    dtype: str
    quantization: dict[str, Any] | None
    biases: bool
    nbytes: int
    local_reason: str | None

    @property
    def format(self) -> str:
        """The experts' weight format, as people write it: `float16`, `affine 4-bit g64`."""
        q = self.quantization
        return self.dtype if q is None else f"{q['mode']} {q['bits']}-bit g{q['group_size']}"


def find_sites(model: nn.Module) -> dict[ExpertSite, nn.Module]:
    """Every MoE site of `model` in layer order, with its module (the stand-in where one is attached)."""
    found = []
    for path, module in model.named_modules():
        if _kind(module) is not None:
            found.append((_describe(path, module), module))
    return dict(sorted(found, key=lambda pair: (pair[0].layer, pair[0].path)))


def require_sites(model: nn.Module, name: str) -> dict[ExpertSite, nn.Module]:
    """As `find_sites`; raises ModelError for a model without any."""
    sites = find_sites(model)
    if not sites:
        raise ModelError(
            f"{name} has no experts that mlx_npumoe can move: it is a dense model or uses another form of "
            "Mixture-of-Experts than mlx-lm's SwitchGLU; run it with plain mlx_lm.generate."
        )
    return sites


def swap(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    """Put each module at its path."""
    model.update_modules(tree_unflatten(list(modules.items())))


def last_cached_layer(model: nn.Module) -> int:
    """Number of the last layer that may keep a cache.

    mlx-lm evaluates only the caches of a prefill chunk, so the experts of this layer and of later ones are never
    computed there. Models with fewer caches than layers share them (gemma4: later layers read earlier ones' keys) or
    have layers without (nemotron_h: blocks of nothing but experts); where neither is seen, the last layer is named.
    """
    from mlx_lm.models.cache import make_prompt_cache

    layers = model.layers
    caches = len(make_prompt_cache(model))
    if caches == len(layers):
        return len(layers) - 1
    sources = next((set(m["previous_kvs"]) for m in model.modules() if "previous_kvs" in m), set())
    if len(sources) == caches and sources:
        return max(sources)
    return max((i for i, layer in enumerate(layers) if not _only_experts(layer)), default=len(layers) - 1)


def _only_experts(layer: nn.Module) -> bool:
    """Whether every matrix of a layer lies in the block around its experts."""
    sites = [path for path, module in layer.named_modules() if _kind(module) is not None]
    blocks = {path.partition(".")[0] for path in sites if "." in path}
    return bool(sites) and all(
        value.ndim < 2 or path.partition(".")[0] in blocks for path, value in tree_flatten(layer.parameters())
    )


def projection_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the expert matrices a site holds, in the order they are applied."""
    return ("gate_proj", "up_proj", "down_proj") if "gate_proj" in module else ("fc1", "fc2")


def stock_class(module: nn.Module) -> type[nn.Module] | None:
    """The mlx-lm class of a site's module, seen through a stand-in; None where the module is no site."""
    from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

    cls = getattr(module, "_stock_class", type(module))
    return cls if cls in (SwitchGLU, SwitchMLP) else None


def _kind(module: nn.Module) -> str | None:
    cls = stock_class(module)
    return None if cls is None else cls.__name__


def _describe(path: str, module: nn.Module) -> ExpertSite:
    first, *_, last = (_base(module[name]) for name in projection_names(module))
    quantization = None
    if "scales" in first:
        quantization = {"group_size": first.group_size, "bits": first.bits, "mode": first.mode}
    dtype = str(first["scales" if quantization else "weight"].dtype).removeprefix("mlx.core.")
    biases = any("bias" in _base(module[name]) for name in projection_names(module))
    return ExpertSite(
        path=path,
        layer=_layer_number(path),
        experts=first.num_experts,
        hidden=first.input_dims,
        width=last.input_dims,
        activation=_activation(module),
        dtype=dtype,
        quantization=_Frozen(quantization) if quantization else None,
        biases=biases,
        nbytes=sum(v.nbytes for name in projection_names(module) for _, v in tree_flatten(module[name].parameters())),
        local_reason=_local_reason(module),
    )


def _base(linear: nn.Module) -> nn.Module:
    """The switch linear under an adapter."""
    return linear.linear if "linear" in linear else linear


class _Frozen(dict):
    """A dict that can be part of a frozen dataclass used as a key."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items())))


def _layer_number(path: str) -> int:
    match = re.search(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:\.|$)", path) or re.search(r"\.(\d+)\.", path)
    return int(match.group(1)) if match else 0


def _limit(module: Any) -> Activation:
    """deepseek_v41's: a limit of 0 is none."""
    return Activation("swiglu_clamped_before", (float(module.limit),)) if module.limit > 0 else SILU


def _situ(module: Any) -> Activation:
    beta, linear_beta = module.beta, module.linear_beta
    if linear_beta is None:
        return Activation("situ", (float(beta),))
    return Activation("situ_bounded", (float(beta), float(linear_beta)))


def _gelu(module: Any) -> Activation:
    return Activation("gelu_tanh" if module._approx in ("precise", "tanh") else f"gelu_{module._approx}")


# Activations by class; the numbers are attributes of an object that sites, and even models, may share.
_ACTIVATIONS: dict[str, Callable[[Any], Activation]] = {
    "mlx_lm.models.switch_layers.SwiGLU": lambda module: SILU,
    "mlx_lm.models.muse_spark.PreciseSwiGLU": lambda module: SILU,
    "mlx_lm.models.gemma4_text.GeGLU": lambda module: Activation("geglu"),
    "mlx_lm.models.activations.SwigluOAI": lambda m: Activation("swiglu_oai", (float(m._alpha), float(m._limit))),
    "mlx_lm.models.deepseek_v41.DeepseekV41SwiGLU": _limit,
    "mlx_lm.models.step3p5.ClampedSwiGLU": lambda m: Activation("swiglu_clamped_after", (float(m.limit),)),
    "mlx_lm.models.kimi_k3.SiTU": _situ,
    "mlx.nn.layers.activations.ReLU2": lambda module: Activation("relu2"),
    "mlx.nn.layers.activations.GELU": _gelu,
}


def expressible(cls: Any) -> bool:
    """Whether programs can express an activation of this class."""
    return isinstance(cls, type) and f"{cls.__module__}.{cls.__qualname__}" in _ACTIVATIONS


def _activation(module: nn.Module) -> Activation:
    """A site's activation by its type and attributes; one without a formula is called what its class is."""
    activation = module.activation
    cls = type(activation)
    known = _ACTIVATIONS.get(f"{cls.__module__}.{cls.__qualname__}")
    return known(activation) if known else Activation(str(getattr(activation, "__name__", cls.__name__)))


def require_formula(module: nn.Module, activation: Activation) -> None:
    """Raises ModelError where this mlx-lm's activation is not what our formula of that name computes."""
    reach = 2 * max(9.0, *map(abs, activation.values), 0.0)  # well beyond every limit it has
    points = np.linspace(-reach, reach, 65)
    gate, up = (mx.array(a.reshape(-1), mx.float32) for a in np.meshgrid(points, 0.9 * points))
    try:
        wanted = module.activation(up, gate) if activation.gated else module.activation(up)
        same = mx.allclose(activation.apply(mx, gate, up), wanted, rtol=1e-4, atol=1e-5).item()
    except (TypeError, ValueError, AttributeError):
        same = False
    if not same:
        raise ModelError(
            f"{type(module.activation).__name__} of the installed mlx-lm computes something else than {activation}; "
            "this layer stays local until mlx_npumoe is updated."
        )


def _local_reason(module: nn.Module) -> str | None:
    activation = _activation(module)
    if activation.formula is None or activation.gated != (len(projection_names(module)) == 3):
        return f"activation {activation} has no program form yet"
    extra = set(module.children()) - {*projection_names(module), "activation"}
    if extra:
        return f"experts carry an extra module ({', '.join(sorted(extra))})"
    for name in projection_names(module):
        if type(module[name]).__name__ not in ("SwitchLinear", "QuantizedSwitchLinear"):
            return f"{name} is a {type(module[name]).__name__} (an adapter?), which has no program form"
    return None
