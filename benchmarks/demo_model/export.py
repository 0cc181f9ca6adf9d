"""The trained weights as a folder that mlx-lm loads: float16, or 8-bit in MLX's affine format. Needs MLX, no torch.

Run: python -m mlx_npumoe.benchmarks.demo_model.export --work FOLDER [--run NAME] --out OUT [--bits 8]. OUT receives
model.safetensors, config.json and the tokenizer's files.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from .shape import CONFIG

GROUP = 64  # weights that share a scale and a bias
HEADS = (CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"])


def renamed(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Weights of the training model under mlx-lm's `qwen3_moe` names, fused matrices taken apart."""
    found = {"model.embed_tokens.weight": weights["table"], "model.norm.weight": weights["norm"]}
    heads, kv_heads = (count * CONFIG["head_dim"] for count in HEADS)
    for layer in range(CONFIG["num_hidden_layers"]):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        q, k, v = mx.split(weights[ours + "qkv"], [heads, heads + kv_heads], axis=0)
        gate, up = mx.split(weights[ours + "gate_up"], 2, axis=1)
        parts = {
            "input_layernorm": weights[ours + "attention_norm"],
            "post_attention_layernorm": weights[ours + "experts_norm"],
            "self_attn.q_norm": weights[ours + "query_norm"],
            "self_attn.k_norm": weights[ours + "key_norm"],
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": weights[ours + "out"],
            "mlp.gate": weights[ours + "router"],
            "mlp.switch_mlp.gate_proj": gate,  # (E, F, D)
            "mlp.switch_mlp.up_proj": up,
            "mlp.switch_mlp.down_proj": weights[ours + "down"],  # (E, D, F)
        }
        found |= {f"{theirs}{name}.weight": value for name, value in parts.items()}
    return found


def converted(weights: dict[str, mx.array], bits: int | None) -> dict[str, mx.array]:
    """Float16 weights; with `bits`, every matrix as MLX's affine quantisation stores it, norms still float16."""
    found = {}
    for name, value in weights.items():
        value = value.astype(mx.float16)
        if bits is None or value.ndim == 1:
            found[name] = mx.contiguous(value)
            continue
        packed, scales, biases = mx.quantize(value, group_size=GROUP, bits=bits)
        stem = name.removesuffix("weight")
        found |= {name: packed, stem + "scales": scales, stem + "biases": biases}
    return found


def export(source: Path, tokenizer: Path, out: Path, bits: int | None) -> int:
    """Write the folder; its size in bytes."""
    weights = mx.load(str(source))
    assert isinstance(weights, dict)
    prefix = "model." if "model.table" in weights else ""  # a checkpoint also holds the optimiser
    plain = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
    out.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(out / "model.safetensors"), converted(renamed(plain), bits), {"format": "mlx"})
    config: dict[str, Any] = {**CONFIG, "torch_dtype": "float16"}
    if bits is not None:
        config["quantization"] = {"group_size": GROUP, "bits": bits, "mode": "affine"}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for path in sorted(tokenizer.glob("*.json")):
        shutil.copyfile(path, out / path.name)
    return sum(path.stat().st_size for path in out.iterdir())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="mlx_npumoe.benchmarks.demo_model.export", description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True, metavar="FOLDER", help="Where `train` wrote.")
    parser.add_argument("--run", default="run", metavar="NAME", help="Its --run.")
    parser.add_argument("--out", type=Path, required=True, metavar="OUT", help="The folder to write.")
    parser.add_argument("--bits", type=int, choices=(4, 8), help="Quantise. Default: float16.")
    args = parser.parse_args(argv)
    folder = args.work / args.run
    source = next((p for n in ("model", "checkpoint") if (p := folder / f"{n}.safetensors").exists()), None)
    if source is None:
        print(f"{folder} holds no trained weights; run the train command first.", file=sys.stderr)
        return 1
    if source.stem == "checkpoint":
        print(f"{folder} holds a checkpoint only: what is exported is an unfinished training.", file=sys.stderr)
    size = export(source, args.work / "tokenizer", args.out, args.bits)
    print(f"{args.out}: {size / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
