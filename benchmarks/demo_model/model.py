"""The demo model in torch: a Qwen3 Mixture-of-Experts written for speed on a CPU. Knows no optimiser and no data.

Each (token, expert) pair is computed once: pairs are sorted by expert, an expert's rows are a view, and the gradients
of experts and of the vocabulary are written out by hand so that nothing of the size of all pairs is kept twice.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LOGIT_ROWS = 512  # rows of logits at a time: they stay in the last-level cache


class _Experts(torch.autograd.Function):
    """sum over the chosen experts of weight * down(silu(gate(x)) * up(x))."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """x (T, D), chosen (T, K), weights (T, K), gate_up (E, 2F, D), down (E, D, F) -> (T, D)."""
        (tokens, width), (experts, hidden, _) = x.shape, gate_up.shape
        order = torch.argsort(chosen.reshape(-1), stable=True)  # (T*K,) pairs by expert
        rows = order // chosen.shape[1]  # (T*K,) the token of each
        ends = torch.bincount(chosen.reshape(-1), minlength=experts).cumsum(0).tolist()
        spans = [(e, start, end) for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False)) if end > start]
        inputs = x.index_select(0, rows)  # (T*K, D)
        both = x.new_empty(len(rows), hidden)
        for e, start, end in spans:
            torch.mm(inputs[start:end], gate_up[e].t(), out=both[start:end])
        gate, up = both.chunk(2, dim=-1)
        product = F.silu(gate).mul_(up)  # (T*K, F)
        scale = weights.reshape(-1, 1).index_select(0, order)  # (T*K, 1)
        scaled = product * scale
        pairs = x.new_empty(len(rows), width)
        for e, start, end in spans:
            torch.mm(scaled[start:end], down[e].t(), out=pairs[start:end])
        ctx.save_for_backward(inputs, both, product, scaled, scale, gate_up, down, order, rows)
        ctx.spans, ctx.shape = spans, chosen.shape
        return x.new_zeros(tokens, width).index_add_(0, rows, pairs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        inputs, both, product, scaled, scale, gate_up, down, order, rows = ctx.saved_tensors
        d_pairs = grads[0].index_select(0, rows)  # (T*K, D)
        d_down, d_gate_up = torch.zeros_like(down), torch.zeros_like(gate_up)
        d_scaled = torch.empty_like(scaled)
        for e, start, end in ctx.spans:
            torch.mm(d_pairs[start:end], down[e], out=d_scaled[start:end])
            torch.mm(d_pairs[start:end].t(), scaled[start:end], out=d_down[e])
        d_weights = torch.empty_like(scale).index_copy_(0, order, (d_scaled * product).sum(-1, keepdim=True))
        d_product = d_scaled.mul_(scale)
        gate, up = both.chunk(2, dim=-1)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        d_both = torch.empty_like(both)
        d_gate, d_up = d_both.chunk(2, dim=-1)
        torch.mul(d_product, silu, out=d_up)
        torch.mul(d_product.mul_(up), sigmoid.add_(silu * (1 - sigmoid)), out=d_gate)
        d_inputs = d_pairs  # its values are no longer needed
        for e, start, end in ctx.spans:
            torch.mm(d_both[start:end].t(), inputs[start:end], out=d_gate_up[e])
            torch.mm(d_both[start:end], gate_up[e], out=d_inputs[start:end])
        d_x = grads[0].new_zeros(ctx.shape[0], inputs.shape[1]).index_add_(0, rows, d_inputs)
        return d_x, None, d_weights.reshape(ctx.shape), d_gate_up, d_down


class _VocabularyLoss(torch.autograd.Function):
    """Mean cross entropy plus z-loss of `x @ table.T`, a block of rows at a time; gradients made on the way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, targets: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
        """x (T, D), table (V, D), targets (T,) -> loss with z-loss, cross entropy alone; nats a token."""
        d_x, d_table = torch.empty_like(x), torch.zeros_like(table)
        total, entropy = 0.0, 0.0
        for start in range(0, len(x), LOGIT_ROWS):
            rows, chosen = x[start : start + LOGIT_ROWS], targets[start : start + LOGIT_ROWS, None]
            logits = rows @ table.t()
            top = logits.amax(-1, keepdim=True)
            picked = logits.gather(1, chosen)
            grad = logits.sub_(top).exp_()
            sums = grad.sum(-1, keepdim=True)
            log_sums = sums.log().add_(top)
            losses = log_sums - picked
            entropy += losses.sum().item()
            total += (losses + z_loss * log_sums.square()).sum().item()
            grad.mul_((1 + 2 * z_loss * log_sums) / (sums * len(x)))
            grad.scatter_add_(1, chosen, grad.new_full(chosen.shape, -1 / len(x)))
            torch.mm(grad, table, out=d_x[start : start + LOGIT_ROWS])
            d_table.addmm_(grad.t(), rows)
        ctx.save_for_backward(d_x, d_table)
        return x.new_tensor(total / len(x)), x.new_tensor(entropy / len(x))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        d_x, d_table = ctx.saved_tensors
        return d_x * grads[0], d_table * grads[0], None, None


class Layer(nn.Module):
    """Attention and experts of one layer, each before a norm and added to its input."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, self.head = config["hidden_size"], config["head_dim"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.chosen, self.eps = config["num_experts_per_tok"], config["rms_norm_eps"]
        experts, hidden = config["num_experts"], config["moe_intermediate_size"]
        self.attention_norm = nn.Parameter(torch.ones(width))
        self.query_norm = nn.Parameter(torch.ones(self.head))
        self.key_norm = nn.Parameter(torch.ones(self.head))
        self.experts_norm = nn.Parameter(torch.ones(width))
        self.qkv = nn.Parameter(_normal((self.heads + 2 * self.kv_heads) * self.head, width))
        self.out = nn.Parameter(torch.zeros(width, self.heads * self.head))
        self.router = nn.Parameter(_normal(experts, width, scale=0.5))
        self.gate_up = nn.Parameter(_normal(experts, 2 * hidden, width))
        self.down = nn.Parameter(torch.zeros(experts, width, hidden))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, T, D); cos, sin (T, head) -> (B, T, D), load-balancing loss, share of pairs of each expert (E,)."""
        batch, length, width = x.shape
        mixed = F.rms_norm(x, (width,), self.attention_norm, self.eps) @ self.qkv.t()
        mixed = mixed.view(batch, length, -1, self.head).transpose(1, 2)  # (B, heads, T, head)
        q, k, v = mixed.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        q = _rotated(F.rms_norm(q, (self.head,), self.query_norm, self.eps), cos, sin)
        k = _rotated(F.rms_norm(k, (self.head,), self.key_norm, self.eps), cos, sin)
        k = k.repeat_interleave(self.heads // self.kv_heads, dim=1)
        v = v.repeat_interleave(self.heads // self.kv_heads, dim=1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + attended.transpose(1, 2).reshape(batch, length, -1) @ self.out.t()
        rows = F.rms_norm(x, (width,), self.experts_norm, self.eps).view(-1, width)
        probabilities = (rows @ self.router.t()).softmax(-1)  # (B*T, E)
        weights, chosen = probabilities.topk(self.chosen, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        load = torch.bincount(chosen.reshape(-1), minlength=len(self.router)) / chosen.numel()
        balance = len(self.router) * (load * probabilities.mean(0)).sum()
        y = _Experts.apply(rows, chosen, weights, self.gate_up, self.down)
        return x + y.view(x.shape), balance, load


class Model(nn.Module):
    """The whole model. `losses` trains, `log_likelihoods` measures."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.table = nn.Parameter(torch.randn(config["vocab_size"], config["hidden_size"]) * 0.02)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.Parameter(torch.ones(config["hidden_size"]))
        head, longest = config["head_dim"], config["max_position_embeddings"]
        speeds = config["rope_theta"] ** -(torch.arange(0, head, 2) / head)
        angles = torch.outer(torch.arange(longest), speeds).repeat(1, 2)  # (longest, head)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def hidden(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """tokens (B, T) -> normed hidden states (B*T, D), mean load-balancing loss, loads (layers, E)."""
        x = F.embedding(tokens, self.table)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        balances, loads = [], []
        for layer in self.layers:
            x, balance, load = layer(x, cos, sin)
            balances.append(balance)
            loads.append(load)
        width = x.shape[-1]
        normed = F.rms_norm(x, (width,), self.norm, self.config["rms_norm_eps"]).view(-1, width)
        return normed, torch.stack(balances).mean(), torch.stack(loads)

    def losses(self, tokens: Tensor, targets: Tensor, z_loss: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """tokens, targets (B, T) -> loss with z-loss, cross entropy (nats a token), load-balancing loss, loads."""
        x, balance, loads = self.hidden(tokens)
        loss, entropy = _VocabularyLoss.apply(x, self.table, targets.reshape(-1), z_loss)
        return loss, entropy, balance, loads

    @torch.no_grad()
    def log_likelihoods(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """log p of each target in nats: tokens, targets (B, T) -> (B*T,)."""
        x, _, _ = self.hidden(tokens)
        parts = zip(x.split(LOGIT_ROWS), targets.reshape(-1).split(LOGIT_ROWS), strict=True)
        return torch.cat([-F.cross_entropy(rows @ self.table.t(), chosen, reduction="none") for rows, chosen in parts])


def _normal(*shape: int, scale: float = 1.0) -> Tensor:
    """Random weights that keep the size of their input (last axis)."""
    return torch.randn(*shape) * (scale / math.sqrt(shape[-1]))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, halves apart as in mlx-lm (`traditional=False`): x (B, heads, T, head)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
