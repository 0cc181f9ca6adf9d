"""The shape of the demo model: a `qwen3_moe` configuration as mlx-lm and transformers read it. Knows no framework."""

from __future__ import annotations

from typing import Any

LONGEST = 1024  # tokens of the longest training sequences
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "intermediate_size": 256,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": LONGEST,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
