"""Tiny float32 models that take text, images, videos and audio, as folders with the processor files of real
checkpoints. `render` writes a prompt with a placeholder for each medium; `make_audio` makes audio."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.tiny.byte_tokenizer import CHATML, EOS, TOKEN_ID, VOCAB, save_tokenizer, write_json
from benchmarks.tiny.random_models import save_weights
from benchmarks.tiny.vision_configs import make_vision_config
from benchmarks.tiny.vision_families import VISION
from mlxrun.config.media_settings import Audio, Video

OMNI = ("qwen3_omni_moe",)
RATE = 16_000
MEL_BINS = 16
PLACEHOLDERS: dict[type[Any], str] = {
    Image.Image: "<|vision_start|><|image_pad|><|vision_end|>",
    Video: "<|vision_start|><|video_pad|><|vision_end|>",
    Audio: "<|audio_start|><|audio_pad|><|audio_end|>",
}
Part = str | Image.Image | Video | Audio
_TOKENS = {
    "image_token_id": TOKEN_ID["<|image_pad|>"],
    "video_token_id": TOKEN_ID["<|video_pad|>"],
    "audio_token_id": TOKEN_ID["<|audio_pad|>"],
    "vision_start_token_id": TOKEN_ID["<|vision_start|>"],
    "vision_end_token_id": TOKEN_ID["<|vision_end|>"],
}
_FILES = {  # as in Qwen/Qwen3-Omni-30B-A3B-Instruct
    "image_processor_type": "Qwen2VLImageProcessor",
    "feature_extractor_type": "WhisperFeatureExtractor",
    "processor_class": "Qwen3OmniMoeProcessor",
    "patch_size": 8,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": 16 * 16,
    "max_pixels": 64 * 64,
    "feature_size": MEL_BINS,
    "sampling_rate": RATE,
    "hop_length": 160,
    "n_fft": 400,
    "chunk_length": 30,
    "padding_value": 0.0,
    "return_attention_mask": True,
}


def build(family: str, folder: Path) -> Path:
    """Write the tiny model of this family with its processor files."""
    from mlx_vlm.utils import get_model_and_args, update_module_configs

    config = make_vision_config(family, VISION[family]) | {"vocab_size": VOCAB, "eos_token_id": EOS}
    config |= {"thinker_config": config["thinker_config"] | _TOKENS, **_TOKENS}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    module, _ = get_model_and_args(config=config)
    settings = update_module_configs(
        module.ModelConfig.from_dict(config), module, config, ["text", "vision", "audio"]
    )
    save_weights(module.Model(settings), folder, 1, False, False)
    parts = {"video": PLACEHOLDERS[Video], "audio": PLACEHOLDERS[Audio]}
    more = "".join(f"{{% elif p.type == '{kind}' %}}{text}" for kind, text in parts.items())
    template = CHATML.replace("IMAGE", PLACEHOLDERS[Image.Image])
    names = ("image", "video", "audio")
    tokens = {f"{name}_token": f"<|{name}_pad|>" for name in names}
    tokens |= {"vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>"}
    tokens |= {"audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>"}
    save_tokenizer(
        folder,
        template.replace("{% else %}{{ p.text }}", more + "{% else %}{{ p.text }}"),
        extra_special_tokens=tokens,
    )
    write_json(folder / "preprocessor_config.json", _FILES)
    return folder


def render(*parts: Part) -> tuple[str, list[Image.Image], list[Video], list[Audio]]:
    """A user's turn in ChatML, and its images, videos and audio."""
    marks = [
        next((mark for kind, mark in PLACEHOLDERS.items() if isinstance(part, kind)), part) for part in parts
    ]
    text = f"<|im_start|>user\n{''.join(map(str, marks))}<|im_end|>\n<|im_start|>assistant\n"
    images, videos, audio = (
        [part for part in parts if isinstance(part, kind)] for kind in (Image.Image, Video, Audio)
    )
    return text, images, videos, audio


def make_audio(seed: int, seconds: float = 0.5) -> Audio:
    """Tones and noise, other ones for each seed."""
    rng = np.random.default_rng([seed, 3])
    at = np.arange(round(seconds * RATE)) / RATE
    tones = [np.sin(2 * np.pi * hertz * at) for hertz in rng.uniform(100, 4000, 3)]
    samples = 0.2 * np.sum(tones, axis=0) + rng.uniform(-0.1, 0.1, len(at))
    return Audio(samples.astype(np.float32), RATE)


def answer(folder: Path, parts: Sequence[Part], count: int) -> Any:
    """The ORACLE of a prompt: the library's own `prepare_inputs`, and its loop for one request."""
    from tests.helpers import oracle

    text, images, videos, audio = render(*parts)
    return oracle.vision_answer(folder, text, images, count, videos, audio)
