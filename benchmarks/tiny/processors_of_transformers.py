"""The processor files of checkpoints whose image processors are those of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.tiny.processor_entry import (
    BEGINS,
    CLIP,
    EDGES,
    GLM,
    HALVES,
    PIXELS,
    SHORTEST,
    SIZES,
    SQUARE,
    STEPS,
    WRAPPED,
    ProcessorFiles,
)
from benchmarks.tiny.vision_media import PATCH, SIDE
from benchmarks.tiny.vision_parts import GRID

_GEMMA = {
    **BEGINS,
    "extra_special_tokens": {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    },
}


def _make_qwen(checkpoint: str, kind: str, processor: str, **values: Any) -> ProcessorFiles:
    images = {
        "image_processor_type": kind,
        "processor_class": processor,
        "temporal_patch_size": 2,
        **SIZES,
        **values,
    }
    return ProcessorFiles(checkpoint, images, WRAPPED, video=images, token="<|image_pad|>")


def _make_qwen3(checkpoint: str) -> ProcessorFiles:
    return _make_qwen(checkpoint, "Qwen2VLImageProcessorFast", "Qwen3VLProcessor", **HALVES, **EDGES)


def _make_llava(checkpoint: str, name: str, images: Mapping[str, Any], **values: Any) -> ProcessorFiles:
    return ProcessorFiles(
        checkpoint,
        {**STEPS, **images, "processor_class": name},
        "<image>",
        {"image_token": "<image>", "patch_size": PATCH, "processor_class": name, **values},
        tokenizer=BEGINS if name == "LlavaProcessor" else {},
    )


def _make_idefics(checkpoint: str, name: str) -> ProcessorFiles:
    images = {
        **STEPS,
        **HALVES,
        "image_processor_type": f"{name}ImageProcessor",
        "processor_class": f"{name}Processor",
        "do_image_splitting": True,
        "do_pad": True,
        "resample": 1,
        "max_image_size": {"longest_edge": SIDE},
        "size": {"longest_edge": 3 * SIDE},
    }
    processor = {"image_seq_len": 4, "processor_class": f"{name}Processor"}
    return ProcessorFiles(checkpoint, images, "<image>", processor)


_DEFAULT = {"num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
_IMG = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
_PIXTRAL = {**STEPS, **CLIP, "resample": 3, "size": {"longest_edge": 3 * SIDE}}


OF_TRANSFORMERS: Mapping[str, ProcessorFiles] = {
    "llava": _make_llava(
        "llava-hf/llava-1.5-7b-hf",
        "LlavaProcessor",
        {**CLIP, **SHORTEST, "image_processor_type": "CLIPImageProcessor"},
        **_DEFAULT,
    ),
    "llava_next": _make_llava(
        "llava-hf/llava-v1.6-mistral-7b-hf",
        "LlavaNextProcessor",
        {
            **CLIP,
            **SHORTEST,
            "image_processor_type": "LlavaNextImageProcessor",
            "aspect_ratio_setting": "anyres",
            "image_grid_pinpoints": GRID,
        },
        **_DEFAULT,
    ),
    "granite_vision": _make_llava(
        "ibm-granite/granite-vision-3.3-2b",
        "LlavaNextProcessor",
        {
            **HALVES,
            "crop_size": SQUARE,
            "do_center_crop": True,
            "image_processor_type": "LlavaNextImageProcessor",
            "image_grid_pinpoints": GRID,
            "resample": 3,
            "size": SQUARE,
        },
        num_additional_image_tokens=0,
        vision_feature_select_strategy="full",
    ),
    "llava_onevision": _make_llava(
        "llava-hf/llava-onevision-qwen2-0.5b-ov-hf",
        "LlavaOnevisionProcessor",
        {
            **HALVES,
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "image_grid_pinpoints": GRID,
            "size": SQUARE,
            "do_pad": True,
            "resample": 3,
        },
        num_image_tokens=(SIDE // PATCH) ** 2,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_9",
        video_token="<video>",
    ),
    "qwen2_vl": _make_qwen(
        "Qwen/Qwen2-VL-2B-Instruct", "Qwen2VLImageProcessor", "Qwen2VLProcessor", **CLIP, **PIXELS
    ),
    "qwen2_5_vl": _make_qwen(
        "Qwen/Qwen2.5-VL-3B-Instruct", "Qwen2VLImageProcessor", "Qwen2_5_VLProcessor", **CLIP, **PIXELS
    ),
    "qwen3_vl": _make_qwen3("Qwen/Qwen3-VL-4B-Instruct"),
    "qwen3_vl_moe": _make_qwen3("Qwen/Qwen3-VL-30B-A3B-Instruct"),
    "qwen3_5": _make_qwen3("Qwen/Qwen3.5-4B"),
    "qwen3_5_moe": _make_qwen3("Qwen/Qwen3.5-35B-A3B"),
    "glm4v": ProcessorFiles(
        "zai-org/GLM-4.1V-9B-Thinking",
        GLM,
        "<|vision_start|><|image|><|vision_end|>",
        video=GLM | {"video_processor_type": "Glm4vVideoProcessor"},
        token="<|image|>",
    ),
    "idefics2": ProcessorFiles(
        "HuggingFaceM4/idefics2-8b",
        {
            **STEPS,
            **HALVES,
            "image_processor_type": "Idefics2ImageProcessor",
            "processor_class": "Idefics2Processor",
            "do_image_splitting": True,
            "do_pad": True,
            "resample": 2,
            "size": {"longest_edge": SIDE, "shortest_edge": SIDE // 2},
        },
        "<image>",
        {"image_seq_len": 4, "processor_class": "Idefics2Processor"},
    ),
    "lfm2_vl": ProcessorFiles(
        "LiquidAI/LFM2-VL-1.6B",
        {
            **STEPS,
            **HALVES,
            "image_processor_type": "Lfm2VlImageProcessorFast",
            "processor_class": "Lfm2VlProcessor",
            "do_image_splitting": True,
            "do_pad": True,
            "downsample_factor": 2,
            "encoder_patch_size": PATCH,
            "min_image_tokens": 2,
            "max_image_tokens": 8,
            "max_num_patches": 32,
            "max_pixels_tolerance": 2.0,
            "min_tiles": 2,
            "max_tiles": 4,
            "tile_size": SIDE,
            "use_thumbnail": True,
            "resample": 2,
        },
        "<image>",
        {"image_token": "<image>", "processor_class": "Lfm2VlProcessor"},
    ),
    "gemma3": ProcessorFiles(
        "google/gemma-3-4b-it",
        {
            **STEPS,
            **HALVES,
            "image_processor_type": "Gemma3ImageProcessor",
            "processor_class": "Gemma3Processor",
            "image_seq_length": 4,
            "do_pan_and_scan": None,
            "resample": 2,
            "size": SQUARE,
        },
        "<start_of_image>",
        {"image_seq_length": 4, "processor_class": "Gemma3Processor"},
        token="<image_soft_token>",
        tokenizer=_GEMMA,
    ),
    "idefics3": _make_idefics("HuggingFaceM4/Idefics3-8B-Llama3", "Idefics3"),
    "smolvlm": _make_idefics("HuggingFaceTB/SmolVLM2-2.2B-Instruct", "SmolVLM"),
    "pixtral": ProcessorFiles(
        "mistral-community/pixtral-12b",
        {
            **_PIXTRAL,
            "image_processor_type": "PixtralImageProcessor",
            "processor_class": "PixtralProcessor",
            "patch_size": {"height": PATCH, "width": PATCH},
        },
        "[IMG]",
        {"patch_size": PATCH, "processor_class": "PixtralProcessor", **_IMG},
        token="[IMG]",
        tokenizer=BEGINS,
    ),
    "mistral3": ProcessorFiles(
        "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
        {
            **_PIXTRAL,
            "image_processor_type": "PixtralImageProcessorFast",
            "processor_class": "PixtralProcessor",
            "patch_size": PATCH,
        },
        "[IMG]",
        {"patch_size": PATCH, "spatial_merge_size": 2, "processor_class": "PixtralProcessor", **_IMG},
        token="[IMG]",
        tokenizer=BEGINS,
    ),
    "internvl": ProcessorFiles(
        "OpenGVLab/InternVL3-1B-hf",
        {
            **STEPS,
            "image_mean": [0.485, 0.456, 0.406],
            "image_std": [0.229, 0.224, 0.225],
            "image_processor_type": "GotOcr2ImageProcessorFast",
            "processor_class": "InternVLProcessor",
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 12,
            "resample": 3,
            "size": SQUARE,
        },
        "<IMG_CONTEXT>",
        {"image_seq_length": 4, "processor_class": "InternVLProcessor"},
        token="<IMG_CONTEXT>",
    ),
    "aya_vision": ProcessorFiles(
        "CohereLabs/aya-vision-8b",
        {
            **STEPS,
            **HALVES,
            "image_processor_type": "GotOcr2ImageProcessor",
            "processor_class": "AyaVisionProcessor",
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 12,
            "resample": 3,
            "size": SQUARE,
        },
        "<image>",
        {
            "patch_size": 2 * PATCH,
            "img_size": SIDE,
            "image_token": "<image>",
            "downsample_factor": 1,
            "processor_class": "AyaVisionProcessor",
        },
        token="<|IMG_PATCH|>",
    ),
    "deepseek_vl_v2": ProcessorFiles(
        "deepseek-ai/deepseek-vl2-tiny",
        None,
        "<image>",
        {
            **HALVES,
            "candidate_resolutions": [[SIDE, SIDE], *GRID],
            "processor_class": "DeepseekVLV2Processor",
            "patch_size": PATCH,
            "downsample_ratio": 2,
            "normalize": True,
            "image_token": "<image>",
            "pad_token": "<|endoftext|>",
            "add_special_token": False,
            "sft_format": "deepseek",
            "mask_prompt": False,
            "ignore_id": -100,
        },
        tokenizer=BEGINS,
    ),
    "llava_bunny": ProcessorFiles("mlx-community/nanoLLaVA-1.5-4bit", None, "<image>", named=()),
    "multi_modality": ProcessorFiles(
        "deepseek-ai/deepseek-vl-1.3b-chat",
        {
            **CLIP,
            "image_processor_type": "VLMImageProcessor",
            "processor_class": "VLChatProcessor",
            "background_color": [127, 127, 127],
            "do_normalize": True,
            "image_size": 384,
            "min_size": 14,
            "rescale_factor": 1 / 255,
        },
        "<image>",
        {
            "add_special_token": False,
            "ignore_id": -100,
            "image_tag": "<image_placeholder>",
            "mask_prompt": True,
            "num_image_tokens": 576,
            "processor_class": "VLChatProcessor",
            "sft_format": "deepseek",
        },
        named=(),
    ),
    "fastvlm": ProcessorFiles(
        "apple/FastVLM-0.5B",
        {
            **STEPS,
            "image_processor_type": "CLIPImageProcessor",
            "image_mean": [0.0, 0.0, 0.0],
            "image_std": [1.0, 1.0, 1.0],
            "do_center_crop": True,
            "crop_size": {"height": 128, "width": 128},
            "size": {"shortest_edge": 128},
            "resample": 3,
        },
        "<image>",
        named=(),
    ),
    "falcon_ocr": ProcessorFiles(
        "tiiuae/Falcon-OCR",
        None,
        "plain",
        token="<|image|>",
        named=("image_token_id", "image_token_index", "img_id"),
    ),
    "phi4_siglip": ProcessorFiles("microsoft/Phi-4-reasoning-vision-15B", None, "<image>", named=()),
    "paligemma": ProcessorFiles(
        "google/paligemma2-3b-mix-224",
        {
            **STEPS,
            **HALVES,
            "image_processor_type": "SiglipImageProcessor",
            "processor_class": "PaliGemmaProcessor",
            "image_seq_length": 16,
            "resample": 3,
            "size": SQUARE,
        },
        "<image>",
        tokenizer=BEGINS,
    ),
}
