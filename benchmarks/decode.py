"""Decode steps of an attached model against stock: interleaved pairs, ratio with a bootstrap interval.

Run: python -m mlx_npumoe.benchmarks.decode [--pairs 40] [--json]. A random Qwen3-MoE of 8 layers is made for it; what
is measured is what our stand-ins add to mlx-lm's own decode graph.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlx_npumoe import attach
from mlx_npumoe.calibration import RoutingProfile
from mlx_npumoe.preparation import plan_for, prepare
from mlx_npumoe.prepared import Prepared
from mlx_npumoe.recording import record
from mlx_npumoe.tensors import site_fingerprint, site_weights

LIMIT = 0.02  # a decode step may not be slower than stock's by more than this
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def random_models(folder: Path) -> tuple[nn.Module, nn.Module, Prepared]:
    """A random model written to `folder`, its twin, and what was prepared of it with every expert on the device."""
    from mlx_lm.models import qwen3_moe

    mx.random.seed(0)
    model = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(CONFIG))
    model.eval()
    mx.eval(model.parameters())
    (folder / "config.json").write_text(json.dumps(CONFIG))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    text = np.random.default_rng(0).integers(0, CONFIG["vocab_size"], 512).tolist()
    model_type, weights = site_weights(str(folder))
    profile = RoutingProfile(
        fingerprint=site_fingerprint(weights, model_type),
        model_type=model_type,
        source="random tokens",
        phase="prefill",
        sequence=512,
        sites=record(model, [text], progress=False),
    )
    plan = plan_for(profile, [w.site for w in weights], chunk=512, hot="all", min_chunk=32)
    twin = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(CONFIG))
    twin.eval()
    twin.load_weights(tree_flatten(model.parameters()))  # the same arrays
    return model, twin, prepare(str(folder), profile=profile, plan=plan, out=folder / "prepared", progress=False)


class Decoder:
    """A model with a prompt in its cache, taking decode steps as mlx-lm does."""

    def __init__(self, model: nn.Module, prompt: int = 32) -> None:
        from mlx_lm.models.cache import make_prompt_cache

        self.model = model
        self.cache = make_prompt_cache(model)
        mx.eval(model(mx.arange(prompt - 1)[None], cache=self.cache))
        self.token = mx.array([[1]])

    def step(self) -> float:
        """Seconds of one step, built and evaluated."""
        start = time.perf_counter()
        self.token = mx.argmax(self.model(self.token, cache=self.cache)[:, -1], axis=-1)[None]
        mx.eval(self.token)
        return time.perf_counter() - start


def measure(pairs: int, steps: int) -> dict[str, float]:
    """Steps of both in turns, a pair being `steps` of each: median ratio attached / stock, bootstrap 95 % interval."""
    with tempfile.TemporaryDirectory() as folder:
        stock, twin, prepared = random_models(Path(folder))
        times: dict[bool, list[float]] = {False: [], True: []}
        with attach(twin, prepared):
            decoders = {False: Decoder(stock), True: Decoder(twin)}
            for pair in range(-2, pairs):  # the first two warm up
                sums = {False: 0.0, True: 0.0}
                for step in range(steps):
                    for attached in (False, True) if step % 2 else (True, False):
                        sums[attached] += decoders[attached].step()
                if pair >= 0:
                    for attached, seconds in sums.items():
                        times[attached].append(seconds / steps)
    ratios = np.array(times[True]) / np.array(times[False])
    draws = np.random.default_rng(0).choice(ratios, (10_000, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return {
        "pairs": pairs,
        "steps": steps,
        "stock_ms": float(np.median(times[False])) * 1e3,
        "attached_ms": float(np.median(times[True])) * 1e3,
        "ratio": float(np.median(ratios)),
        "ratio_low": float(low),
        "ratio_high": float(high),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit code 1 where the interval lies above the limit."""
    parser = argparse.ArgumentParser(prog="mlx_npumoe.benchmarks.decode", description="Decode: attached against stock.")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=20, help="Decode steps a measurement.")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    result = measure(args.pairs, args.steps)
    enough = result["ratio_low"] <= 1 + LIMIT
    if args.json:
        print(json.dumps(result, indent=2))
        return int(not enough)
    print(
        f"decode step: stock {result['stock_ms']:.2f} ms, attached {result['attached_ms']:.2f} ms, ratio "
        f"{result['ratio']:.4f} (95 % interval {result['ratio_low']:.4f} to {result['ratio_high']:.4f}, "
        f"{args.pairs} interleaved pairs of {args.steps} steps, measured here)"
    )
    return int(not enough)


if __name__ == "__main__":
    raise SystemExit(main())
