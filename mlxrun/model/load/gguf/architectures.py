"""The supported architectures of GGUF files: their configs in mlx-lm's keys, and their weights.

GGUF files have llama.cpp's conventions. In `llama` files rotary pairs are neighbours (`rope_traditional`),
since query and key weights were permuted for that; in `qwen2` and `qwen3` files they are not. A feature that
is unknown here is refused by name if ignoring it would change answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrun.core.errors import ModelLoadError
from mlxrun.model.load.gguf.header import GROUP_SIZE, GgufHeader
from mlxrun.model.load.weight_check import load_checked_weights

ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"rope_traditional": True},
    "smollm3": {"rope_traditional": True},
    "qwen2": {},
    "qwen3": {},
}
# Q2_K and Q4_K are not among them: MLX reads half of the values of a Q4_K block wrongly.
TENSOR_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q6_K")
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ROPE_FACTORS = "rope_freqs.weight"
# Metadata that changes what is computed, which these architectures have in mlx-lm only without it.
_UNKNOWN = ("expert_count", "logit_scale", "embedding_scale", "residual_scale", "attention.scale")
_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")
_SCALINGS = ("none", "linear", "yarn")


def check_tensor_types(header: GgufHeader) -> None:
    """ModelLoadError that names the types of tensors that MLX does not read, or reads wrongly."""
    types = {tensor.type for tensor in header.tensors.values()} - set(TENSOR_TYPES)
    if types:
        raise ModelLoadError(
            f"{header.path}: its tensors are of type {', '.join(sorted(types))}; "
            f"GGUF files of {', '.join(TENSOR_TYPES)} can be read"
        )


def make_config(header: GgufHeader) -> dict[str, Any]:
    """The equivalent of config.json. ModelLoadError for an unknown architecture or feature."""
    name = header.read("general.architecture", str)
    if name not in ARCHITECTURES:
        raise ModelLoadError(
            f"{header.path}: a GGUF file of the architecture {name!r:.60}; those of "
            f"{', '.join(ARCHITECTURES)} can be read. Convert the original model with mlx_lm.convert instead"
        )
    if header.read("split.count", int, 1) > 1:
        raise ModelLoadError(f"{header.path}: one of several files; join them with llama-gguf-split --merge")
    for key in _UNKNOWN:
        if header.metadata.get(f"{name}.{key}"):
            raise ModelLoadError(f"{header.path}: {name}.{key} is set, which is not supported for GGUF files")
    heads = _require(header, f"{name}.attention.head_count", int)
    hidden = _require(header, f"{name}.embedding_length", int)
    head_dim = header.read(f"{name}.attention.key_length", int, hidden // heads)
    if header.read(f"{name}.rope.dimension_count", int, head_dim) != head_dim:
        raise ModelLoadError(f"{header.path}: only a part of each head is rotated, which is not supported")
    if "token_embd.weight" not in header.tensors:
        raise ModelLoadError(f"{header.path}: token_embd.weight is missing, so it is not a whole model")
    ends = [header.read(f"tokenizer.ggml.{key}", int) for key in _END_TOKENS]
    return {
        "model_type": name,
        "hidden_size": hidden,
        "num_hidden_layers": _require(header, f"{name}.block_count", int),
        "intermediate_size": _require(header, f"{name}.feed_forward_length", int),
        "num_attention_heads": heads,
        "num_key_value_heads": header.read(f"{name}.attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "rms_norm_eps": _require(header, f"{name}.attention.layer_norm_rms_epsilon", float),
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": _require(header, f"{name}.context_length", int),
        "rope_theta": header.read(f"{name}.rope.freq_base", float, 10_000.0),
        "rope_scaling": _read_rope_scaling(header, name),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "bos_token_id": header.read("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": [each for each in ends if each is not None],
        **ARCHITECTURES[name],
    }


def _require(header: GgufHeader, key: str, kind: type) -> Any:
    value = header.read(key, kind)
    if value is None:
        raise ModelLoadError(f"{header.path}: the metadata has no {key}")
    if value <= 0:
        raise ModelLoadError(f"{header.path}: {key} is {value}, which must be more than 0")
    return value


def _read_rope_scaling(header: GgufHeader, name: str) -> dict[str, Any] | None:
    """As llama.cpp reads it: a factor without a type is linear, and its old name is `scale_linear`."""
    keys = (f"{name}.rope.scaling.factor", f"{name}.rope.scale_linear")
    key = next((each for each in keys if header.metadata.get(each)), keys[0])
    kind = header.read(f"{name}.rope.scaling.type", str, "linear" if header.metadata.get(key) else "none")
    if kind not in _SCALINGS:
        raise ModelLoadError(f"{header.path}: rope scaling {kind!r:.60} is not supported for GGUF files")
    if kind == "none":
        return None
    factor = _require(header, key, float)
    context = header.read(f"{name}.context_length", int) if kind == "yarn" else None
    original = header.read(f"{name}.rope.scaling.original_context_length", int, context)
    more = {"original_max_position_embeddings": original} if original else {}
    return {"rope_type": kind, "factor": factor, **more}


def rename_tensor(name: str) -> str:
    """The name in mlx-lm of a GGUF tensor, or of its scales or biases. Unknown names are returned
    unchanged."""
    match name.split("."):
        case ["blk", layer, part, kind] if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
        case [part, kind] if part in _NAMES:
            return f"{_NAMES[part]}.{kind}"
    return name


def load_gguf_model(path: Path, config: Mapping[str, Any]) -> tuple[nn.Module, tuple[str, ...]]:
    """The model, quantized if the file is, and the names of tensors that it does not use. ModelLoadError if
    weights are missing."""
    from mlx_lm.utils import _get_classes

    model_class, args_class = _get_classes(dict(config))
    model = model_class(args_class.from_dict(dict(config)))
    try:
        tensors = mx.load(str(path))
    except RuntimeError as error:
        raise ModelLoadError(f"{path}: the tensors cannot be read: {error}") from error
    factors = tensors.pop(ROPE_FACTORS, None)
    weights = {rename_tensor(name): tensor for name, tensor in tensors.items()}
    if factors is not None:
        scale_rope(model, factors, config)
    _quantize(model, weights)
    return model, load_checked_weights(model, weights, path)


def _quantize(model: nn.Module, weights: Mapping[str, mx.array]) -> None:
    """Make quantized layers of those whose weights are; a file has several numbers of bits."""

    def choose(name: str, module: nn.Module) -> bool | dict[str, int]:
        scales = weights.get(f"{name}.scales")
        if scales is None or not hasattr(module, "to_quantized"):
            return False
        bits = weights[f"{name}.weight"].shape[-1] * 32 // (scales.shape[-1] * GROUP_SIZE)
        return {"group_size": GROUP_SIZE, "bits": bits}

    nn.quantize(model, group_size=GROUP_SIZE, bits=4, class_predicate=choose)


def scale_rope(model: nn.Module, factors: mx.array, config: Mapping[str, Any]) -> None:
    """Give each layer the factors of its rotary periods that the file has, as Llama 3.1 does."""
    from mlx_lm.models.rope_utils import Llama3RoPE

    dims, base = config["head_dim"], config["rope_theta"]
    if factors.shape != (dims // 2,):
        raise ModelLoadError(f"{ROPE_FACTORS} has the shape {factors.shape}, where {dims // 2} are needed")
    rope = Llama3RoPE(
        dims, config["max_position_embeddings"], config["rope_traditional"], base, {"factor": 1.0}
    )
    rope._freqs = base ** (mx.arange(0, dims, 2) / dims) * factors.astype(mx.float32)
    for layer in model.layers:
        if isinstance(layer.self_attn.rope, nn.RoPE):
            layer.self_attn.rope = rope
