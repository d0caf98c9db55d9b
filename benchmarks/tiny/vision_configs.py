"""Tiny configs of mlx-vlm's vision-language models, made of the arguments that each family declares.

What a family needs beyond that is in vision_families.py; its values are merged into what `fill_arguments`
makes of the library's arguments.
"""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass, field
from typing import Any

from benchmarks.tiny.byte_tokenizer import TOKEN_ID, VOCAB
from benchmarks.tiny.text_configs import fill_arguments
from benchmarks.tiny.vision_media import END, IMAGE, PATCH, SIDE, START

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
    "image_start_token_id": START,
    "image_end_token_id": END,
    "vocab_size": VOCAB,
    "hidden_size": 64,
}


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """`text`, `tower`, `own`: values of the parts of the config and of its top; `flat`: the text part's
    values are at the top. `most`: images of a prompt. Of families without processor files: `tokens`, of one
    image; `media`, the layout of pixels (vision_media.py); `wrapped`, tokens for the beginning and the end
    stand around an image; `first`, an image follows a prompt's first token."""

    tokens: int = 0
    media: str = "pixels"
    text: dict[str, Any] = field(default_factory=dict)
    tower: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    flat: bool = False
    wrapped: bool = False
    first: bool = False
    most: int = 2


def make_vision_config(family: str, entry: VisionFamily) -> dict[str, Any]:
    """The config.json of a tiny model. Raises what the library's module raises."""
    module = importlib.import_module(f"mlx_vlm.models.{family}")
    names = {part.name for part in dataclasses.fields(module.VisionConfig)}
    sizes = {name: value for name, value in _TOWER.items() if name in names}
    tower = fill_arguments(module.VisionConfig) | sizes | entry.tower
    text = fill_arguments(module.TextConfig) | {"model_type": family, "vocab_size": VOCAB} | entry.text
    config = fill_arguments(module.ModelConfig) | {"model_type": family} | _TOKENS
    if entry.flat:
        config.pop("text_config", None)
    config |= text if entry.flat else {"text_config": text}
    return config | {"vision_config": tower, "model_type": family} | entry.own
