"""Muon for the matrices inside the layers, Adam for the rest. Knows the names of `model.Model`'s parameters, no data.

Muon (Jordan et al. 2024): the momentum of a matrix is made nearly orthogonal by Newton-Schulz steps before
it is applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .model import Model

# Quintic Newton-Schulz coefficients of successive steps (Polar Express, Amsel et al. 2025, with its safety factor).
COEFFICIENTS = (
    (8.205160414005569, -22.901934987056034, 16.460724910180307),
    (4.066919144467682, -2.8612845197817135, 0.5183995180786862),
    (3.9134926112054895, -2.824251876723087, 0.5248489002726654),
    (3.306017891014205, -2.430227567449687, 0.4869515205302105),
    (2.304016813944474, -1.6427206546268304, 0.4009100949022211),
)


@dataclass(frozen=True)
class Rates:
    """Learning rates: of Muon in root-mean-square update size a step, of Adam as usual."""

    matrices: float
    table: float
    router: float
    norms: float
    decay: float  # weight decay of the matrices, relative to their rate


def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    """Nearly the closest orthogonal matrix of each: (N, rows, columns), rows <= columns."""
    x = matrices / (torch.linalg.matrix_norm(matrices, keepdim=True) * 1.01 + 1e-7)
    for a, b, c in COEFFICIENTS[:steps]:
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x


class Optimiser:
    """Holds the momenta. `step` takes the gradients in the order of `parameters`; state saves as plain tensors."""

    def __init__(self, model: Model, rates: Rates, muon: bool = True, betas: tuple[float, float] = (0.9, 0.95)) -> None:
        self.names = [name for name, _ in model.named_parameters()]
        self.parameters = [parameter for _, parameter in model.named_parameters()]
        self.rates, self.muon, self.betas, self.count = rates, muon, betas, 0
        self.heads = (model.layers[0].heads, model.layers[0].kv_heads, model.layers[0].head)
        self.first = [torch.zeros_like(p) for p in self.parameters]
        self.second = [torch.zeros(0 if self.orthogonalised(n) else p.shape) for n, p in model.named_parameters()]

    def orthogonalised(self, name: str) -> bool:
        """Whether Muon updates it."""
        return self.muon and name.rsplit(".")[-1] in ("qkv", "out", "gate_up", "down")

    @torch.no_grad()
    def step(self, grads: list[Tensor], factor: float, run: Callable[[Iterable[Callable[[], None]]], None]) -> None:
        """One update at `factor` times the rates; `run` executes independent jobs, perhaps at the same time."""
        self.count += 1
        run([self._job(i, grad, factor) for i, grad in enumerate(grads)])

    def _job(self, i: int, grad: Tensor, factor: float) -> Callable[[], None]:
        update = self._muon if self.orthogonalised(self.names[i]) else self._adam

        @torch.no_grad()
        def job() -> None:
            update(i, grad, factor)

        return job

    def _adam(self, i: int, grad: Tensor, factor: float) -> None:
        kind = self.names[i].rsplit(".")[-1]
        rate = {"table": self.rates.table, "router": self.rates.router}.get(kind)
        if rate is None:
            rate = self.rates.norms if self.parameters[i].ndim == 1 else self.rates.matrices
        one, two = self.betas
        self.first[i].lerp_(grad, 1 - one)
        self.second[i].lerp_(grad.square(), 1 - two)
        size = (self.second[i] / (1 - two**self.count)).sqrt_().add_(1e-8)
        if kind in ("qkv", "out", "gate_up", "down"):
            self.parameters[i].mul_(1 - rate * factor * self.rates.decay)
        self.parameters[i].addcdiv_(self.first[i], size, value=-rate * factor / (1 - one**self.count))

    def _muon(self, i: int, grad: Tensor, factor: float) -> None:
        momentum = 0.95 if self.count > 200 else 0.85 + 0.1 * self.count / 200
        self.first[i].lerp_(grad, 1 - momentum)
        smooth = grad.lerp(self.first[i], momentum)  # Nesterov
        rate = self.rates.matrices * factor
        self.parameters[i].mul_(1 - rate * self.rates.decay)
        for part, target in zip(self._parts(i, smooth), self._parts(i, self.parameters[i].data), strict=True):
            rows, columns = part.shape[-2:]
            flat = part if rows <= columns else part.mT
            made = orthogonal(flat)
            size = max(rows, columns) ** 0.5  # makes the root mean square of the update 1
            target.add_(made if rows <= columns else made.mT, alpha=-rate * size)

    def _parts(self, i: int, tensor: Tensor) -> list[Tensor]:
        """The matrices that are orthogonal each on its own, as views (N, rows, columns)."""
        kind = self.names[i].rsplit(".")[-1]
        if kind == "qkv":
            heads, kv_heads, head = self.heads
            return [part[None] for part in tensor.split((heads * head, kv_heads * head, kv_heads * head))]
        if kind == "gate_up":
            return [*tensor.chunk(2, dim=1)]
        return [tensor[None] if tensor.ndim == 2 else tensor]
