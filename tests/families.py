"""Tiny random models of every family of mlx-lm that has MoE sites, as `config.json` would describe them.

`FAMILIES` names each file of `mlx_lm.models` that uses switch_layers, `WRAPPERS` the model types whose file or alias
leads to one of those; `UNSUPPORTED` says why a file has no model here. Every model has 64 channels, 320 tokens, at
least two MoE layers (after a dense one where the family has those) and top-2 of 8 experts (llama4: top-1), and runs
on any backend.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

Config = dict[str, Any]

WINDOW = 32  # sliding windows, smaller than a test's prompt
ROUTER_SCALE = 4  # so that routing is decided
ROUTER_NAMES = ("gate", "router")

SIZES: Config = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
EXPERTS: Config = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
LOCAL_EXPERTS: Config = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64}
SPARSE_STEP: Config = {"decoder_sparse_step": 1, "mlp_only_layers": [0]}
GROUPS: Config = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
MLA: Config = {
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
}
YARN: Config = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 4096,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
DEEPSEEK: Config = {
    **SIZES,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "attention_bias": False,
    "rope_scaling": None,
    **GROUPS,
}
DEEPSEEK_V3: Config = {**DEEPSEEK, **MLA, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
# A sparse attention that keeps every token: which ones it drops would flip with rounding, as routing does.
INDEXER: Config = {"index_head_dim": 32, "index_n_heads": 2, "index_topk": 4096}
QWEN: Config = {**SIZES, **EXPERTS, **SPARSE_STEP}
QWEN_LINEAR: Config = {
    **QWEN,
    "shared_expert_intermediate_size": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 3,
    "partial_rotary_factor": 0.5,
}
QWEN_35: Config = {**QWEN_LINEAR, "num_hidden_layers": 2, "full_attention_interval": 2}
BAILING: Config = {
    **SIZES,
    **EXPERTS,
    **GROUPS,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
BAILING_LINEAR: Config = {**BAILING, "layer_group_size": 3, "group_norm_size": 4}
GRANITE: Config = {
    **SIZES,
    **LOCAL_EXPERTS,
    "attention_bias": False,
    "logits_scaling": 1.0,
    "attention_multiplier": 0.25,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
}
KIMI: Config = {
    **SIZES,
    **MLA,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "num_expert_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "linear_attn_config": {
        "num_heads": 4,
        "head_dim": 16,
        "kda_layers": [1, 2],
        "full_attn_layers": [3],
        "short_conv_kernel_size": 4,
    },
}
LONGCAT: Config = {
    **SIZES,
    **MLA,
    "attention_method": "MLA",
    "attention_bias": False,
    "zero_expert_type": "identity",
    "zero_expert_num": 4,
    "n_routed_experts": 8,
    "moe_topk": 2,
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 64,
    "num_layers": 2,
    "num_hidden_layers": 2,
    "routed_scaling_factor": 1.5,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
SLIDING = ["sliding_attention", "sliding_attention", "full_attention"]
ROPE: Config = {"rope_type": "default", "rope_theta": 10000.0}

FAMILIES: dict[str, Config] = {
    "Klear": {**QWEN, "n_shared_experts": 1, "attention_bias": False},
    "afmoe": {
        **SIZES,
        **EXPERTS,
        "layer_types": SLIDING,
        "num_dense_layers": 1,
        "n_group": 4,
        "topk_group": 2,
        "sliding_window": WINDOW,
    },
    "bailing_hybrid": {**BAILING_LINEAR, **MLA, "partial_rotary_factor": 0.5},
    "bailing_moe": BAILING,
    "bailing_moe_linear": BAILING_LINEAR,
    "bailing_moe_v3": {
        **BAILING_LINEAR,
        **MLA,
        "model_type": "bailing_hybrid",
        "architectures": ["BailingMoeV3ForCausalLM"],
        "moe_shared_expert_intermediate_size": 32,
    },
    "deepseek": DEEPSEEK,
    "deepseek_v2": {**DEEPSEEK, **MLA, "rope_scaling": YARN, "topk_method": "group_limited_greedy"},
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v32": {**DEEPSEEK_V3, **INDEXER},
    "deepseek_v41": {
        **DEEPSEEK,
        **INDEXER,
        "head_dim": 40,  # and the next: no multiple of 32, so that keys and values aren't rounded to FP8
        "index_head_dim": 40,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "o_groups": 2,
        "o_lora_rank": 32,
        "scoring_func": "sqrtsoftplus",
        "swiglu_limit": 0.5,
        "sliding_window": WINDOW,
        "compress_ratios": [0, 4, 4],
        "kv_source_layer_ids": [1],
        "index_source_layer_ids": [1],
        "hc_mult": 2,
        "hc_sinkhorn_iters": 3,
    },
    "dots1": DEEPSEEK,
    "ernie4_5_moe": {
        **SIZES,
        "use_bias": False,
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_intermediate_size": 64,
        "moe_layer_start_index": 1,
        "moe_num_shared_experts": 1,
    },
    "exaone_moe": {
        **SIZES,
        **EXPERTS,
        **GROUPS,
        "num_shared_experts": 1,
        "sliding_window": WINDOW,
        "layer_types": SLIDING,
        "is_moe_layer": [False, True, True],
    },
    "gemma4_text": {
        **SIZES,
        "num_hidden_layers": 2,
        "layer_types": SLIDING[1:],
        "num_attention_heads": 8,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 320,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "sliding_window": WINDOW,
        "tie_word_embeddings": True,
    },
    "glm4_moe": {**DEEPSEEK, "use_qk_norm": True, "partial_rotary_factor": 0.5},
    "glm4_moe_lite": {**DEEPSEEK_V3, "num_nextn_predict_layers": 0},
    "gpt_oss": {**SIZES, **LOCAL_EXPERTS, "sliding_window": WINDOW, "layer_types": SLIDING},
    "granitemoe": GRANITE,
    "granitemoehybrid": {
        **GRANITE,
        "shared_intermediate_size": 32,
        "layer_types": ["mamba", "attention", "mamba"],
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_proj_bias": False,
        "mamba_conv_bias": True,
    },
    "hunyuan": {
        **SIZES,
        "attention_bias": False,
        "moe_topk": 2,
        "num_experts": 8,
        "num_shared_expert": 1,
        "moe_intermediate_size": 64,
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
        "use_cla": False,
        "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
        "cla_share_factor": 2,
    },
    "jamba": {
        **SIZES,
        "num_hidden_layers": 4,
        "intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
    },
    "kimi_k3": {
        "text_config": {
            **KIMI,
            "model_type": "kimi_linear",
            "hidden_act": "situ",
            "activation_situ_beta": 1.5,
            "activation_situ_linear_beta": 2.0,
            "attn_res_block_size": 2,
            "routed_expert_hidden_size": 32,
            "routed_scaling_factor": 8.0,
        },
    },
    "kimi_linear": {**KIMI, "model_max_length": 4096},
    "laguna": {
        **SIZES,
        **EXPERTS,
        "shared_expert_intermediate_size": 32,
        "sliding_window": WINDOW,
        "layer_types": SLIDING,
        "moe_routed_scaling_factor": 1.5,
        "moe_router_logit_softcapping": 5.0,
        "moe_router_score_func": "sqrtsoftplus",
        "rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE},
    },
    "lfm2_moe": {
        **SIZES,
        **EXPERTS,
        "use_expert_bias": True,
        "num_dense_layers": 1,
        "norm_eps": 1e-6,
        "conv_bias": False,
        "conv_L_cache": 3,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "llama4": {
        "text_config": {
            **SIZES,
            **LOCAL_EXPERTS,
            "model_type": "llama4_text",
            "num_experts_per_tok": 1,
            "num_hidden_layers": 4,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 96,
            "attention_bias": False,
            "attention_chunk_size": 64,
            "use_qk_norm": True,
            "rope_scaling": None,
        },
    },
    "longcat_flash": LONGCAT,
    "mellum": {
        **SIZES,
        **EXPERTS,
        "sliding_window": WINDOW,
        "layer_types": SLIDING,
        "rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE},
    },
    "mimo_v2_flash": {
        **DEEPSEEK,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "hybrid_layer_pattern": [0, 1, 1],
        "moe_layer_freq": [0, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        "layernorm_epsilon": 1e-6,
        "swa_rope_theta": 10000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "v_head_dim": 16,
        "swa_v_head_dim": 16,
        "partial_rotary_factor": 0.5,
    },
    "minimax": {**SIZES, **LOCAL_EXPERTS, "shared_intermediate_size": 0, "rotary_dim": 8},
    "minimax_m3_vl": {
        "text_config": {
            **SIZES,
            **LOCAL_EXPERTS,
            "dense_intermediate_size": 96,
            "shared_intermediate_size": 32,
            "moe_layer_freq": [0, 1, 1],
            "swiglu_limit": 0.5,
            "routed_scaling_factor": 1.5,
        },
    },
    "mistral4": {
        **DEEPSEEK,
        **MLA,
        "head_dim": None,
        "rope_parameters": {**YARN, "rope_type": "yarn", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1},
    },
    "mixtral": {**SIZES, **LOCAL_EXPERTS},
    "nemotron_h": {
        **SIZES,
        "num_hidden_layers": 4,
        "hybrid_override_pattern": ["M", "E", "*", "E"],
        "attention_bias": False,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 2,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-6,
        "use_bias": False,
        "use_conv_bias": True,
        "moe_intermediate_size": 96,
        "moe_shared_expert_intermediate_size": 32,
        "moe_latent_size": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        **GROUPS,
    },
    "olmoe": {**SIZES, **EXPERTS, "intermediate_size": 64},
    "phimoe": {
        **SIZES,
        **LOCAL_EXPERTS,
        "original_max_position_embeddings": 4096,
        "rope_scaling": {
            "type": "longrope",
            "long_factor": [1.0] * 8,
            "short_factor": [1.0] * 8,
            "long_mscale": 1.0,
            "short_mscale": 1.0,
        },
    },
    "phixtral": {
        "num_vocab": 320,
        "vocab_size": 320,
        "model_dim": 64,
        "num_heads": 4,
        "num_layers": 2,
        "rotary_dim": 8,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
    },
    "qwen2_moe": {**SIZES, **EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_moe": QWEN,
    "qwen3_next": QWEN_LINEAR,
    "step3p5": {
        **SIZES,
        "num_attention_groups": 2,
        "sliding_window": WINDOW,
        "layer_types": SLIDING,
        "partial_rotary_factors": [1.0, 1.0, 0.5],
        "rope_theta": [10000.0, 10000.0, 10000.0],
        "attention_other_setting": {"num_attention_heads": 4, "num_attention_groups": 2},
        "moe_num_experts": 8,
        "moe_top_k": 2,
        "moe_intermediate_size": 64,
        "share_expert_dim": 32,
        "moe_layers_enum": "1,2",
        "swiglu_limits": [0.0, 0.0, 0.25],
    },
}
WRAPPERS: dict[str, Config] = {
    "gemma4": {"vocab_size": 320, "text_config": {**FAMILIES["gemma4_text"], "model_type": "gemma4_text"}},
    "glm_moe_dsa": {**DEEPSEEK_V3, **INDEXER, "rope_parameters": ROPE},
    "kimi_k25": {"text_config": {**DEEPSEEK_V3, "model_type": "kimi_k2"}},
    "kimi_vl": {"text_config": {**DEEPSEEK_V3, "model_type": "deepseek_v3"}},
    "longcat_flash_ngram": {**LONGCAT, "ngram_vocab_size_ratio": 2, "emb_neighbor_num": 3, "emb_split_num": 2},
    "mistral3": {"text_config": {**FAMILIES["mistral4"], "model_type": "mistral4"}},
    "qwen3_5": {"text_config": {**QWEN_35, "model_type": "qwen3_5_text"}},
    "qwen3_5_moe": {"text_config": {**QWEN_35, "model_type": "qwen3_5_moe_text"}},
    "qwen3_vl_moe": {"text_config": {**QWEN, "model_type": "qwen3_moe"}},
    "solar_open": {**DEEPSEEK, "partial_rotary_factor": 1.0},
}
UNSUPPORTED: dict[str, str] = {
    "muse_spark": "its attention, router and weighted sum are Metal kernels: the model runs on Apple's GPU only",
    "prism_hadamard_qwen35": "takes only 2-bit Hadamard packs with a list of packed modules, made from dense models",
}


def config(name: str) -> Config:
    """The `config.json` of a family, of a wrapper or of an alias (`kimi_k2`) of either."""
    from mlx_lm.utils import MODEL_REMAPPING

    known = FAMILIES | WRAPPERS
    found = known[name if name in known else MODEL_REMAPPING[name]]
    return copy.deepcopy({"model_type": name, **found})  # some of mlx-lm's classes change what they are given


def names() -> list[str]:
    """Every name `build` takes: the families, the wrappers, and mlx-lm's aliases of those."""
    from mlx_lm.utils import MODEL_REMAPPING

    known = [*FAMILIES, *WRAPPERS]
    return known + [alias for alias, name in MODEL_REMAPPING.items() if name in known]


def build(name: str, seed: int = 0, **changes: Any) -> nn.Module:
    """A model of `name` with random float32 weights, its routers' four times as large so that routing is decided.

    What MLX starts at zero (routers, biases) is drawn too. `changes` replace entries of the configuration.
    """
    from mlx_lm.utils import _get_classes

    described = config(name) | changes
    mx.random.seed(seed)
    model_class, args_class = _get_classes(described)
    model = model_class(args_class.from_dict(described))
    model.set_dtype(mx.float32)
    routers = tuple(path + "." for path in router_paths(model).values())
    drawn = {}
    for path, value in tree_flatten(model.parameters()):
        if not mx.issubdtype(value.dtype, mx.floating):
            continue
        if not value.any().item():
            scale = 0.05 if value.ndim < 2 or path.endswith("bias") else value.shape[-1] ** -0.5
            drawn[path] = value = mx.random.uniform(-scale, scale, value.shape)
        if value.ndim == 2 and path.startswith(routers):
            drawn[path] = value * ROUTER_SCALE
    model.load_weights(list(drawn.items()), strict=False)
    model.eval()
    mx.eval(model.parameters())
    return model


def router(model: nn.Module, site_path: str) -> tuple[nn.Module, str]:
    """The module whose output decides a site's routing, as its owner and its name there.

    It is called once for each call of the site, and returns the logits or `(indices, weights)`: returning what it
    returned before makes the block choose the same experts.
    """
    owner, name = _router_path(model, site_path)
    return _module(model, owner), name


def parent(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module that holds the one at `path`, and its name there."""
    owner, _, name = path.rpartition(".")
    return _module(model, owner), name


def router_paths(model: nn.Module) -> dict[str, str]:
    """Each site's router, by paths, in layer order."""
    from mlx_npumoe.sites import find_sites

    return {site.path: ".".join(_router_path(model, site.path)) for site in find_sites(model)}


def _router_path(model: nn.Module, site_path: str) -> tuple[str, str]:
    owner = site_path
    while "." in owner:
        owner = owner.rpartition(".")[0]
        block = _module(model, owner)
        for name in ROUTER_NAMES:
            if isinstance(block, nn.Module) and isinstance(block.get(name), nn.Module):
                return owner, name
    raise LookupError(f"no module named {' or '.join(ROUTER_NAMES)} around {site_path}")


def _module(model: nn.Module, path: str) -> Any:
    node: Any = model
    for part in path.split("."):
        node = node[int(part)] if isinstance(node, list) else node[part]
    return node


@cache
def switch_files() -> tuple[str, ...]:
    """The files of `mlx_lm.models` that use switch_layers, without suffix."""
    return tuple(sorted(name for name, imported in _imports().items() if "switch_layers" in imported))


@cache
def model_types() -> Mapping[str, str]:
    """Every model type mlx-lm loads that may have sites, and the file of its class.

    A type counts where its file uses switch_layers or imports, over any number of steps, a file that does.
    """
    from mlx_lm.utils import MODEL_REMAPPING

    imports, reached = _imports(), set(switch_files())
    while more := {name for name, imported in imports.items() if imported & reached} - reached:
        reached |= more
    aliases = {alias: name for alias, name in MODEL_REMAPPING.items() if name in reached}
    return {**{name: name for name in sorted(reached)}, **aliases}


@cache
def _imports() -> Mapping[str, frozenset[str]]:
    """For each file of `mlx_lm.models`, the files beside it that it imports."""
    import mlx_lm.models

    found = {}
    for file in Path(mlx_lm.models.__path__[0]).glob("*.py"):
        imported: set[str] = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                imported |= {node.module} if node.module else {alias.name for alias in node.names}
        found[file.stem] = frozenset(imported)
    return found
