"""The local executor: mlx-lm's own expert kernels."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn


class LocalExecutor:
    """Runs pairs through the site's own modules, whatever kernels, adapters or quantisation they carry."""

    def __init__(self, stock_class: type[nn.Module]) -> None:
        self._forward = stock_class.__call__

    def whole(self, module: nn.Module, x: mx.array, indices: mx.array) -> mx.array:
        """Stock's own graph for a whole call: `(..., D)`, `(..., K)` to `(..., K, D)`. Lazy."""
        return self._forward(module, x, indices)

    def rows(self, module: nn.Module, x: mx.array, tokens: mx.array, experts: mx.array) -> mx.array:
        """Single pairs: row i is expert `experts[i]` on `x[tokens[i]]`; `(N, D)`. Lazy."""
        return self._forward(module, x[tokens], experts[:, None]).squeeze(-2)
