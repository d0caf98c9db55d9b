"""The processor files of checkpoints whose image processors are mlx-vlm's own."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.tiny.byte_tokenizer import place_specials
from benchmarks.tiny.processor_entry import (
    CLIP,
    EDGES,
    GLM,
    HALVES,
    PIXELS,
    SIZES,
    STEPS,
    WRAPPED,
    ProcessorFiles,
)
from benchmarks.tiny.vision_media import PATCH, SIDE
from benchmarks.tiny.vision_parts import MOLMO2_TOWER

_LARGE = {"vision_config": {"patch_size": 14}}  # where the library reads no size of patches
_KIMI = ("<|media_pad|>", "<|media_begin|>", "<|media_start|>", "<|media_content|>", "<|media_end|>")
_MOLMO = ("<im_patch>", "<im_col>", "<im_start>", "<im_end>", "<low_res_im_start>")

_BEGUN = ("<|begin_of_image|>", "<|end_of_image|>")
_GLM_IMAGE = "<|begin_of_image|><|image|><|end_of_image|>"
_GLM5 = {**SIZES, **HALVES, "temporal_patch_size": 2, "min_image_tokens": 2, "max_image_tokens": 16}
_SLICED = {
    "norm_mean": [0.5, 0.5, 0.5],
    "norm_std": [0.5, 0.5, 0.5],
    "max_slice_nums": 4,
    "scale_resolution": SIDE,
    "patch_size": PATCH,
    "slice_mode": True,
    "use_image_id": True,
}
_SLICES = ("</image>", "<slice>", "</slice>", "<image_id>", "</image_id>")

OF_MLX_VLM: Mapping[str, ProcessorFiles] = {
    "kimi_vl": ProcessorFiles(
        "moonshotai/Kimi-VL-A3B-Instruct",
        {**HALVES, "in_token_limit": 64, "patch_size": PATCH, "num_pooled_tokens": 1024, "pad_input": True},
        "<|media_start|>image<|media_content|><|media_pad|><|media_end|>",
        token="<|media_pad|>",
        named=("media_placeholder_token_id", "image_token_id", "image_token_index"),
        config=_LARGE,
        specials=_KIMI,
    ),
    "kimi_k25": ProcessorFiles(
        "moonshotai/Kimi-K2.5",
        {
            "media_proc_cfg": {
                **HALVES,
                "in_patch_limit": 64,
                "patch_size": PATCH,
                "merge_kernel_size": 2,
                "fixed_output_tokens": None,
                "patch_limit_on_one_side": 512,
            }
        },
        "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>\n",
        token="<|media_pad|>",
        named=("media_placeholder_token_id", "image_token_id", "image_token_index"),
        specials=_KIMI,
    ),
    "kimi_k3": ProcessorFiles(
        "moonshotai/Kimi-K3",
        {
            "media_proc_cfg": {
                **HALVES,
                "in_patch_limit": 64,
                "patch_size": PATCH,
                "merge_kernel_size": 2,
                "patch_limit_on_one_side": 512,
            }
        },
        "<|kimi_image_placeholder|>",
        token="<|media_pad|>",
        named=("media_placeholder_token_id", "image_token_id", "image_token_index"),
        config=_LARGE,
        specials=(*_KIMI, "<|kimi_image_placeholder|>"),
    ),
    "llama4": ProcessorFiles(
        "meta-llama/Llama-4-Scout-17B-16E-Instruct",
        {
            **STEPS,
            **HALVES,
            "image_processor_type": "Llama4ImageProcessorFast",
            "processor_class": "Llama4Processor",
            "max_patches": 4,
            "resample": 2,
            "resize_to_max_canvas": False,
            "size": {"height": 56, "width": 56},
        },
        "<|image|>",
        {
            "fake_image_token": "<|image|>",
            "image_token": "<|image|>",
            "patch_size": 14,
            "pixel_shuffle_ratio": 0.5,
            "processor_class": "Llama4Processor",
        },
        token="<|patch|>",
        specials=(
            *("<|patch|>", "<|image_start|>", "<|image_end|>"),
            *("<|tile_x_separator|>", "<|tile_y_separator|>"),
        ),
        config={"vision_config": {"patch_size": 14, "image_size": 56}},
    ),
    "glm4v_moe": ProcessorFiles(
        "zai-org/GLM-4.5V",
        GLM,
        _GLM_IMAGE,
        token="<|image|>",
        start="<|begin_of_image|>",
        specials=(*_BEGUN, "<|begin_of_box|>", "<|end_of_box|>"),
    ),
    "glm_ocr": ProcessorFiles(
        "zai-org/GLM-OCR",
        GLM | {"image_processor_type": "Glm46VImageProcessor", "processor_class": "Glm46VProcessor"},
        _GLM_IMAGE,
        token="<|image|>",
        specials=_BEGUN,
    ),
    "glm5_next": ProcessorFiles(
        "GLM-5 with images",
        None,
        _GLM_IMAGE,
        {
            "processor_class": "Glm5NextProcessor",
            "image_processor": _GLM5,
            "video_processor": _GLM5,
        },
        config=_LARGE,
        token="<|image|>",
        specials=(*_BEGUN, "<|begin_of_video|>", "<|end_of_video|>"),
    ),
    "dots_ocr": ProcessorFiles(
        "rednote-hilab/dots.ocr",
        {
            **CLIP,
            **PIXELS,
            **SIZES,
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "DotsVLProcessor",
            "temporal_patch_size": 1,
        },
        "<|img|><|imgpad|><|endofimg|>",
        token="<|imgpad|>",
        specials=("<|imgpad|>", "<|img|>", "<|endofimg|>"),
        config={"vision_config": {"temporal_patch_size": 1}},
    ),
    "molmo": ProcessorFiles(
        "allenai/Molmo-7B-D-0924",
        {
            **CLIP,
            "image_processor_type": "MolmoImageProcessor",
            "processor_class": "MolmoProcessor",
            "base_image_input_size": [48, 48],
            "do_normalize": True,
            "image_padding_mask": True,
            "image_patch_size": PATCH,
            "image_token_length_h": 3,
            "image_token_length_w": 3,
            "max_crops": 4,
            "overlap_margins": [2, 2],
        },
        "",
        token="<im_patch>",
        specials=_MOLMO,
        config={"vision_config": {"image_default_input_size": [48, 48], "image_num_pos": 37}},
    ),
    "molmo2": ProcessorFiles(
        "allenai/Molmo2-8B",
        {
            **HALVES,
            "image_processor_type": "Molmo2ImageProcessor",
            "processor_class": "Molmo2Processor",
            "do_convert_rgb": True,
            "max_crops": 4,
            "overlap_margins": [1, 1],
            "patch_size": PATCH,
            "pooling_size": [2, 2],
            "resample": 2,
            "size": {"height": SIDE, "width": SIDE},
        },
        "<|image|>",
        token="<im_patch>",
        named=("image_patch_id", "image_token_id", "image_token_index"),
        specials=_MOLMO,
        config={
            "vision_config": {
                "vit_config": MOLMO2_TOWER["vit_config"]
                | {"image_patch_size": 14, "image_num_pos": 729, "image_default_input_size": [378, 378]}
            },
            "image_end_token_id": place_specials(_MOLMO)["<im_end>"],
        },
    ),
    "paddleocr_vl": ProcessorFiles(
        "PaddlePaddle/PaddleOCR-VL",
        {
            **STEPS,
            **HALVES,
            **PIXELS,
            **SIZES,
            "image_processor_type": "PaddleOCRVLImageProcessor",
            "processor_class": "PaddleOCRVLProcessor",
            "temporal_patch_size": 1,
        },
        "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        token="<|IMAGE_PLACEHOLDER|>",
        start="<|IMAGE_START|>",
        specials=("<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>"),
    ),
    "granite4_vision": ProcessorFiles(
        "ibm-granite/granite-4.0-3b-vision",
        {
            **STEPS,
            **HALVES,
            "image_processor_type": "LlavaNextImageProcessor",
            "processor_class": "Granite4VisionProcessor",
            "crop_size": {"height": SIDE, "width": SIDE},
            "do_center_crop": True,
            "image_grid_pinpoints": [[SIDE, SIDE]],
            "resample": 3,
            "size": {"height": SIDE, "width": SIDE},
        },
        "<image>",
        {
            "image_token": "<image>",
            "patch_size": PATCH,
            "downsample_rate": "1/2",
            "num_additional_image_tokens": 0,
            "processor_class": "Granite4VisionProcessor",
            "vision_feature_select_strategy": "full",
        },
    ),
    "internvl_chat": ProcessorFiles(
        "OpenGVLab/InternVL2_5-1B",
        {
            "crop_size": 448,
            "do_center_crop": True,
            "do_normalize": True,
            "do_resize": True,
            "feature_extractor_type": "CLIPFeatureExtractor",
            "image_mean": [0.485, 0.456, 0.406],
            "image_std": [0.229, 0.224, 0.225],
            "resample": 3,
            "size": 448,
        },
        "<image>",
        token="<IMG_CONTEXT>",
        config={"force_image_size": SIDE, "downsample_ratio": 0.5, "max_dynamic_patch": 4},
    ),
    "locateanything": ProcessorFiles(
        "nvidia/LocateAnything-3B",
        {**HALVES, "in_token_limit": 64, "patch_size": PATCH, "merge_kernel_size": [2, 2]},
        "<image-1>",
        config=_LARGE,
        token="<IMG_CONTEXT>",
    ),
    "mage_vl": ProcessorFiles(
        "Mage-VL",
        {
            **CLIP,
            **PIXELS,
            **SIZES,
            "image_processor_type": "Qwen2VLImageProcessor",
            "temporal_patch_size": 1,
        },
        WRAPPED,
        token="<|image_pad|>",
    ),
    "muse_glimmer": ProcessorFiles(
        "Muse Glimmer",
        None,
        "<|patch|>",
        {"image_processor": {**HALVES, **SIZES, "temporal_patch_size": 2, "max_image_tokens": 16}},
        token="<|patch|>",
        specials=("<|patch|>", "<|image_start|>", "<|image_end|>", "<|video|>"),
    ),
    "minimax_m3_vl": ProcessorFiles(
        "MiniMaxAI/MiniMax-M3",
        {
            **CLIP,
            **PIXELS,
            **SIZES,
            "image_processor_type": "MiniMaxM3VLImageProcessor",
            "temporal_patch_size": 2,
        },
        "]<]image[>[",
        token="]<]image[>[",
        specials=("]<]image[>[", "]<]video[>[", "]<]start of image[>[", "]<]end of image[>["),
    ),
    "got": ProcessorFiles(
        "stepfun-ai/GOT-OCR2_0",
        None,
        "<image>",
        token="<imgpad>",
        named=("im_patch_token", "image_token_id", "image_token_index"),
        specials=("<imgpad>",),
        config={"vision_config": {"img_size": 1024, "patch_size": 16}},
    ),
    "hunyuan_vl": ProcessorFiles(
        "tencent/HunyuanOCR",
        {**CLIP, **PIXELS, **SIZES, "image_processor_type": "HunYuanVLImageProcessor"},
        "<|vision_start|><image><|vision_end|>",
        config=PIXELS,
    ),
    "minicpmv4_6": ProcessorFiles(
        "openbmb/MiniCPM-V-4_6",
        {
            "image_processor_type": "MiniCPMVImageProcessor",
            "processor_class": "MiniCPMVProcessor",
            **_SLICED,
        },
        "<|image_pad|>",
        token="<|image_pad|>",
        config={"insert_layer_id": 0},
        specials=_SLICES,
    ),
    "minicpmv4_7": ProcessorFiles(
        "openbmb/MiniCPM-V-4_7",
        _SLICED,
        "<|image_pad|>",
        token="<|image_pad|>",
        specials=_SLICES,
    ),
    "qwen4_exp": ProcessorFiles(
        "Qwen 4, an experiment",
        {
            **HALVES,
            **EDGES,
            **SIZES,
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "processor_class": "Qwen3VLProcessor",
            "temporal_patch_size": 2,
        },
        WRAPPED,
        token="<|image_pad|>",
        config={"text_config": {"indexer_kv_heads": 1, "indexer_compress_ratio": 4}},
    ),
    "step3p7": ProcessorFiles(
        "stepfun-ai/Step-3.7",
        None,
        "<im_patch>",
        token="<im_patch>",
        specials=("<im_patch>", "<im_start>", "<im_end>", "<patch_start>", "<patch_end>", "<patch_newline>"),
        config={"vision_config": {"patch_size": 14, "image_size": 728}},
    ),
    "jina_vlm": ProcessorFiles(
        "jinaai/jina-vlm",
        None,
        "<|image|>",
        token="<im_patch>",
        specials=("<im_patch>", "<im_start>", "<im_end>", "<im_col>"),
        config={"vision_config": {"input_size": [48, 48], "image_size": 48}},
    ),
}
