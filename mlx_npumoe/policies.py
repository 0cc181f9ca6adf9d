"""What becomes of pairs beyond an expert's capacity. Knows names and numbers only."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import UsageError

OVERFLOWS = ("spill", "prune")
SALIENCIES = ("attention_norm", "gate", "gate_norm")


@dataclass(frozen=True)
class Pruning:
    """The lossy overflow policy: of a hot expert's pairs beyond capacity, the least salient are not computed.

    `saliency`: `attention_norm`, L2 of the token's attention output (NPUMoE 3.3); `gate`, the pair's gate weight (after
    capacity-aware inference, arXiv 2503.05066); `gate_norm`, the gate weight times L2 of what the experts read (ours).
    `renormalise`: a token's remaining gates are scaled to the sum of all its gates (ours; the paper says nothing).
    """

    saliency: str = "attention_norm"
    renormalise: bool = False

    def __post_init__(self) -> None:
        if self.saliency not in SALIENCIES:
            raise UsageError(f"saliency={self.saliency!r} is not known; choose from {', '.join(SALIENCIES)}.")

    def __str__(self) -> str:
        return f"{self.saliency}, renormalised" if self.renormalise else self.saliency

    @property
    def needs_gates(self) -> bool:
        """Whether gate weights have to be known."""
        return self.renormalise or self.saliency != "attention_norm"
