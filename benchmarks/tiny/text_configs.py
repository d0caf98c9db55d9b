"""Tiny configs of mlx-lm's text models, made from the arguments that each model's own `ModelArgs` declares.

SIZES gives small values by the name of an argument; an argument that is not in it keeps its default, and one
without a default gets a value of its type. OVERRIDES is for families whose arguments must fit each other.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import types
import typing
from pathlib import Path
from typing import Any

from benchmarks.tiny.byte_tokenizer import TOKENS, VOCAB

_ALIASES: dict[str, tuple[str, ...]] = {
    "hidden_size": ("d_model", "n_embd", "dim", "model_dim", "hidden_dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "num_transformer_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "linear_num_value_heads", "mamba_n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_kv_heads", "linear_num_key_heads"),
    "head_dim": ("hidden_size_per_head", "linear_key_head_dim", "linear_value_head_dim", "kv_channels"),
    "intermediate_size": ("n_inner", "ffn_hidden_size", "ff_intermediate_size", "shared_intermediate_size"),
    "moe_intermediate_size": ("expert_ffn_hidden_size", "shared_expert_intermediate_size"),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("moe_topk", "moe_k", "moe_top_k", "num_experts_per_token", "top_k_experts"),
    "max_position_embeddings": ("n_positions", "n_ctx", "model_max_length", "block_size"),
    "sliding_window": ("window_size", "sliding_window_size", "attention_window_size"),
    "state_size": ("ssm_state_size", "mamba_d_state"),
    "conv_kernel": ("mamba_d_conv", "linear_conv_kernel_dim", "conv1d_width", "short_conv_kernel_size"),
}
_MAIN: dict[str, Any] = {
    **TOKENS,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
    "sliding_window": 8,
    "state_size": 16,
    "conv_kernel": 4,
}
SIZES: dict[str, Any] = {
    **_MAIN,
    **{alias: _MAIN[name] for name, aliases in _ALIASES.items() for alias in aliases},
}
SIZES |= {
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_freq": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "n_group": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "num_shared_expert": 1,
    "moe_num_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 32,
    "share_expert_dim": 32,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_head_dim": 16,
    "index_n_heads": 4,
    "index_topk": 8,
    "sliding_window_pattern": 2,
    "layer_group_size": 2,
    "full_attention_interval": 2,
    "query_pre_attn_scalar": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_d_head": 16,
    "mamba_d_ssm": 64,
    "mamba_n_groups": 1,
    "n_groups": 2,
    "mamba_expand": 2,
    "time_step_limit": [0.001, 100.0],
    "time_step_rank": "auto",
    "mamba_dt_rank": 8,
    "conv_L_cache": 3,
    "block_dim": 64,
    "block_ff_dim": 96,
    "block_multiple_of": 16,
    "norm_topk_prob": True,
    "partial_rotary_factor": 0.5,
    "rotary_dim": 8,
    "attn_layer_offset": 1,
    "attn_layer_period": 2,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "zero_expert_type": "identity",
    "scale_depth": 1.4,
    "dim_model_base": 64,
    "logits_soft_cap": 30.0,
    "final_logit_softcapping": 30.0,
}


_SWA = ["sliding_attention", "full_attention"] * 2
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_DELTA = {"full_attention_interval": 2, "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}
_CONV = ["conv", "full_attention"] * 2
_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
}
KDA = {
    "kda_layers": [1, 3],
    "full_attn_layers": [2, 4],
    "num_heads": 4,
    "head_dim": 16,
    "short_conv_kernel_size": 4,
}
GEMMA4_LAYERS = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "num_experts": None,
    "use_double_wide_mlp": False,
}
_LLAMA4 = {"num_experts_per_tok": 1, "intermediate_size_mlp": 96, "attention_chunk_size": 8}
_LLAMA4_SCALING = {
    "rope_theta": 10000.0,
    "rope_type": "yarn",
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 16,
}
_LONGCAT = {"mla_scale_q_lora": True, "mla_scale_kv_lora": True}
# What the general way does not find out: values that must fit each other. "text_config" is merged.
OVERRIDES: dict[str, dict[str, Any]] = {
    "afm7": {"num_layers": 4, "num_kv_reuse_layers": 2, "num_hidden_layers": 4},
    "baichuan_m1": {"conv_window": 2, "sliding_window_layers": [0, 2]},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek_v2": {"rope_scaling": _YARN},
    "exaone4": {"sliding_window_pattern": "LG", "rope_scaling": None, "layer_types": _SWA},
    "exaone_moe": {"layer_types": _SWA, "is_moe_layer": [False, True, True, True]},
    "gear": {"layer_types": ["full_attention", "sliding_attention"] * 2},
    "lfm2": {"layer_types": _CONV, "intermediate_size": 96},
    "lfm2_moe": {"layer_types": _CONV},
    "lfm2-vl": {"text_config": {"layer_types": _CONV, "intermediate_size": 96}},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "mamba_d_head": 32},
    "mamba2": {"head_dim": 32, "intermediate_size": 128},
    "mamba": {"time_step_rank": 8},
    "nemotron_h": {
        "hybrid_override_pattern": ["M", "*", "-", "E", "M"],
        "num_hidden_layers": 5,
        "routed_scaling_factor": 1.0,
        "moe_shared_expert_intermediate_size": 32,
    },
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "qwen3_5": {"text_config": _DELTA},
    "qwen3_5_moe": {"text_config": _DELTA},
    "gemma3n": {
        "text_config": {
            "num_kv_shared_layers": 2,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.0, 0.0],
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "altup_num_inputs": 2,
            "altup_active_idx": 0,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "laurel_rank": 8,
        }
    },
    "gemma4": {"text_config": GEMMA4_LAYERS, "vocab_size": VOCAB},
    "gemma4_text": GEMMA4_LAYERS,
    "glm_moe_dsa": {"rope_parameters": ROPE, "topk_method": "noaux_tc"},
    "hunyuan": {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
    "kimi_k3": {
        "text_config": {"linear_attn_config": KDA, "activation_situ_beta": 1.0, "num_key_value_heads": 4}
    },
    "kimi_linear": {"linear_attn_config": KDA, "num_key_value_heads": 4},
    "llama4": {"text_config": _LLAMA4},
    "llama4_text": {"no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": _LONGCAT,
    "mellum": {"rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE}},
    "mimo_v2_flash": {
        "topk_method": "noaux_tc",
        "moe_layer_freq": [0, 1, 1, 1],
        "hybrid_layer_pattern": [1, 0, 1, 0],
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "swa_v_head_dim": 16,
        "add_swa_attention_sink_bias": True,
        "routed_scaling_factor": 1.0,
    },
    "minicpm3": {"rope_scaling": {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4}},
    "minimax_m3_vl": {"text_config": {"moe_layer_freq": [0, 1, 1, 1]}},
    "ministral3": {"rope_parameters": _YARN | _LLAMA4_SCALING},
    "mistral4": {"rope_parameters": _YARN | _LLAMA4_SCALING},
    "mistral3": {"text_config": {"model_type": "llama"}},
    "muse_spark": {
        "text_config": {
            "num_shared_experts": 0,
            "rope_parameters": ROPE,
            "layer_rope_theta": [10000.0, 0, 10000.0, 0],
            "moe_hidden_size": 64,
        }
    },
    "nemotron-nas": {"block_configs": [{"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 2.0}}] * 4},
    "openelm": {
        "num_query_heads": [4, 4, 4, 4],
        "num_kv_heads": [2, 2, 2, 2],
        "ffn_multipliers": [1.0, 1.5, 2.0, 2.0],
        "ffn_dim_divisor": 16,
    },
    "phixtral": {"num_vocab": VOCAB},
    "plamo": {"n_shared_head": 2},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "spark2_5": {"rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE}},
}


def list_text_families() -> list[str]:
    """The modules of mlx-lm that define a model, by name."""
    spec = importlib.util.find_spec("mlx_lm.models")
    assert spec is not None and spec.submodule_search_locations is not None
    folder = Path(next(iter(spec.submodule_search_locations)))
    files = ((file, file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.py")))
    return [f.stem for f, text in files if "class ModelArgs" in text and "class Model(" in text]


def make_text_config(family: str) -> dict[str, Any]:
    """The config.json of a tiny model of this family. Raises whatever the library's module raises."""
    module = importlib.import_module(f"mlx_lm.models.{family}")
    config = fill_arguments(module.ModelArgs)
    own = dict(OVERRIDES.get(family, {}))
    if "text_config" in {field.name for field in dataclasses.fields(module.ModelArgs)}:
        inner = _find_text_arguments(module)
        config["text_config"] = fill_arguments(inner) | own.pop("text_config", {})
    return TOKENS | config | own | {"model_type": family}


def _find_text_arguments(module: Any) -> type:
    """The arguments of the text part: named by the module, or those of the module it imports."""
    for name in ("TextArgs", "TextConfig", "TextModelArgs"):
        if hasattr(module, name):
            return getattr(module, name)
    parts = [m for m in vars(module).values() if hasattr(m, "ModelArgs") and hasattr(m, "Model")]
    if parts:
        return parts[0].ModelArgs
    return _find_text_arguments(importlib.import_module(module.Model.__mro__[1].__module__))


def fill_arguments(arguments: type) -> dict[str, Any]:
    """A value for each argument that has a small one, and for those that have no default."""
    hints = typing.get_type_hints(arguments)
    names = {field.name for field in dataclasses.fields(arguments)}
    config: dict[str, Any] = {}
    for field in dataclasses.fields(arguments):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if field.name == "layer_types" and any("window" in name for name in names):
            config[field.name] = _SWA
        elif field.name in SIZES:
            config[field.name] = SIZES[field.name]
        elif required:
            config[field.name] = _guess(field.name, hints[field.name])
    return config


def _guess(name: str, hint: Any) -> Any:
    """A value of the type of an argument without a default."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if type(None) in kinds:
        return None
    kind = typing.get_origin(kinds[0]) or kinds[0]
    if kind is float:
        return 1e-5 if "eps" in name else 1.0
    return {int: 4, bool: False, str: "", list: [], dict: {}}.get(kind)
