"""The first cost rule: seconds of one MoE layer's experts, split between the device and the local unit.

Knows loads, capacities and a device profile; decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..activations import Activation
from ..converters.blockwise import block_size
from ..errors import PreparedError
from ..program import WeightFormat
from .device_profile import DeviceProfile
from .tiers import check_loads

PACKAGE_ALLOWANCE = 8192  # bytes an expert of descriptions and alignment; about 5000 seen in packages we wrote


@dataclass(frozen=True, eq=False)
class SiteLoads:
    """One MoE site as planning sees it: its shape and how its experts were used."""

    path: str  # in the module tree
    layer: int
    experts: int  # E
    hidden: int  # D
    width: int  # F
    top_k: int
    activation: Activation
    loads: np.ndarray  # (S, E) pairs routed to each expert, S samples of one chunk
    up_shift: int = 0
    reason: str | None = None  # why the site cannot be offloaded, where it cannot

    def __post_init__(self) -> None:
        if min(self.experts, self.hidden, self.width, self.top_k) < 1:
            raise PreparedError(f"{self.path}: experts, sizes and top-k have to be positive; inspect the model")
        if np.shape(self.loads)[1:] != (self.experts,):
            raise PreparedError(
                f"{self.path}: loads have shape {np.shape(self.loads)}, not (samples, {self.experts}); calibrate again"
            )
        check_loads(self.loads)

    @property
    def demand(self) -> np.ndarray:
        """Expected pairs an expert `(E,)`."""
        return np.asarray(self.loads, dtype=np.float64).mean(axis=0)


WEIGHT_BITS: dict[WeightFormat, int] = {"fp16": 16, "int8": 8, "lut8": 8, "lut6": 6, "lut4": 4, "int4": 4}


def expert_bytes(hidden: int, width: int, weights: WeightFormat, matrices: int = 3) -> int:
    """Bytes of one expert's two or three matrices in a program, scales and tables included.

    int8 has an fp16 scale an output row, a palette an fp16 table a matrix. int4 has a scale of 2 and an offset of at
    most 4 bytes a block: these are the most it takes, a model stored in larger groups takes less.
    """
    shapes = [(width, hidden)] * (matrices - 1) + [(hidden, width)]  # (out, in)
    bits = WEIGHT_BITS[weights]
    total = sum(-(-rows * columns * bits // 8) for rows, columns in shapes)
    if weights == "int8":
        return total + 2 * sum(rows for rows, _ in shapes)
    if weights == "int4":
        return total + 6 * sum(rows * (columns // block_size(columns)) for rows, columns in shapes)
    return total if weights == "fp16" else total + matrices * 2 * 2**bits


class LayerTimes(NamedTuple):
    """Seconds of one layer's experts for one chunk, means over the samples."""

    device_s: float  # launch, arithmetic and weights on the device
    local_s: float  # cold and spilled rows on the local unit, at the same time
    serial_s: float  # pack, join and unpack, which overlap with nothing
    layer_s: float  # serial + max(device, local), the maximum taken sample by sample


class SiteCost:
    """Times of one site under any choice of capacities (ours, after papers 1.2 [PROPOSAL] and coreml 2.4).

    ```
    device = programs * launch + sum over hot e of 2*M*D*F*C_e / rate(C_e) + weight bytes / weight bandwidth
    local  = overhead + sum over cold e of t(n_e) + sum over hot e of t(max(n_e - C_e, 0))
    serial = join + 2*D*rows / pack bandwidth + 2*D*rows / unpack bandwidth
    layer  = serial + max(device, local)
    ```
    An expert has M matrices. A program computes its capacities however few tokens arrive, so its time does not shrink
    with the chunk.
    """

    def __init__(self, site: SiteLoads, profile: DeviceProfile, weights: WeightFormat) -> None:
        self._loads = check_loads(site.loads)  # (S, E)
        self._profile = profile
        self._row_flops = 2.0 * site.activation.matrices * site.hidden * site.width
        self._row_bytes = 2 * site.hidden  # float16, one way
        self._expert_bytes = expert_bytes(site.hidden, site.width, weights, site.activation.matrices)
        self._alone = self._seconds(self._loads)  # (S, E) every pair local

    def stock_s(self, scale: float = 1.0) -> float:
        """Everything local, loads times `scale`."""
        alone = self._alone if scale == 1.0 else self._seconds(self._loads * scale)
        return float(self._with_overhead(alone.sum(axis=1)).mean())

    def times(self, capacities: np.ndarray, scale: float = 1.0, programs: int = 1) -> LayerTimes:
        """The split with these capacities `(E,)`, 0 for cold experts, in so many programs, and loads times `scale`."""
        figures = self._profile
        hot = capacities > 0
        if not hot.any():
            alone_s = self.stock_s(scale)
            return LayerTimes(0.0, alone_s, 0.0, alone_s)
        rows = int(capacities.sum())
        device_s = programs * figures.launch_s.value
        device_s += float(figures.device_rate.seconds(capacities[hot], self._row_flops).sum())
        if figures.weight_gbps is not None:
            device_s += int(hot.sum()) * self._expert_bytes / (figures.weight_gbps.value * 1e9)
        serial_s = figures.join_s.value
        for bandwidth in (figures.pack_gbps, figures.unpack_gbps):
            serial_s += rows * self._row_bytes / (bandwidth.value * 1e9)

        cold = self._alone[:, ~hot] if scale == 1.0 else self._seconds(self._loads[:, ~hot] * scale)
        spilled = np.maximum(self._loads[:, hot] * scale - capacities[hot], 0)
        spill_s = self._seconds(spilled) if spilled.any() else spilled
        local = self._with_overhead(cold.sum(axis=1) + spill_s.sum(axis=1))  # (S,)
        layer_s = serial_s + float(np.maximum(device_s, local).mean())
        return LayerTimes(device_s, float(local.mean()), serial_s, layer_s)

    def _seconds(self, rows: np.ndarray) -> np.ndarray:
        """Local time of each expert's rows."""
        return self._profile.local_rate.seconds(rows, self._row_flops)

    def _with_overhead(self, seconds: np.ndarray) -> np.ndarray:
        """Add the fixed local cost to the samples that compute anything."""
        return np.where(seconds > 0, seconds + self._profile.local_overhead_s.value, 0.0)
