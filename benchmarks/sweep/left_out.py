"""The vision-language packages of mlx-vlm that the sweep does not check, by the reason why."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

_VISION = re.compile(r"\bVision(Model|Config)\b|^class ViT\b", re.MULTILINE)
LEFT_OUT: Mapping[str, tuple[str, ...]] = {
    "they give vectors, not text": (
        *("colidefics3", "colqwen2_5", "embedding_gemma2", "llama_nemotron_vl_embedding"),
        *("qwen3_vl_embedding", "siglip"),
    ),
    "they answer by a readout of their own, such as a class or a decision": ("clef", "d1", "d1_omni"),
    "they find, cut out or measure what is in an image": (
        *("falcon_perception", "moge3", "pp_doclayout_v3", "rfdetr", "rt_detr_v2", "sam3", "sam3_1"),
        *("sam3d_body", "sam3d_objects", "video_depth_anything"),
    ),
    "they write by diffusion, not token by token": ("diffusion_gemma",),
    "encoder and decoder: the decoder attends to the image, not to a prompt": ("florence2", "nemotron_parse"),
    "mlx-vlm has no vision model under that name: they load as text models": ("deepseek_v4", "deepseek_v41"),
    "the size of a real vision tower is in mlx-vlm's code, so there is no tiny model": (
        *("deepseekocr", "deepseekocr_2", "phi3_v", "unlimited_ocr"),
    ),
    "tokens that point at an image have logits whose number depends on the image": ("molmo_point",),
    "weights in a packed form of their own": ("prism_hadamard_qwen35",),
}
_AUDIO = re.compile(r"\b(Audio|Sound)(Model|Encoder)\b")
# Families of the sweep whose audio it does not check.
NOT_HEARD: Mapping[str, str] = {
    "mimo_v2": "refused: its processor encodes sounds with a model of its own",
    "muse_spark": "does not build",
}


def list_vision_packages() -> list[str]:
    """The packages of mlx-vlm that have a vision model or a config for one, by name."""
    return _list_packages(_VISION)


def list_audio_packages() -> list[str]:
    """The packages of mlx-vlm that have a model of sounds, by name."""
    return _list_packages(_AUDIO)


def _list_packages(pattern: re.Pattern[str]) -> list[str]:
    """The packages of which a file has the pattern."""
    spec = importlib.util.find_spec("mlx_vlm.models")
    assert spec is not None and spec.submodule_search_locations is not None
    root = Path(next(iter(spec.submodule_search_locations)))
    packages = (folder.parent for folder in sorted(root.glob("*/__init__.py")))
    return [
        package.name
        for package in packages
        if any(pattern.search(file.read_text(encoding="utf-8")) for file in package.glob("*.py"))
    ]
