"""The vision-language families of mlx-vlm that the sweep checks, each with what its tiny config needs."""

from __future__ import annotations

from benchmarks.tiny import vision_parts as parts
from benchmarks.tiny.vision_configs import VisionFamily
from benchmarks.tiny.vision_media import IMAGE

VISION: dict[str, VisionFamily] = {
    "qwen2_vl": VisionFamily(text=parts.MROPE, tower={"hidden_size": 64, "mlp_ratio": 2}, flat=True),
    "qwen2_5_vl": VisionFamily(
        text=parts.MROPE, tower={"window_size": 32, "fullatt_block_indexes": [1]}, flat=True
    ),
    "qwen3_vl": VisionFamily(text=parts.MROPE, tower={"model_type": "qwen3_vl"}),
    "qwen3_vl_moe": VisionFamily(text=parts.MROPE, tower={"model_type": "qwen3_vl_moe"}),
    "qwen3_5": VisionFamily(tower=parts.FLAT | {"model_type": "qwen3_5"}),
    "qwen3_5_moe": VisionFamily(tower=parts.FLAT | {"model_type": "qwen3_5_moe"}),
    "glm4v": VisionFamily(text=parts.MROPE, tower={"model_type": "glm4v"}),
    "glm4v_moe": VisionFamily(text=parts.MROPE, tower={"model_type": "glm4v_moe"}),
    "dots_ocr": VisionFamily(tower={"hidden_size": 64, "embed_dim": 64}),
    "gemma4": VisionFamily(
        text=parts.GEMMA4, tower=parts.GEMMA4_TOWER, own={"vision_soft_tokens_per_image": 4}
    ),
    "gemma3n": VisionFamily(text=parts.GEMMA3N, tower=parts.GEMMA3N_TOWER, own=parts.GEMMA3N_OWN),
    "gemma3": VisionFamily(text={"mm_tokens_per_image": 4}, tower=parts.SIGLIP),
    "idefics3": VisionFamily(tower={"model_type": "idefics3_vision"}, **parts.IDEFICS),
    "smolvlm": VisionFamily(tower={"model_type": "smolvlm_vision"}, **parts.IDEFICS),
    "llava": VisionFamily(text={"model_type": "llama"}, tower=parts.CLIP, own=parts.DEFAULT),
    "pixtral": VisionFamily(text={"model_type": "mistral"}, tower=parts.PIXTRAL),
    "mistral3": VisionFamily(text={"model_type": "mistral"}, tower=parts.PIXTRAL),
    "internvl": VisionFamily(),
    "internvl_chat": VisionFamily(tower={"model_type": "intern_vit_6b"}),
    "aya_vision": VisionFamily(tower=parts.SIGLIP, own={"downsample_factor": 2}),
    "llama4": VisionFamily(text=parts.LLAMA4, tower=parts.LLAMA4_TOWER),
    "kimi_vl": VisionFamily(),
    "kimi_k25": VisionFamily(),
    "glm_ocr": VisionFamily(),
    "paddleocr_vl": VisionFamily(text=parts.PADDLE, flat=True, most=1),
    "minicpmo": VisionFamily(own={"init_audio": False, "init_tts": False, "query_num": 4}),
    "minicpmv4_6": VisionFamily(),
    "lfm2_vl": VisionFamily(text=parts.LFM2, tower=parts.LFM2_TOWER, own={"projector_hidden_size": 64}),
    "phi4_siglip": VisionFamily(own=parts.NAFLEX | {"model_type": "phi4-siglip"}),
    "deepseek_vl_v2": VisionFamily(
        text=parts.DEEPSEEK, tower=parts.DEEPSEEK_TOWER, own=parts.DEEPSEEK_OWN, most=1
    ),
    "phi4mm": VisionFamily(own=parts.NAFLEX | {"audio_processor": {"config": parts.AUDIO}}),
    "idefics2": VisionFamily(**parts.IDEFICS2),
    "llava_onevision": VisionFamily(text={"model_type": "qwen2"}, tower=parts.SIGLIP, own=parts.ANYRES),
    "llava_next": VisionFamily(
        text={"model_type": "llama"},
        tower=parts.CLIP,
        own=parts.DEFAULT | {"image_grid_pinpoints": parts.GRID},
    ),
    "granite_vision": VisionFamily(
        text={"model_type": "granite"},
        tower=parts.SIGLIP,
        own=parts.ANYRES | {"vision_feature_layer": [-2, -1]},
    ),
    "paligemma": VisionFamily(text=parts.PALIGEMMA, tower=parts.SIGLIP | {"projection_dim": 64}, most=1),
    "mllama": VisionFamily(1, "aspects", text=parts.MLLAMA, tower=parts.MLLAMA_TOWER),
    "indic_ocr": VisionFamily(4, "grid", tower=parts.FLAT | {"model_type": "qwen3_5"}, wrapped=True),
    "qwen4_exp": VisionFamily(text=parts.QWEN4, tower=parts.FLAT),
    "qwen3_omni_moe": VisionFamily(own=parts.OMNI),
    "cohere_compass": VisionFamily(4, "grid", text=parts.COMPASS, wrapped=True),
    "ernie4_5_moe_vl": VisionFamily(
        4,
        "flat",
        text=parts.ERNIE,
        own={"im_patch_id": IMAGE, "pixel_hidden_size": 32},
        flat=True,
        wrapped=True,
    ),
    "glm5_next": VisionFamily(text=parts.GLM5, tower={"projection_intermediate_size": 64}),
    "hunyuan_vl": VisionFamily(text=parts.HUNYUAN, most=1),
    "mage_vl": VisionFamily(tower={"hidden_size": 64}),
    "mimo_v2": VisionFamily(4, "grid", text=parts.MIMO, own={"audio_config": parts.MIMO_AUDIO}, flat=True),
    "minimax_m3_vl": VisionFamily(text={"moe_layer_freq": [0, 1, 1, 1]}),
    "muse_glimmer": VisionFamily(own=parts.PROJECTOR),
    "muse_spark": VisionFamily(4, text=parts.SPARK, own=parts.PROJECTOR),
    "kimi_k3": VisionFamily(text=parts.KIMI3, tower=parts.KIMI3_TOWER),
    "locateanything": VisionFamily(text={"tie_word_embeddings": True}),
    "zaya1_vl": VisionFamily(4, "grid", flat=True),
    "youtu_vl": VisionFamily(4, "packed", tower=parts.YOUTU_TOWER, flat=True),
    "gemma4_unified": VisionFamily(text=parts.GEMMA4, tower=parts.UNIFIED_TOWER),
    "minicpmv4_7": VisionFamily(own={"downsample_mode": "4x"}),
    "mistral_large3": VisionFamily(4, "sizes"),
    "inkling": VisionFamily(tower={"patch_size": 16}),
    "step3p7": VisionFamily(
        text={"num_attention_groups": 2}, tower={"width": 32, "layers": 2, "heads": 2}, most=1
    ),
    "plamo2vl": VisionFamily(16, text={"model_type": "plamo2"}, tower=parts.PLAMO_TOWER),
    "llmjpvl": VisionFamily(4, text={"model_type": "llama"}, tower=parts.SIGLIP),
    "nemotron_h_nano_omni": VisionFamily(text=parts.NEMOTRON, own=parts.NEMOTRON_OWN),
    "fastvlm": VisionFamily(tower=parts.FAST_TOWER, own=parts.FAST),
    "molmo": VisionFamily(text=parts.MOLMO, tower=parts.MOLMO_TOWER, most=1),
    "molmo2": VisionFamily(tower=parts.MOLMO2_TOWER, own={"image_patch_id": IMAGE}, most=1),
    "jina_vlm": VisionFamily(text=parts.JINA, tower=parts.JINA_TOWER, most=1),
    "moondream2": VisionFamily(16, "channels", tower=parts.MOONDREAM_TOWER, most=1, first=True),
    "moondream3": VisionFamily(
        16,
        "channels",
        text={"num_key_value_heads": 4, "rope_dim": 8},
        tower=parts.MOONDREAM_TOWER,
        most=1,
        first=True,
    ),
    "got": VisionFamily(tower=parts.GOT_TOWER, own={"im_patch_token": IMAGE}, flat=True, most=1),
    "falcon_ocr": VisionFamily(own=parts.FALCON, most=1),
    "granite4_vision": VisionFamily(tower=parts.SIGLIP | {"hidden_size": 64}, own=parts.QUERIES, most=1),
    "multi_modality": VisionFamily(
        text={"model_type": "llama"}, tower=parts.DEEPSEEK1_TOWER, own=parts.ALIGNER, most=1
    ),
    "llava_bunny": VisionFamily(
        tower=parts.SIGLIP | {"image_size": 384, "patch_size": 14}, own=parts.BUNNY, most=1
    ),
}
