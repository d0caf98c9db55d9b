"""Models of `python -m benchmarks prefix-cache`: the tiny preset in several families of architectures."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from mlxrun.cli.bench.models import PRESETS, BenchModel, find_folder, open_model, read_config

PLAIN, WINDOWED, HYBRID, VISION = "plain", "windowed", "hybrid", "vision"
_TINY = PRESETS["tiny"]
# Layers with a sliding window, or recurrent layers, beside full attention.
_FAMILIES: dict[str, dict[str, Any]] = {
    WINDOWED: _TINY
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "sliding_window": 256,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 32,
        "rope_local_base_freq": 10000.0,
    },
    HYBRID: _TINY
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "full_attention_interval": 4,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 96,
        "shared_expert_intermediate_size": 96,
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.5,
    },
}


def get_family_config(family: str) -> dict[str, Any]:
    """config.json of the tiny windowed or hybrid model."""
    return dict(_FAMILIES[family])


def list_families(name: str) -> tuple[str, ...]:
    """The families of that preset, or the one of a local folder (`embedded`: the built-in model)."""
    if name == "tiny":
        return (PLAIN, *_FAMILIES, VISION)
    if name in PRESETS:
        return (PLAIN,)
    return (_detect_family(read_config(find_folder(name))),)


def _detect_family(config: Mapping[str, Any]) -> str:
    if "vision_config" in config:
        return VISION
    kinds = " ".join(config.get("layer_types") or ())
    if "linear" in kinds or "mamba" in kinds or any(key.startswith(("linear_", "mamba_")) for key in config):
        return HYBRID
    if "sliding" in kinds or (config.get("sliding_window") and config.get("use_sliding_window", True)):
        return WINDOWED
    return PLAIN


def open_family_model(name: str, seed: int, family: str) -> AbstractContextManager[BenchModel]:
    """The preset or local folder; the tiny preset has several families, its vision model is the embedded
    one."""
    if name in PRESETS and family == VISION:
        return open_model("embedded")
    return open_model(name, seed, _FAMILIES.get(family))
