"""The vision-language families of mlx-vlm that the sweep checks, each with what its tiny config needs."""

from __future__ import annotations

from benchmarks.tiny import vision_parts as parts
from benchmarks.tiny.vision_configs import VisionFamily
from benchmarks.tiny.vision_media import IMAGE

VISION: dict[str, VisionFamily] = {
    "qwen2_vl": VisionFamily(
        4, "grid", text=parts.MROPE, tower={"hidden_size": 64, "mlp_ratio": 2}, flat=True, wrapped=True
    ),
    "qwen2_5_vl": VisionFamily(
        4,
        "grid",
        text=parts.MROPE,
        tower={"window_size": 32, "fullatt_block_indexes": [1]},
        flat=True,
        wrapped=True,
    ),
    "qwen3_vl": VisionFamily(4, "grid", text=parts.MROPE, tower={"model_type": "qwen3_vl"}, wrapped=True),
    "qwen3_vl_moe": VisionFamily(
        4, "grid", text=parts.MROPE, tower={"model_type": "qwen3_vl_moe"}, wrapped=True
    ),
    "qwen3_5": VisionFamily(4, "grid", tower=parts.FLAT | {"model_type": "qwen3_5"}, wrapped=True),
    "qwen3_5_moe": VisionFamily(4, "grid", tower=parts.FLAT | {"model_type": "qwen3_5_moe"}, wrapped=True),
    "glm4v": VisionFamily(4, "grid", text=parts.MROPE, tower={"model_type": "glm4v"}, wrapped=True),
    "glm4v_moe": VisionFamily(4, "grid", text=parts.MROPE, tower={"model_type": "glm4v_moe"}, wrapped=True),
    "dots_ocr": VisionFamily(4, "grid", tower={"hidden_size": 64, "embed_dim": 64}),
    "gemma4": VisionFamily(
        4, "typed", text=parts.GEMMA4, tower=parts.GEMMA4_TOWER, own={"vision_soft_tokens_per_image": 4}
    ),
    "gemma3n": VisionFamily(256, text=parts.GEMMA3N, tower=parts.GEMMA3N_TOWER, own=parts.GEMMA3N_OWN),
    "gemma3": VisionFamily(4, text={"mm_tokens_per_image": 4}, tower=parts.SIGLIP),
    "idefics3": VisionFamily(4, "tiles", tower={"model_type": "idefics3_vision"}, **parts.IDEFICS),
    "smolvlm": VisionFamily(4, "tiles", tower={"model_type": "smolvlm_vision"}, **parts.IDEFICS),
    "llava": VisionFamily(16, text={"model_type": "llama"}, tower=parts.CLIP, own=parts.DEFAULT),
    "pixtral": VisionFamily(16, text={"model_type": "mistral"}, tower=parts.PIXTRAL),
    "mistral3": VisionFamily(4, "sizes", text={"model_type": "mistral"}, tower=parts.PIXTRAL),
    "internvl": VisionFamily(4),
    "internvl_chat": VisionFamily(4, tower={"model_type": "intern_vit_6b"}),
    "aya_vision": VisionFamily(4, tower=parts.SIGLIP, own={"downsample_factor": 2}),
    "llama4": VisionFamily(4, text=parts.LLAMA4, tower=parts.LLAMA4_TOWER),
    "kimi_vl": VisionFamily(4, "patches"),
    "kimi_k25": VisionFamily(4, "patches"),
    "glm_ocr": VisionFamily(4, "grid", wrapped=True),
    "paddleocr_vl": VisionFamily(4, "still", text=parts.PADDLE, flat=True, wrapped=True, most=1),
    "minicpmo": VisionFamily(4, "bounds", own={"init_audio": False, "init_tts": False, "query_num": 4}),
    "minicpmv4_6": VisionFamily(4, "bounds"),
    "lfm2_vl": VisionFamily(
        4, "packed", text=parts.LFM2, tower=parts.LFM2_TOWER, own={"projector_hidden_size": 64}
    ),
    "phi4_siglip": VisionFamily(16, own=parts.NAFLEX | {"model_type": "phi4-siglip"}),
    "deepseek_vl_v2": VisionFamily(
        10, "pixels", text=parts.DEEPSEEK, tower=parts.DEEPSEEK_TOWER, own=parts.DEEPSEEK_OWN, most=1
    ),
    "phi4mm": VisionFamily(16, own=parts.NAFLEX | {"audio_processor": {"config": parts.AUDIO}}),
    "idefics2": VisionFamily(4, "masked", **parts.IDEFICS2),
    "llava_onevision": VisionFamily(
        36, "anyres", text={"model_type": "qwen2"}, tower=parts.SIGLIP, own=parts.ANYRES
    ),
    "llava_next": VisionFamily(
        1,
        "tiles",
        text={"model_type": "llama"},
        tower=parts.CLIP,
        own=parts.DEFAULT | {"image_grid_pinpoints": parts.GRID},
    ),
    "granite_vision": VisionFamily(
        1,
        "tiles",
        text={"model_type": "granite"},
        tower=parts.SIGLIP,
        own=parts.ANYRES | {"vision_feature_layer": [-2, -1]},
    ),
    "paligemma": VisionFamily(16, text=parts.PALIGEMMA, tower=parts.SIGLIP | {"projection_dim": 64}, most=1),
    "mllama": VisionFamily(1, "aspects", text=parts.MLLAMA, tower=parts.MLLAMA_TOWER),
    "indic_ocr": VisionFamily(4, "grid", tower=parts.FLAT | {"model_type": "qwen3_5"}, wrapped=True),
    "qwen4_exp": VisionFamily(4, "grid", text=parts.QWEN4, tower=parts.FLAT, wrapped=True),
    "qwen3_omni_moe": VisionFamily(4, "grid", own=parts.OMNI, wrapped=True),
    "cohere_compass": VisionFamily(4, "grid", text=parts.COMPASS, wrapped=True),
    "ernie4_5_moe_vl": VisionFamily(
        4,
        "flat",
        text=parts.ERNIE,
        own={"im_patch_id": IMAGE, "pixel_hidden_size": 32},
        flat=True,
        wrapped=True,
    ),
    "glm5_next": VisionFamily(4, "grid", text=parts.GLM5, tower={"projection_intermediate_size": 64}),
    "hunyuan_vl": VisionFamily(8, "flat", text=parts.HUNYUAN, most=1),
    "mage_vl": VisionFamily(4, "flat", tower={"hidden_size": 64}),
    "mimo_v2": VisionFamily(4, "grid", text=parts.MIMO, own={"audio_config": parts.MIMO_AUDIO}, flat=True),
    "minimax_m3_vl": VisionFamily(4, "grid", text={"moe_layer_freq": [0, 1, 1, 1]}),
    "muse_glimmer": VisionFamily(4, "grid", own=parts.PROJECTOR),
    "muse_spark": VisionFamily(4, text=parts.SPARK, own=parts.PROJECTOR),
    "kimi_k3": VisionFamily(4, "patches", text=parts.KIMI3, tower=parts.KIMI3_TOWER),
    "locateanything": VisionFamily(4, "patches", text={"tie_word_embeddings": True}),
    "zaya1_vl": VisionFamily(4, "grid", flat=True),
    "youtu_vl": VisionFamily(4, "packed", tower=parts.YOUTU_TOWER, flat=True),
    "gemma4_unified": VisionFamily(16, "places", text=parts.GEMMA4, tower=parts.UNIFIED_TOWER),
    "minicpmv4_7": VisionFamily(4, "targets", own={"downsample_mode": "4x"}, wrapped=True),
    "mistral_large3": VisionFamily(4, "sizes"),
    "inkling": VisionFamily(4, "pairs", tower={"patch_size": 16}),
    "step3p7": VisionFamily(
        1, text={"num_attention_groups": 2}, tower={"width": 32, "layers": 2, "heads": 2}, most=1
    ),
    "plamo2vl": VisionFamily(16, text={"model_type": "plamo2"}, tower=parts.PLAMO_TOWER),
    "llmjpvl": VisionFamily(4, text={"model_type": "llama"}, tower=parts.SIGLIP),
    "nemotron_h_nano_omni": VisionFamily(4, text=parts.NEMOTRON, own=parts.NEMOTRON_OWN),
    "fastvlm": VisionFamily(4, tower=parts.FAST_TOWER, own=parts.FAST),
    "molmo": VisionFamily(4, "crops", text=parts.MOLMO, tower=parts.MOLMO_TOWER, most=1),
    "molmo2": VisionFamily(
        4,
        "pooled",
        tower=parts.MOLMO2_TOWER,
        own={"image_patch_id": IMAGE},
        wrapped=True,
        runs=2,
        most=1,
    ),
    "jina_vlm": VisionFamily(4, "crops", text=parts.JINA, tower=parts.JINA_TOWER, most=1),
    "moondream2": VisionFamily(16, "channels", tower=parts.MOONDREAM_TOWER, most=1, first=True),
    "moondream3": VisionFamily(
        16,
        "channels",
        text={"num_key_value_heads": 4, "rope_dim": 8},
        tower=parts.MOONDREAM_TOWER,
        most=1,
        first=True,
    ),
    "got": VisionFamily(
        1, "channels", tower=parts.GOT_TOWER, own={"im_patch_token": IMAGE}, flat=True, most=1
    ),
    "falcon_ocr": VisionFamily(28, own=parts.FALCON, most=1),
    "granite4_vision": VisionFamily(
        20, "tiles", tower=parts.SIGLIP | {"hidden_size": 64}, own=parts.QUERIES, most=1
    ),
    "multi_modality": VisionFamily(
        576, text={"model_type": "llama"}, tower=parts.DEEPSEEK1_TOWER, own=parts.ALIGNER, most=1
    ),
    "llava_bunny": VisionFamily(
        729, tower=parts.SIGLIP | {"image_size": 384, "patch_size": 14}, own=parts.BUNNY, most=1
    ),
}
