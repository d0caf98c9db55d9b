"""Tiny float32 random-weight vision-language models, as folders that mlx_vlm and its processors load.

`build(family, folder)` is as in models.py. More families, with files as checkpoints have them, are in
benchmarks/tiny/processor_files.py.
Images are small (`images(seed, n)`): 4 to 18 tokens each. `prompt(family, *parts)` renders ChatML with one
placeholder an image, in the order of the parts, as an OpenAI message has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.tiny.byte_tokenizer import CHATML, EOS, TOKEN_ID, TOKENS, VOCAB, save_tokenizer, write_json
from benchmarks.tiny.random_models import save_weights
from mlxrun.config.media_settings import Video
from tests.helpers import text_models

_TEXT = {
    **TOKENS,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_MROPE = {"type": "default", "mrope_section": [4, 2, 2]}
_QWEN_TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "out_hidden_size": 64,
    "num_heads": 2,
    "patch_size": 8,
    "spatial_patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [],
}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 8,
    "image_size": 32,
}
_QWEN_IDS = {
    "image_token_id": TOKEN_ID["<|image_pad|>"],
    "video_token_id": TOKEN_ID["<|video_pad|>"],
    "vision_start_token_id": TOKEN_ID["<|vision_start|>"],
    "vision_end_token_id": TOKEN_ID["<|vision_end|>"],
    "vision_token_id": TOKEN_ID["<|image_pad|>"],
}
_QWEN_IMAGES = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 8,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": 16 * 16,
    "max_pixels": 64 * 64,
}
_SQUARE = {"size": {"height": 32, "width": 32}, "do_resize": True, "do_normalize": True}

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_vl": {
        "text_config": {"model_type": "qwen3_vl_text", **_TEXT, "head_dim": 16, "rope_scaling": _MROPE},
        "vision_config": {"model_type": "qwen3_vl", **_QWEN_TOWER, "deepstack_visual_indexes": [0, 1]},
        **_QWEN_IDS,
    },
    "gemma3": {
        "text_config": {
            "model_type": "gemma3_text",
            **_TEXT,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
            "sliding_window_pattern": 2,
            "mm_tokens_per_image": 4,
            "rope_global_base_freq": 10000.0,
            "rope_local_base_freq": 1000.0,
        },
        "vision_config": {"model_type": "siglip_vision_model", **_TOWER},
        "hidden_size": 64,
        "image_token_index": TOKEN_ID["<image_soft_token>"],
    },
    "idefics3": {
        "text_config": {"model_type": "llama", **_TEXT},
        "vision_config": {"model_type": "idefics3_vision", **_TOWER},
        "scale_factor": 2,
        "image_token_id": TOKEN_ID["<image>"],
    },
    "smolvlm": {
        "text_config": {"model_type": "llama", **_TEXT},
        "vision_config": {"model_type": "smolvlm_vision", **_TOWER},
        "scale_factor": 2,
        "image_token_id": TOKEN_ID["<image>"],
    },
    "qwen2_5_vl": {
        **_TEXT,
        "rope_scaling": {**_MROPE, "type": "mrope"},
        "vision_config": {
            "model_type": "qwen2_5_vl",
            **_QWEN_TOWER,
            "window_size": 32,
            "fullatt_block_indexes": [1],
        },
        **_QWEN_IDS,
    },
    "qwen3_5": {
        "text_config": {
            "model_type": "qwen3_5_text",
            **_TEXT,
            **text_models.CONFIGS["qwen3_5"],
            "head_dim": 16,
            "rope_parameters": {
                "type": "default",
                "mrope_section": [2, 1, 1],
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
        "vision_config": {"model_type": "qwen3_5", **_QWEN_TOWER},
        **_QWEN_IDS,
    },
    "pixtral": {
        "text_config": {"model_type": "mistral", **_TEXT, "head_dim": 16},
        "vision_config": {"model_type": "pixtral", **_TOWER, "head_dim": 16},
        "image_token_index": TOKEN_ID["[IMG]"],
    },
}
VISION = tuple(CONFIGS)
CORE = ("qwen3_vl", "gemma3", "idefics3")
MROPE = ("qwen3_vl", "qwen2_5_vl", "qwen3_5")

_PROCESSOR: dict[str, dict[str, Any]] = {
    "gemma3": {"processor_class": "Gemma3Processor", "image_seq_length": 4},
    "idefics3": {"processor_class": "Idefics3Processor", "image_seq_len": 4},
    "smolvlm": {"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
    "pixtral": {"processor_class": "PixtralProcessor", "patch_size": 8, "spatial_merge_size": 1},
}
_IMAGES: dict[str, dict[str, Any]] = {
    "gemma3": {"image_processor_type": "Gemma3ImageProcessor", **_SQUARE},
    "pixtral": {
        "image_processor_type": "PixtralImageProcessor",
        "size": {"longest_edge": 32},
        "patch_size": {"height": 8, "width": 8},
    },
}
for _family, _name in (("idefics3", "Idefics3"), ("smolvlm", "SmolVLM")):
    _IMAGES[_family] = {
        "image_processor_type": f"{_name}ImageProcessor",
        "size": {"longest_edge": 32},
        "max_image_size": {"longest_edge": 32},
        "do_image_splitting": False,
    }
_PLACEHOLDER = {"gemma3": "<start_of_image>", "idefics3": "<image>", "smolvlm": "<image>", "pixtral": "[IMG]"}
_QWEN_PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO_PLACEHOLDER = "<|vision_start|><|video_pad|><|vision_end|>"
_GEMMA_TOKENS = {
    "extra_special_tokens": {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    }
}


def build(family: str, folder: Path, seed: int | None = None, ends: bool = False) -> Path:
    """Write the tiny model of this family with its processor files."""
    from mlx_vlm.utils import get_model_and_args, update_module_configs

    config = {"model_type": family, "vocab_size": VOCAB, "eos_token_id": EOS, **CONFIGS[family]}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    module, _ = get_model_and_args(config=config)
    modules = ["text", "vision", "perceiver", "projector", "audio"]
    settings = update_module_configs(module.ModelConfig.from_dict(config), module, config, modules)
    # mlx-vlm's gemma3 looks for lm_head under a wrong name, so it is always tied.
    tied = family == "gemma3"
    save_weights(module.Model(settings), folder, 1 + tied if seed is None else seed, ends, tied)
    template = CHATML.replace("IMAGE", placeholder(family))
    save_tokenizer(folder, template, **(_GEMMA_TOKENS if family == "gemma3" else {}))
    write_json(folder / "preprocessor_config.json", _IMAGES.get(family, _QWEN_IMAGES))
    if family in _PROCESSOR:
        write_json(folder / "processor_config.json", _PROCESSOR[family])
    if family in MROPE:
        write_json(folder / "video_preprocessor_config.json", _QWEN_IMAGES)
    return folder


def build_with_video(family: str, folder: Path) -> Path:
    """The same for a family of MROPE, with a template that renders videos."""
    build(family, folder)
    path = folder / "chat_template.jinja"
    video = "{% elif p.type == 'video' %}" + VIDEO_PLACEHOLDER
    path.write_text(path.read_text().replace("{% else %}{{ p.text }}", video + "{% else %}{{ p.text }}"))
    return folder


def placeholder(family: str) -> str:
    """What stands for one image in rendered text."""
    return _PLACEHOLDER.get(family, _QWEN_PLACEHOLDER)


def prompt(family: str, *parts: str | None) -> str:
    """One user turn in ChatML: strings are text, None is an image."""
    content = "".join(placeholder(family) if part is None else part for part in parts)
    return f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"


def images(seed: int, count: int, size: tuple[int, int] | None = None) -> list[Image.Image]:
    """Small RGB images of random blocks, of different sizes unless one is given."""
    rng = np.random.default_rng([seed, 2])
    sizes: Sequence[tuple[int, int]] = [(32, 32), (48, 32), (32, 64), (64, 48)]
    chosen = [size or sizes[int(rng.integers(len(sizes)))] for _ in range(count)]
    blocks = [rng.integers(0, 256, size=(4, 4, 3), dtype=np.uint8) for _ in range(count)]
    return [
        Image.fromarray(b).resize(s, Image.Resampling.NEAREST) for b, s in zip(blocks, chosen, strict=True)
    ]


def video(seed: int, frames: int = 4, size: tuple[int, int] = (32, 32), fps: float = 8.0) -> Video:
    """Every second frame of a video of random blocks; `fps` of the whole video."""
    shown = [np.array(image) for image in images(seed, frames, size)]
    indices = tuple(range(0, 2 * frames, 2))
    return Video(np.stack(shown).transpose(0, 3, 1, 2), indices, 2 * frames, fps)
