"""Attach and detach: puts stand-ins into a model, gives them executors, holds counters and lifetimes.

An engine belongs to one model object. It never changes a parameter; after `close` the model is what it was.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import mlx.nn as nn

from .converters.package import stored_spec
from .devices import open_device, resolve
from .devices.base import ExpertDevice
from .devices.health import Breaker
from .devices.residency import Residency
from .errors import DeviceError, ModelError, PreparedError, UsageError
from .executors.device import DeviceExecutor
from .fingerprint import loaded_hash
from .policies import OVERFLOWS, SALIENCIES, Pruning
from .prepared import Prepared
from .progress import Progress
from .report import LayerCounters, LayerReport, Report
from .routed import RoutedExperts
from .routing import SlotTable
from .sites import ExpertSite, find_sites, last_cached_layer, require_formula, require_sites, swap
from .taps import SiteTaps, pair_tap, prove

DEADLINE_S = 60.0


class Engine:
    """The executors of one attached model. A context manager: leaving it detaches the model."""

    def __init__(self, model: nn.Module, name: str) -> None:
        if engine(model) is not None:
            raise ModelError(f"{name} is attached already; call mlx_npumoe.detach(model) first.")
        self.model = model
        self.name = name
        self.device: ExpertDevice | None = None
        self._release: Callable[[], object] = lambda: None
        self._weights: str | None = None
        self._pruning: Pruning | None = None
        self._residency: Residency | None = None
        last = last_cached_layer(model)
        self.sites = require_sites(model, name)
        self.stand_ins = {
            site: RoutedExperts(
                module, evaluated_in_prefill=site.layer < last, tap=pair_tap(model, site.path, site.experts)
            )
            for site, module in self.sites.items()
        }
        self._reasons: dict[ExpertSite, str | None] = dict.fromkeys(self.sites, "no second device")
        swap(model, {site.path: stand_in for site, stand_in in self.stand_ins.items()})
        model._npumoe_engine = self

    def use_device(
        self, device: ExpertDevice, prepared: Prepared, *, deadline_s: float = DEADLINE_S, progress: bool = True
    ) -> None:
        """Load the programs of `prepared` that belong to this model and fit the device; the rest stays local."""
        self.device = device
        self._release = weakref.finalize(self, device.close)  # a model dropped without close ends the device too
        self._weights = prepared.plan.weights
        limits = prepared.plan.limits
        self._residency = Residency(device, limits.program_bytes, limits.programs, limits.total_bytes)
        breaker = Breaker(device.name)
        with Progress("Loading programs", len(self.stand_ins), "layers", show=progress) as bar:
            for site, stand_in in self.stand_ins.items():
                self._reasons[site] = self._load(site, stand_in, prepared, breaker, deadline_s)
                bar.advance()

    def prune(self, pruning: Pruning) -> None:
        """Drop the least salient pairs of layers on the device instead of computing them locally: lossy.

        Raises:
            ModelError: what the policy has to know cannot be observed in this model.
        """
        ours = {site: stand_in for site, stand_in in self.stand_ins.items() if stand_in._device is not None}
        with self.paused():
            proofs = prove(self.model, list(ours))
        for site in ours:
            proof = proofs[site.path]
            reason = proof.batch_reason or (proof.gates_reason if pruning.needs_gates else None)
            if pruning.saliency == "attention_norm":
                reason = reason or proof.attention_reason
            if reason is not None:
                raise ModelError(
                    f"{self.name} cannot be pruned by {pruning}: in layer {site.layer} {reason}; choose another "
                    "saliency or overflow='spill'."
                )
        for site, stand_in in ours.items():
            stand_in.prune(pruning, SiteTaps(self.model, site, proofs[site.path]))
        self._pruning = pruning

    def _load(
        self, site: ExpertSite, stand_in: RoutedExperts, prepared: Prepared, breaker: Breaker, deadline_s: float
    ) -> str | None:
        """Give a site its device executor; the reason where it cannot have one."""
        assert self.device is not None and self._residency is not None
        if site.local_reason:
            return site.local_reason
        entry = prepared.sites.get(site.path)
        if entry is None or entry.shape != (site.experts, site.hidden, site.width):
            return "nothing was prepared for experts of this place and shape"
        if loaded_hash(stand_in, entry.dtypes) != entry.sampled_sha256:
            return "the experts differ from those that were prepared (another model, a fine-tune or an adapter)"
        if entry.reason:
            return entry.reason
        plan = prepared.plan.site(site.path)
        if plan is None or plan.spec is None or not entry.programs:
            return plan.reason if plan is not None and plan.reason else "the plan keeps this layer local"
        if plan.spec.activation != site.activation:
            return f"the activation is {site.activation}, {plan.spec.activation} was prepared"
        programs = [
            (prepared.folder / program.path, spec, program.nbytes)
            for program, spec in zip(entry.programs, plan.programs, strict=True)
        ]
        for path, spec, _ in programs:
            if stored_spec(path) != spec.to_dict() or plan.experts != site.experts:
                raise PreparedError(
                    f"{path} computes something else than the plan beside it says; run mlx_npumoe.prepare again."
                )
        try:
            require_formula(stand_in, plan.spec.activation)
            loaded = self._residency.admit(programs)
        except (DeviceError, ModelError) as e:
            return str(e)
        executor = DeviceExecutor(
            self.device,
            loaded,
            SlotTable.of(plan.spec, site.experts),
            min_tokens=plan.min_chunk,
            chunk=prepared.plan.chunk,
            deadline_s=deadline_s,
            breaker=breaker,
        )
        stand_in.use(executor)
        return None

    def report(self) -> Report:
        """What happened since the engine was made."""
        layers = tuple(
            LayerReport(site.layer, stand_in._counters, self._reason(site, stand_in))
            for site, stand_in in self.stand_ins.items()
        )
        overflow = "spill" if self._pruning is None else f"prune by {self._pruning}"
        return Report(self.name, self.device.name if self.device else "off", self._weights, layers, overflow)

    def _reason(self, site: ExpertSite, stand_in: RoutedExperts) -> str | None:
        """Why a site is local now."""
        if self._reasons[site] is not None or stand_in._device is None:
            return self._reasons[site]
        if stand_in._device.breaker.open:
            return f"device switched off: {stand_in._device.breaker.last_reason}"
        if stand_in.changed():
            return "the experts were changed after they were attached"
        if stand_in._counters.launches or stand_in._counters.fallbacks:
            return None
        if not stand_in._evaluated_in_prefill:
            return "mlx-lm never computes experts after the last cache in a generation's prefill"
        return f"no input of at least {stand_in._device.min_tokens} tokens came"

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The model computes what stock does, to the bit, for the length of a block."""
        devices = [(stand_in, stand_in._device) for stand_in in self.stand_ins.values()]
        try:
            for stand_in, _ in devices:
                stand_in._device = None
            yield
        finally:
            if self.device is not None:  # not closed meanwhile
                for stand_in, device in devices:
                    stand_in._device = device

    def close(self) -> None:
        """Detach the model and release the device. Safe to call twice."""
        if engine(self.model) is self:
            now = {site.path: module for site, module in find_sites(self.model).items()}
            ours = {site.path: s for site, s in self.stand_ins.items() if now.get(site.path) is s}
            swap(self.model, {path: stand_in.unwrapped() for path, stand_in in ours.items()})
            for stand_in in self.stand_ins.values():
                stand_in.untap()
            del self.model._npumoe_engine
        if self.device is not None:
            for stand_in in self.stand_ins.values():
                stand_in._device = None
            self._release()
            self.device = None

    def __enter__(self) -> Engine:
        """The engine itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Detach."""
        self.close()


def engine(model: nn.Module) -> Engine | None:
    """The engine of a loaded or attached model, or None."""
    return getattr(model, "_npumoe_engine", None)


def report(model: nn.Module, name: str) -> Report:
    """The report of a model's engine, or one that says that nothing is attached."""
    made = engine(model)
    if made is not None:
        return made.report()
    reason = getattr(model, "_npumoe_reason", "nothing is attached")
    layers = (LayerReport(site.layer, LayerCounters(), reason) for site in find_sites(model))
    return Report(name, "off", None, tuple(layers))


def attach(
    model: nn.Module,
    prepared: Prepared | str | Path,
    *,
    device: str | ExpertDevice = "auto",
    overflow: str = "spill",
    saliency: str = "attention_norm",
    prune_renormalise: bool = False,
    deadline_s: float = DEADLINE_S,
    progress: bool = False,
) -> Engine:
    """Run the hot experts of a loaded mlx-lm model on a second device.

    Args:
        model: a model from `mlx_lm.load` or `mlx_npumoe.load(..., prepared=None)`.
        prepared: what `prepare` made of this model, or its folder.
        device: `auto`, `interpreter`, `off`, or a device object (the engine closes it).
        overflow: `spill` (exact): pairs beyond an expert's capacity are computed locally. `prune` (lossy, NPUMoE's):
            the least salient of them are dropped, in prompts of known padding; every report says how many.
        saliency: what `prune` keeps: `attention_norm`, `gate` or `gate_norm` (see `policies.Pruning`).
        prune_renormalise: scale the gates a token has left to the sum of all it had.
        deadline_s: seconds a device call may take before its rows are computed locally.

    Raises:
        UsageError: an unknown value. PreparedError: the folder is damaged or of another model. ModelError: the model
        is attached already, has no experts we can move, or cannot be pruned as asked.
    """
    choose("overflow", overflow, OVERFLOWS)
    choose("saliency", saliency, SALIENCIES)
    require_lossy(overflow, prune_renormalise)
    if not isinstance(prepared, Prepared):
        prepared = Prepared.open(prepared)
    if isinstance(device, str):
        resolve(device)
    elif not hasattr(device, "submit"):
        raise UsageError(f"device={device!r} is neither a device's name nor a device.")
    if not isinstance(prepared, Prepared | str | Path):
        raise UsageError(f"prepared={prepared!r} is neither a Prepared nor a folder.")
    name = str(getattr(model, "_npumoe_name", None) or getattr(model, "model_type", "model"))
    made = Engine(model, name)
    try:
        prepared.require_model(made.sites, name)
        opened = open_device(device) if isinstance(device, str) else device
        if opened is not None:
            made.use_device(opened, prepared, deadline_s=deadline_s, progress=progress)
            if overflow == "prune":
                made.prune(Pruning(saliency, prune_renormalise))
    except BaseException:
        made.close()
        raise
    return made


def detach(model: nn.Module) -> None:
    """Undo `attach` (or the attachment `load` made). Does nothing where nothing is attached."""
    made = engine(model)
    if made is not None:
        made.close()


def require_lossy(overflow: str, renormalise: bool) -> None:
    """Raises UsageError where gates are to be renormalised and none is ever dropped."""
    if renormalise and overflow != "prune":
        raise UsageError("prune_renormalise has an effect under overflow='prune' only; leave it out.")


def choose(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raises UsageError for a value that is not allowed."""
    if value not in allowed:
        raise UsageError(f"{name}={value!r} is not known; choose from {', '.join(allowed)}.")
