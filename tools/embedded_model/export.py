"""Writes weights as a Qwen3-VL model folder: ``python -m tools.embedded_model.export WEIGHTS MODEL_DIR``.

Weights are stored as float16 under the names of a Qwen3-VL checkpoint; run them as float32.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from tools.embedded_model.net import CONFIG

CONTEXT = 4096


def config(tokenizer: Tokenizer) -> dict:
    """config.json of the trained shape."""
    text, vision, to_id = CONFIG["text"], CONFIG["vision"], tokenizer.token_to_id
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "dtype": "float16",
        "tie_word_embeddings": True,
        "vocab_size": text["vocab"],
        "image_token_id": to_id("<|image_pad|>"),
        "video_token_id": to_id("<|video_pad|>"),
        "vision_start_token_id": to_id("<|vision_start|>"),
        "vision_end_token_id": to_id("<|vision_end|>"),
        "eos_token_id": to_id("<|im_end|>"),
        "pad_token_id": to_id("<|endoftext|>"),
        "text_config": {
            "model_type": "qwen3_vl_text",
            "vocab_size": text["vocab"],
            "hidden_size": text["hidden"],
            "num_hidden_layers": text["layers"],
            "intermediate_size": text["mlp"],
            "num_attention_heads": text["heads"],
            "num_key_value_heads": text["heads"],
            "head_dim": text["head_dim"],
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": text["theta"],
            "rope_scaling": {
                "rope_type": "default",
                "mrope_section": list(text["sections"]),
                "mrope_interleaved": True,
            },
            "max_position_embeddings": CONTEXT,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "eos_token_id": to_id("<|im_end|>"),
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "depth": vision["depth"],
            "hidden_size": vision["hidden"],
            "intermediate_size": vision["mlp"],
            "num_heads": vision["heads"],
            "hidden_act": "gelu_pytorch_tanh",
            "in_channels": 3,
            "patch_size": vision["patch"],
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "spatial_patch_size": vision["patch"],
            "num_position_embeddings": vision["side"] ** 2,
            "deepstack_visual_indexes": list(vision["deepstack"]),
            "out_hidden_size": text["hidden"],
        },
    }


def image_settings(low: int, high: int) -> dict:
    """Processor settings: any image becomes at most 16 tokens of 32 x 32 pixels."""
    return {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "patch_size": CONFIG["vision"]["patch"],
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": low,
        "max_pixels": high,
        "size": {"shortest_edge": low, "longest_edge": high},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_convert_rgb": True,
    }


def write_json(path: Path, value: dict) -> None:
    """Write a JSON file for people to read."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def export(checkpoint: Path, folder: Path) -> None:
    """Write everything but the tokenizer and the chat template, which are there already."""
    state = torch.load(checkpoint, map_location="cpu", weights_only=True)
    weights = {k: v.to(torch.float16).contiguous() for k, v in state.items()}
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    write_json(folder / "config.json", config(tokenizer))
    video = image_settings(9216, 65536) | {"video_processor_type": "Qwen3VLVideoProcessor"}
    video.pop("image_processor_type")
    write_json(folder / "preprocessor_config.json", image_settings(9216, 16384))
    write_json(folder / "video_preprocessor_config.json", video)
    generation = {
        "eos_token_id": [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")],
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "do_sample": False,
    }
    write_json(folder / "generation_config.json", generation)


if __name__ == "__main__":
    export(Path(sys.argv[1]), Path(sys.argv[2]))
