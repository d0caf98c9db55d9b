"""Values of the vision-language families' configs that have to fit each other, by what they are for."""

from __future__ import annotations

from typing import Any

from benchmarks.tiny.byte_tokenizer import TOKEN_ID, VOCAB
from benchmarks.tiny.text_configs import GEMMA4_LAYERS, KDA, OVERRIDES, ROPE
from benchmarks.tiny.vision_media import END, IMAGE, SIDE, START

MROPE = {"rope_scaling": {"type": "default", "rope_type": "default", "mrope_section": [4, 2, 2]}}
CLIP = {"model_type": "clip_vision_model"}
SIGLIP = {"model_type": "siglip_vision_model"}
DEFAULT = {"vision_feature_select_strategy": "default", "vision_feature_layer": -2}
LLAMA4 = {"num_experts_per_tok": 1, "intermediate_size_mlp": 96, "attention_chunk_size": 8}
LLAMA4_TOWER = {
    "model_type": "llama4_vision_model",
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "vision_output_dim": 32,
    "intermediate_size": 128,
    "pixel_shuffle_ratio": 0.5,
}
GEMMA4 = {"model_type": "gemma4_text", **GEMMA4_LAYERS}
GEMMA3N = {
    "model_type": "gemma3n_text",
    "intermediate_size": [96] * 6,
    **OVERRIDES["gemma3n"]["text_config"],
}
# Tokens of images, then those of sounds, are behind those of text.
GEMMA3N_TOWER = {
    "model_type": "gemma3n_vision",
    "hidden_size": 32,
    "vocab_size": 14,
    "vocab_offset": TOKEN_ID["<|unused_0|>"],
}
GEMMA3N_OWN = {
    "audio_soft_tokens_per_image": 24,
    "audio_config": {
        "model_type": "gemma3n_audio",
        "input_feat_size": 16,
        "hidden_size": 32,
        "conf_num_attention_heads": 2,
        "conf_num_hidden_layers": 1,
        "sscp_conv_channel_size": [8, 4],
        "vocab_size": 3,
        "vocab_offset": TOKEN_ID["<|audio_start|>"],
    },
}
GEMMA4_TOWER = {
    "model_type": "gemma4_vision",
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 16,
    "pooling_kernel_size": 2,
    "default_output_length": 4,
    "position_embedding_size": 16,
}
FLAT: dict[str, Any] = {"deepstack_visual_indexes": []}
IDEFICS: dict[str, Any] = {"text": {"model_type": "llama"}, "own": {"scale_factor": 2}}
PADDLE = MROPE | {"hidden_size": 1024, "head_dim": 16}  # its projector has that width
LFM2 = {
    "model_type": "lfm2",
    "layer_types": ["conv", "full_attention"] * 2,
    "full_attn_idxs": [1, 3],
    "block_dim": 64,
    "conv_dim": 64,
    "conv_dim_out": 64,
    "block_ff_dim": 96,
    "num_heads": 4,
}
LFM2_TOWER = {"model_type": "lfm2_vl", "num_patches": 16}
AUDIO = {
    "attention_dim": 32,
    "attention_heads": 2,
    "num_blocks": 1,
    "linear_units": 32,
    "ext_pw_out_channel": 32,
    "depthwise_seperable_out_channel": 32,
    "conv_channels": 32,
}
DEEPSEEK = {"model_type": "deepseek_v2", "qk_nope_head_dim": 0}
DEEPSEEK_TOWER = {"layers": 2, "width": 32, "model_type": "vision"}
DEEPSEEK_OWN = {
    "projector_config": {
        "projector_type": "downsample_mlp_gelu",
        "input_dim": 32,
        "n_embed": 64,
        "depth": 2,
        "mlp_ratio": 1,
        "downsample_ratio": 2,
    }
}
PERCEIVER = {
    "model_type": "idefics2",
    "num_key_value_heads": 2,
    "resampler_depth": 1,
    "resampler_head_dim": 16,
    "resampler_n_heads": 2,
    "resampler_n_latents": 4,
}
IDEFICS2: dict[str, Any] = {
    "text": {"model_type": "mistral"},
    "tower": {"model_type": "idefics2"},
    "own": {"perceiver_config": PERCEIVER},
}
GRID = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE], [3 * SIDE, SIDE], [SIDE, 3 * SIDE]]
ANYRES = {
    "image_grid_pinpoints": GRID,
    "vision_feature_select_strategy": "full",
    "vision_feature_layer": -1,
}
FALCON = {
    **{"dim": 64, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "ffn_dim": 96},
    **{f"image_reg_{i}_token_id": TOKEN_ID[f"<|unused_{i}|>"] for i in range(1, 5)},
    **{"image_cls_token_id": START, "img_end_id": END, "spatial_patch_size": 16, "max_seq_len": 1024},
}
PALIGEMMA = {"model_type": "gemma", "num_image_tokens": 16}
MLLAMA = {"model_type": "mllama_text_model", "cross_attention_layers": [1]}
PIXTRAL = {"model_type": "pixtral", "image_size": 3 * SIDE}
MLLAMA_TOWER = {
    "max_num_tiles": 1,
    "num_global_layers": 1,
    "intermediate_layers_indices": [0],
    "vision_output_dim": 64,
}

# Families with their own names for sizes, and those whose parts are not where others have them.
COMPASS = {"rope_parameters": ROPE | {"mrope_section": [4, 2, 2]}}
ERNIE = {"mrope_section": [3, 3, 2], "moe_num_experts": 4}
YOUTU_TOWER = {"window_size": 32, "fullatt_block_indexes": [1]}
PLAMO_TOWER = SIGLIP | {"image_feature_size": 32, "image_proj_hidden_size": 64}
UNIFIED_TOWER = {
    "model_patch_size": 8,
    "mm_embed_dim": 64,
    "mm_posemb_size": 16,
    "num_soft_tokens": 16,
    "output_proj_dims": 64,
}
MIMO = {
    "hybrid_layer_pattern": [1, 0, 1, 0],
    "moe_layer_freq": [0, 1, 1, 1],
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "swa_v_head_dim": 16,
    "routed_scaling_factor": 1.0,
    "attention_chunk_size": 8,
}
MIMO_AUDIO = {
    "out_hidden_size": 64,
    "audio_channels": 2,
    "input_local_dim": 32,
    "input_local_attn_heads": 2,
    "input_local_head_dim": 16,
    "input_local_intermediate_size": 64,
    "input_local_layers": 1,
    "speech_vocab_size": 32,
    "speech_zeroemb_idx": 16,
}
SPARK = OVERRIDES["muse_spark"]["text_config"]
PROJECTOR = {"out_hidden_size": 128, "projector_hidden_size": 64}
KIMI3 = {"linear_attn_config": KDA, "activation_situ_beta": 1.0, "num_key_value_heads": 4}
KIMI3_TOWER = {
    "vt_num_attention_heads": 2,
    "vt_num_hidden_layers": 2,
    "vt_hidden_size": 32,
    "vt_intermediate_size": 64,
    "qkv_hidden_size": 32,
    "mm_hidden_size": 32,
    "text_hidden_size": 64,
    "init_pos_emb_height": 4,
    "init_pos_emb_width": 4,
}
HUNYUAN = {
    "rope_scaling": {
        "type": "xdrope",
        "alpha": 1000.0,
        "factor": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "xdrope_section": [2, 2, 2, 2],
    }
}
GLM5 = {
    "num_key_value_heads": 4,
    "qk_rope_head_dim": 0,
    "index_kpool": 4,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
}
QWEN4 = {
    "hc_count": 2,
    "hc_lowrank": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "ple_layer_ids": [],
    "indexer_n_heads": 2,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "rope_parameters": ROPE | {"type": "default", "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
}
QUERIES = {
    "downsample_rate": "1/2",
    "deepstack_layer_map": [[0, 0], [1, 2]],
    "spatial_target_layers": [1],
    "image_grid_pinpoints": [[SIDE, SIDE]],
}
NAFLEX = {
    "mm_hidden_size": 32,
    "mm_vision_tower": "google/siglip2-so400m-patch16-naflex",
    "image_token_index": -200,
    "min_num_patches": 4,
    "max_num_patches": 24,
}
FAST_TOWER = {"patch_size": 64, "image_size": 128}
FAST = {"model_type": "llava_qwen2", "image_token_index": -200, "mm_hidden_size": 128}
BUNNY = {"model_type": "llava-qwen2", "image_token_index": -200, "auto_map": {}}
DEEPSEEK1_TOWER = {"params": {}, "model_type": "vision", "image_size": 384, "patch_size": 16}
ALIGNER = {
    "image_token_index": IMAGE,
    "projector_config": {
        "cls": "MlpProjector",
        "model_type": "projector",
        "params": {"projector_type": "mlp_gelu", "depth": 2},
    },
}
GOT_TOWER = {
    "img_size": SIDE,
    "in_chans": 3,
    "out_chans": 8,
    "out_dim": 1024,  # its projector has that width
    "window_size": 2,
    "global_attn_indexes": [1],
}
MOLMO = {"n_layers": 4, "d_model": 64, "mlp_hidden_size": 128, "embedding_size": VOCAB}
MOLMO_TOWER = {
    "image_default_input_size": [SIDE, SIDE],
    "image_patch_size": 8,
    "image_pos_patch_size": 8,
    "image_emb_dim": 32,
    "image_num_heads": 2,
    "image_num_key_value_heads": 2,
    "image_num_layers": 2,
    "image_head_dim": 16,
    "image_mlp_dim": 64,
    "image_num_pos": 17,
    "d_model": 64,
    "vit_layers": [-1, -2],
    "intermediate_size": 192,
    "hidden_size": 128,
}
_HEADS = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
MOLMO2_TOWER = {
    "vit_config": _HEADS
    | {
        "num_hidden_layers": 2,
        "head_dim": 16,
        "image_patch_size": 8,
        "image_num_pos": 16,
        "image_default_input_size": [SIDE, SIDE],
    },
    "adapter_config": _HEADS | {"text_hidden_size": 64, "head_dim": 16, "vit_layers": [-1, -2]},
}
JINA = {
    "block_config": {
        "attn_config": {"n_heads": 4, "n_kv_heads": 2, "head_dim": 16},
        "ffn_config": {"size": 96},
    }
}
JINA_TOWER = {
    "n_layers": 2,
    "block_config": {"attn_config": {"n_heads": 2, "head_dim": 16}, "ffn_config": {"size": 64}},
    "input_size": [SIDE, SIDE],
    "vit_layers": [-1, -2],
    "output_size": 64,
    "vl_connector_config": {"mlp_projector_config": {"size": 64}},
}
MOONDREAM_TOWER = {"crop_size": SIDE, "overlap_margin": 1, "proj_inner_dim": 64, "proj_out_dim": 64}
NEMOTRON = OVERRIDES["nemotron_h"] | {"layer_norm_epsilon": 1e-5}
NEMOTRON_OWN = {"img_context_token_id": IMAGE, "projector_hidden_size": 64, "vit_hidden_size": 32}
_OMNI_TEXT = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "vocab_size": VOCAB,
    **MROPE,
}
_OMNI_TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "out_hidden_size": 64,
    "num_heads": 2,
    "patch_size": 8,
    "spatial_patch_size": 8,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
}
_OMNI_AUDIO = {
    "d_model": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "output_dim": 64,
    "downsample_hidden_size": 8,
    "num_mel_bins": 16,
}
OMNI = {
    "enable_audio_output": False,
    "thinker_config": {
        "text_config": _OMNI_TEXT,
        "vision_config": _OMNI_TOWER,
        "audio_config": _OMNI_AUDIO,
        "image_token_id": IMAGE,
        "video_token_id": TOKEN_ID["<|video_pad|>"],
        "vision_start_token_id": START,
        "vision_end_token_id": END,
    },
    "talker_config": {"text_config": _OMNI_TEXT, "code_predictor_config": {"hidden_size": 32}},
    "code2wav_config": {},
}
