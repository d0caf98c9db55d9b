"""Tiny configs of mlx-vlm's vision-language models, and how many tokens one tiny image has in them.

A family is in VISION if the sweep knows how its processor lays out the pixels of images of 32 x 32:
`make_media`. Values of the table are merged into what `fill_arguments` makes of the library's arguments.
"""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from mlxrun.model.tiny.byte_tokenizer import TOKEN_ID, VOCAB
from mlxrun.model.tiny.text_configs import fill_arguments

IMAGE, START, END = (TOKEN_ID[name] for name in ("<image>", "<|vision_start|>", "<|vision_end|>"))
SIDE, PATCH = 32, 8  # pixels
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "embed_dim": 32,
    "intermediate_size": 64,
    "mlp_ratio": 2.0,
    "num_hidden_layers": 2,
    "depth": 2,
    "num_attention_heads": 2,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_patch_size": PATCH,
    "image_size": SIDE,
    "in_channels": 3,
    "num_channels": 3,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
}
_TOKENS = {
    "image_token_id": IMAGE,
    "image_token_index": IMAGE,
    "video_token_id": TOKEN_ID["<|video_pad|>"],
    "video_token_index": TOKEN_ID["<|video_pad|>"],
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "vocab_size": VOCAB,
    "hidden_size": 64,
}
_MROPE = {"rope_scaling": {"type": "default", "rope_type": "default", "mrope_section": [4, 2, 2]}}


Layout = Literal[
    "pixels", "grid", "still", "tiles", "masked", "aspects", "sizes", "anyres", "patches", "packed"
]


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """`tokens`: of one image. `media`: the layout of pixels. `text`, `tower`, `own`: values of the parts of
    the config and of its top; `flat`: the text part's values are at the top; `wrapped`: tokens for the
    beginning and the end of an image stand around it."""

    tokens: int
    media: Layout = "pixels"
    text: dict[str, Any] = field(default_factory=dict)
    tower: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    flat: bool = False
    wrapped: bool = False


_CLIP = {"model_type": "clip_vision_model"}
_SIGLIP = {"model_type": "siglip_vision_model"}
_DEFAULT = {"vision_feature_select_strategy": "default", "vision_feature_layer": -2}
_LLAMA4 = {"num_experts_per_tok": 1, "intermediate_size_mlp": 96, "attention_chunk_size": 8}
_LLAMA4_TOWER = {
    "model_type": "llama4_vision_model",
    "projector_input_dim": 32,
    "projector_output_dim": 32,
    "vision_output_dim": 32,
    "intermediate_size": 128,
    "pixel_shuffle_ratio": 0.5,
}
_GEMMA4 = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "num_experts": None,
    "use_double_wide_mlp": False,
}
_GEMMA4_TOWER = {
    "model_type": "gemma4_vision",
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 16,
    "pooling_kernel_size": 2,
    "default_output_length": 4,
    "position_embedding_size": 16,
}
_FLAT: dict[str, Any] = {"deepstack_visual_indexes": []}
_IDEFICS: dict[str, Any] = {"text": {"model_type": "llama"}, "own": {"scale_factor": 2}}
_PADDLE = _MROPE | {"hidden_size": 1024, "head_dim": 16}  # its projector has that width
_LFM2 = {
    "model_type": "lfm2",
    "layer_types": ["conv", "full_attention"] * 2,
    "full_attn_idxs": [1, 3],
    "block_dim": 64,
    "conv_dim": 64,
    "conv_dim_out": 64,
    "block_ff_dim": 96,
    "num_heads": 4,
}
_LFM2_TOWER = {"model_type": "lfm2_vl", "num_patches": 16}
_AUDIO = {
    "attention_dim": 32,
    "attention_heads": 2,
    "num_blocks": 1,
    "linear_units": 32,
    "ext_pw_out_channel": 32,
    "depthwise_seperable_out_channel": 32,
    "conv_channels": 32,
}
_PERCEIVER = {
    "model_type": "idefics2",
    "num_key_value_heads": 2,
    "resampler_depth": 1,
    "resampler_head_dim": 16,
    "resampler_n_heads": 2,
    "resampler_n_latents": 4,
}
_IDEFICS2: dict[str, Any] = {
    "text": {"model_type": "mistral"},
    "tower": {"model_type": "idefics2"},
    "own": {"perceiver_config": _PERCEIVER},
}
_ANYRES = {
    "image_grid_pinpoints": [[SIDE, SIDE]],
    "vision_feature_select_strategy": "full",
    "vision_feature_layer": -1,
}
_MLLAMA = {"model_type": "mllama_text_model", "cross_attention_layers": [1]}
_MLLAMA_TOWER = {
    "max_num_tiles": 1,
    "num_global_layers": 1,
    "intermediate_layers_indices": [0],
    "vision_output_dim": 64,
}
VISION: dict[str, VisionFamily] = {
    "qwen2_vl": VisionFamily(4, "grid", text=_MROPE, tower={"hidden_size": 64}, flat=True),
    "qwen2_5_vl": VisionFamily(
        4,
        "grid",
        text=_MROPE,
        tower={"window_size": 32, "fullatt_block_indexes": [1]},
        flat=True,
    ),
    "qwen3_vl": VisionFamily(4, "grid", text=_MROPE, tower={"model_type": "qwen3_vl"}),
    "qwen3_vl_moe": VisionFamily(4, "grid", text=_MROPE, tower={"model_type": "qwen3_vl_moe"}),
    "qwen3_5": VisionFamily(4, "grid", tower=_FLAT | {"model_type": "qwen3_5"}),
    "qwen3_5_moe": VisionFamily(4, "grid", tower=_FLAT | {"model_type": "qwen3_5_moe"}),
    "glm4v": VisionFamily(4, "grid", text=_MROPE, tower={"model_type": "glm4v"}),
    "glm4v_moe": VisionFamily(4, "grid", text=_MROPE, tower={"model_type": "glm4v_moe"}),
    "dots_ocr": VisionFamily(4, "grid", tower={"hidden_size": 64, "embed_dim": 64}),
    "gemma4": VisionFamily(4, text=_GEMMA4, tower=_GEMMA4_TOWER, own={"vision_soft_tokens_per_image": 4}),
    "gemma3": VisionFamily(4, text={"mm_tokens_per_image": 4}, tower=_SIGLIP),
    "idefics3": VisionFamily(4, "tiles", tower={"model_type": "idefics3_vision"}, **_IDEFICS),
    "smolvlm": VisionFamily(4, "tiles", tower={"model_type": "smolvlm_vision"}, **_IDEFICS),
    "llava": VisionFamily(16, text={"model_type": "llama"}, tower=_CLIP, own=_DEFAULT),
    "pixtral": VisionFamily(16, text={"model_type": "mistral"}, tower={"model_type": "pixtral"}),
    "mistral3": VisionFamily(4, "sizes", text={"model_type": "mistral"}, tower={"model_type": "pixtral"}),
    "internvl": VisionFamily(4),
    "internvl_chat": VisionFamily(4, tower={"model_type": "intern_vit_6b"}),
    "aya_vision": VisionFamily(4, tower=_SIGLIP, own={"downsample_factor": 2}),
    "llama4": VisionFamily(4, text=_LLAMA4, tower=_LLAMA4_TOWER),
    "kimi_vl": VisionFamily(4, "patches"),
    "kimi_k25": VisionFamily(4, "patches"),
    "glm_ocr": VisionFamily(4, "grid", wrapped=True),
    "paddleocr_vl": VisionFamily(4, "still", text=_PADDLE, flat=True, wrapped=True),
    "minicpmo": VisionFamily(4, own={"init_audio": False, "init_tts": False}),
    "minicpmv4_6": VisionFamily(4),
    "lfm2_vl": VisionFamily(4, "packed", text=_LFM2, tower=_LFM2_TOWER, own={"projector_hidden_size": 64}),
    "phi4_siglip": VisionFamily(16, "packed", own={"mm_hidden_size": 32}),
    "phi4mm": VisionFamily(1, "packed", own={"mm_hidden_size": 32, "audio_processor": {"config": _AUDIO}}),
    "idefics2": VisionFamily(4, "masked", **_IDEFICS2),
    "llava_onevision": VisionFamily(36, "anyres", text={"model_type": "qwen2"}, tower=_SIGLIP, own=_ANYRES),
    "llava_next": VisionFamily(1, "tiles", text={"model_type": "llama"}, tower=_CLIP, own=_DEFAULT),
    "granite_vision": VisionFamily(1, "tiles", text={"model_type": "granite"}, tower=_SIGLIP),
    "paligemma": VisionFamily(
        16, text={"model_type": "gemma", "num_image_tokens": 16}, tower=_SIGLIP | {"projection_dim": 64}
    ),
    "mllama": VisionFamily(1, "aspects", text=_MLLAMA, tower=_MLLAMA_TOWER),
}


def make_vision_config(family: str) -> dict[str, Any]:
    """The config.json of a tiny model of a family in VISION. Raises what the library's module raises."""
    module = importlib.import_module(f"mlx_vlm.models.{family}")
    entry = VISION[family]
    names = {part.name for part in dataclasses.fields(module.VisionConfig)}
    sizes = {name: value for name, value in _TOWER.items() if name in names}
    tower = fill_arguments(module.VisionConfig) | sizes | entry.tower
    text = fill_arguments(module.TextConfig) | {"model_type": family, "vocab_size": VOCAB} | entry.text
    config = fill_arguments(module.ModelConfig) | {"model_type": family} | _TOKENS
    if entry.flat:
        del config["text_config"]
    config |= text if entry.flat else {"text_config": text}
    return config | {"vision_config": tower} | entry.own | {"model_type": family}


def make_media(family: str, images: np.ndarray[Any, Any]) -> dict[str, Any]:
    """What the processor of a family would make of images [n, 3, 32, 32], float32."""
    count, steps = len(images), SIDE // PATCH
    layout = VISION[family].media
    if layout == "pixels":
        return {"pixel_values": images}
    if layout == "sizes":
        return {"pixel_values": images, "image_sizes": np.full((count, 2), SIDE)}
    if layout == "anyres":
        return {"pixel_values": np.stack([images, images], axis=1), "image_sizes": np.full((count, 2), SIDE)}
    if layout == "tiles":
        return {"pixel_values": images[None]}
    if layout == "masked":
        mask = np.ones((1, count, SIDE, SIDE), np.int32)
        return {"pixel_values": images[None], "pixel_attention_mask": mask}
    if layout == "aspects":
        ids, mask = np.ones((1, count), np.int32), np.ones((1, count, 1), np.int32)
        return {
            "pixel_values": images[None, :, None],
            "aspect_ratio_ids": ids,
            "aspect_ratio_mask": mask,
        }
    patches = images.reshape(count, 3, steps, PATCH, steps, PATCH).transpose(0, 2, 4, 1, 3, 5)
    if layout == "patches":
        pixels = patches.reshape(count * steps * steps, 3, PATCH, PATCH)
        return {"pixel_values": pixels, "image_grid_hws": np.full((count, 2), steps)}
    if layout == "packed":
        flat = patches.transpose(0, 1, 2, 4, 5, 3).reshape(count, steps * steps, -1)
        mask = np.ones((count, steps * steps), np.int32)
        return {
            "pixel_values": flat,
            "spatial_shapes": np.full((count, 2), steps),
            "pixel_attention_mask": mask,
        }
    frames = np.repeat(patches[:, :, :, :, None], 2, axis=4)
    grid = np.tile(np.array([1, steps, steps]), (count, 1))
    if layout == "still":
        still = patches.reshape(1, count * steps * steps, 3, PATCH, PATCH)
        return {"pixel_values": still, "image_grid_thw": grid}
    return {"pixel_values": frames.reshape(count * steps * steps, -1), "image_grid_thw": grid}
