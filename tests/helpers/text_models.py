"""Tiny float32 random-weight text models of real architectures, as folders mlx_lm loads.

`build(family, folder)` writes config.json, model.safetensors and a byte-level tokenizer; the weights depend
on the seed alone. Greedy output varies and is printable ASCII: the output rows of other tokens are zero, so a
model never ends by itself unless `ends=True` gives <|im_end|> its row back.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tiny.byte_tokenizer import TOKENS, save_tokenizer, write_json
from benchmarks.tiny.random_models import save_weights

_COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
_DELTA = {
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
_SSM = {
    "num_heads": 4,
    "head_dim": 32,
    "state_size": 16,
    "conv_kernel": 4,
    "n_groups": 2,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_limit": [0.001, 100.0],
    "time_step_rank": "auto",
    "layer_norm_epsilon": 1e-5,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 16,
        "rope_local_base_freq": 1000.0,
    },
    "qwen3_next": {
        **_DELTA,
        **_MOE,
        "num_experts": 4,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.5,
    },
    "qwen3_5": {
        **_DELTA,
        "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "mamba2": _SSM,
    "gpt_oss": {
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 64,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "nemotron_h": {
        "hybrid_override_pattern": ["M", "*", "-", "M", "*"],
        "attention_bias": False,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 2,
        "mlp_bias": False,
        "use_bias": False,
        "use_conv_bias": True,
        "layer_norm_epsilon": 1e-5,
    },
    "deepseek_v3": {
        **_MOE,
        "num_key_value_heads": 4,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_d_head": 16,
        "mamba_n_heads": 4,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "embedding_multiplier": 1.0,
        "lm_head_multiplier": 1.0,
        "key_multiplier": 1.0,
        "attention_out_multiplier": 1.0,
        "ssm_out_multiplier": 1.0,
        "mlp_multipliers": [1.0, 1.0],
        "ssm_multipliers": [1.0] * 5,
    },
    "qwen3": {},
    "mistral": {},
    "phi3": {},
    "olmo2": {},
    "lfm2": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention"] * 2,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    },
    "granitemoehybrid": {
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "attention"] * 2,
        "attention_bias": False,
        "embedding_multiplier": 1.0,
        "attention_multiplier": 0.25,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_proj_bias": False,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_conv_bias": True,
    },
    # gemma2: softcapped scores of its own. gemma4_text: layers share keys and call attention without a cache.
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma4_text": {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "sliding_window": 8,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 300,
        "use_double_wide_mlp": False,
    },
    # Position arithmetic that only takes a Python int: rows run one by one.
    "gpt_bigcode": {
        "n_embd": 64,
        "n_layer": 3,
        "n_inner": 96,
        "n_head": 4,
        "n_positions": 512,
        "max_position_embeddings": 512,
        "layer_norm_epsilon": 1e-5,
        "num_key_value_heads": 1,
    },
}

CORE = ("llama", "gemma3_text", "qwen3_next", "mamba2", "gpt_oss")
TEXT = tuple(CONFIGS)
# Prefixes of any length can be reused; the others need snapshots (gemma3_text, gpt_oss: past their window).
SLICEABLE = ("llama", "qwen3", "mistral", "phi3", "olmo2", "deepseek_v3", "gemma2", "gpt_bigcode")
# Where seed 0 gives a dull model.
_SEEDS = {"gemma2": 5, "gpt_bigcode": 2}


def build(family: str, folder: Path, seed: int | None = None, ends: bool = False) -> Path:
    """Write the tiny model of this family; the folder is what `model.path` may name."""
    config = {"model_type": family, **TOKENS, **_COMMON, **CONFIGS[family]}
    module = importlib.import_module("mlx_lm.models." + {"mistral": "llama"}.get(family, family))
    model = module.Model(module.ModelArgs.from_dict(dict(config)))
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(model, folder, _SEEDS.get(family, 0) if seed is None else seed, ends)
    write_json(folder / "config.json", config)
    save_tokenizer(folder)
    return folder


def prompts(seed: int, lengths: Iterable[int], vocab: int = 256) -> list[list[int]]:
    """One random prompt a length, of byte tokens unless `vocab` says more; different for every seed."""
    rng = np.random.default_rng([seed, 1])
    return [rng.integers(0, vocab, size=n).tolist() for n in lengths]
