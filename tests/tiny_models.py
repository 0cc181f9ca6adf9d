"""Tiny random models of the supported families, with a byte-level tokenizer, written as mlx-lm loads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "vocab_size": 320,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "mixtral": {
        "model_type": "mixtral",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 320,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
    },
}
ROUTERS = {"qwen3_moe": "mlp.gate", "mixtral": "block_sparse_moe.gate"}
FAMILIES = tuple(CONFIGS)
TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"


def build(family: str, *, quantize: int | None = None, seed: int = 0, **changes: Any) -> nn.Module:
    """A model with MLX's own random weights, the routers' four times as large so that routing is decided."""
    import importlib

    module = importlib.import_module(f"mlx_lm.models.{family}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict({**CONFIGS[family], **changes}))
    routers = [(p, v * 4) for p, v in tree_flatten(model.parameters()) if p.endswith(ROUTERS[family] + ".weight")]
    model.load_weights(routers, strict=False)
    if quantize is not None:
        nn.quantize(model, group_size=32, bits=quantize)
    model.eval()
    mx.eval(model.parameters())
    return model


def save(
    model: nn.Module,
    folder: Path,
    family: str,
    *,
    quantize: int | None = None,
    dtype: mx.Dtype = mx.float32,
    per_expert: bool = False,
    **changes: Any,
) -> Path:
    """Write a model as a folder `mlx_lm.load` takes; `per_expert` stores one tensor an expert, as on the hub."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**CONFIGS[family], **changes, "eos_token_id": 1}
    if quantize is not None:
        config["quantization"] = {"group_size": 32, "bits": quantize, "mode": "affine"}
    weights = {}
    for path, value in tree_flatten(model.parameters()):
        value = value.astype(dtype) if mx.issubdtype(value.dtype, mx.floating) else value
        if per_expert and ".switch_mlp." in path:
            weights.update(_split(path, value, family))
        else:
            weights[path] = value
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    _save_tokenizer(folder)
    return folder


def _split(path: str, value: mx.array, family: str) -> dict[str, mx.array]:
    prefix, rest = path.split(".switch_mlp.")
    projection, parameter = rest.split(".")
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"} if family == "mixtral" else {}
    return {
        f"{prefix}.experts.{e}.{names.get(projection, projection)}.{parameter}": value[e] for e in range(value.shape[0])
    }


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<eos>",
                "pad_token": "<pad>",
                "chat_template": TEMPLATE,
            }
        )
    )
