"""What happened: counters of each layer and their totals. Knows nothing of how the numbers came about."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields


@dataclass
class LayerCounters:
    """Counters of one MoE layer since the engine was made.

    launches: device calls; rows: token rows the device computed for real; pads: rows it computed for nothing;
    spilled: pairs of hot experts that found no slot and were computed locally; dropped: pairs not computed at all
    (always 0 in exact modes); fallbacks: calls that a device failure sent back to the local experts; unpruned: calls
    that were to be pruned and were computed in full, because an observer had seen nothing; gate_mass,
    dropped_gate_mass: gate weights of all pairs and of the dropped ones in pruned calls, 0 where gates are not
    known; device_s: seconds the device computed; join_wait_s: seconds we waited for it after our own half was started.
    """

    launches: int = 0
    rows: int = 0
    pads: int = 0
    spilled: int = 0
    dropped: int = 0
    fallbacks: int = 0
    unpruned: int = 0
    gate_mass: float = 0.0
    dropped_gate_mass: float = 0.0
    device_s: float = 0.0
    join_wait_s: float = 0.0

    @property
    def dropped_gate_share(self) -> float | None:
        """Share of the gate weights that was dropped, None where gates are not known."""
        return self.dropped_gate_mass / self.gate_mass if self.gate_mass else None

    def to_dict(self) -> dict[str, object]:
        """The counters and the share by name."""
        return {**asdict(self), "dropped_gate_share": self.dropped_gate_share}

    def lose(self, dropped: float, gate_mass: float = 0.0, dropped_gate_mass: float = 0.0) -> None:
        """Count a pruned call."""
        self.dropped += int(dropped)
        self.gate_mass += gate_mass
        self.dropped_gate_mass += dropped_gate_mass

    def add(self, other: LayerCounters) -> None:
        """Add another layer's counters."""
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))


@dataclass(frozen=True)
class LayerReport:
    """One layer: its counters, and why the device did nothing (None where it was used)."""

    layer: int
    counters: LayerCounters
    reason: str | None


@dataclass(frozen=True)
class Report:
    """What an engine did since it was made.

    `weights` names the arithmetic of the programs, `overflow` the policy, `prune` with its saliency in words.
    """

    model: str
    device: str
    weights: str | None
    layers: tuple[LayerReport, ...]
    overflow: str = "spill"

    @property
    def totals(self) -> LayerCounters:
        """Sum over layers."""
        total = LayerCounters()
        for layer in self.layers:
            total.add(layer.counters)
        return total

    @property
    def offloaded(self) -> int:
        """Layers that launched at least once."""
        return sum(layer.counters.launches > 0 for layer in self.layers)

    def to_json(self) -> str:
        """The report as JSON: model, device, weights, totals and layers."""
        layers = [{"layer": r.layer, **r.counters.to_dict(), "reason": r.reason} for r in self.layers]
        return json.dumps(
            {
                "model": self.model,
                "device": self.device,
                "weights": self.weights,
                "overflow": self.overflow,
                "totals": self.totals.to_dict(),
                "layers": layers,
            },
            indent=2,
        )

    def line(self) -> str:
        """One line for people, printed after mlx-lm's own."""
        t = self.totals
        weights = f" ({self.weights} programs)" if self.weights else ""
        if not self.layers:
            return "Experts: none, this is a dense model"
        share = "" if t.dropped_gate_share is None else f" ({t.dropped_gate_share:.2%} of gate weights)"
        lossy = "" if self.overflow == "spill" else f", lossy ({self.overflow}): {t.dropped} pairs dropped{share}"
        if t.unpruned:
            lossy += f", {t.unpruned} calls not pruned"
        return (
            f"Experts: {self.offloaded} of {len(self.layers)} layers on {self.device}{weights}, {t.launches} launches, "
            f"{t.rows} rows, {t.pads} pads, {t.spilled} spilled, {t.fallbacks} fallbacks{lossy}"
        )
