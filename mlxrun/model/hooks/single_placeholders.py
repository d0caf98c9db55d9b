"""Features of images for prompts with a token for each, in families whose prompts have one for all.

In mlx-vlm, LLaVA-Bunny, FastVLM, DeepSeek-VL and the Phi-4 that see have all features of an image in place of
one token (vision/placeholders.py makes more). Some of them place a second image wrongly. Here the library
embeds each image in a prompt of its own, and the text without images.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxrun.model.hooks.derived_layers import mix_in
from mlxrun.model.vision.image_units import BOUNDS, group_by_kind
from mlxrun.model.vision.placeholders import FEATURE_TOKEN, SinglePlaceholder, find_placeholder

_MINICPM = tuple(f"mlx_vlm.models.{name}.{name}" for name in ("minicpmo", "minicpmv4_6", "minicpmv4_7"))


class _FeatureTokens:
    """Before the methods of the library's model."""

    feature_token = FEATURE_TOKEN
    _placeholder: SinglePlaceholder

    def get_input_embeddings(
        self, input_ids: mx.array, pixel_values: mx.array | None = None, **given: Any
    ) -> Any:
        """The embeddings of a prompt [1, L]. `given`: other arrays of the processor, by image, or those of
        sounds. ValueError if an image has other than as many features as it was counted to have."""
        embed = super().get_input_embeddings  # type: ignore[misc]
        is_feature = input_ids == FEATURE_TOKEN
        sounds = group_by_kind(given).get("audio", {})
        made = embed(mx.where(is_feature, 0, input_ids), None, **sounds)
        if pixel_values is None:
            return made
        counts = self._placeholder.count({"pixel_values": pixel_values, **given})
        given.pop("mask", None)
        ids = mx.array([[0, self._placeholder.token, 0]])
        parts = []
        for image, count in enumerate(counts):
            arrays = {key: array[image : image + 1] for key, array in given.items()}
            pixels = pixel_values[image : image + 1]
            parts.append(embed(ids, pixels, mask=mx.ones_like(ids), **arrays).inputs_embeds[0, 1:-1])
            if len(parts[-1]) != count:
                raise ValueError(f"{len(parts[-1])} features of an image for {count} tokens")
        embeds = made.inputs_embeds
        places = mx.array(np.flatnonzero(np.array(is_feature)[0]))
        embeds[0, places] = mx.concatenate(parts).astype(embeds.dtype)
        return made

    def set_modality(self, has_image: bool = False, has_audio: bool = False) -> None:
        """Phi-4 multimodal has the weights for images from the start, and never others. ValueError for sound
        if it has others of its own, with which the library changes those of all rows. Quantized checkpoints
        have one set of weights for all."""
        if has_audio and getattr(self, "_base_weights", None):
            raise ValueError("mlx-vlm changes the weights for sound, those of other requests too")


class _OnePrompt:
    """Before the methods of MiniCPM's models, whose arrays begin with an axis of prompts."""

    def get_input_embeddings(
        self, input_ids: mx.array, pixel_values: mx.array | None = None, **given: Any
    ) -> Any:
        """The embeddings of a prompt [1, L], with arrays of this prompt or of a list of it."""
        embed = super().get_input_embeddings  # type: ignore[misc]
        pixels: Any = pixel_values
        if isinstance(pixels, list) or (pixels is not None and pixels.ndim == 4):
            pixels = [pixels]
        places = {key: given[key] for key in ("tgt_sizes", *BOUNDS) if key in given}
        given |= {key: array[None] for key, array in places.items() if array.ndim == 2}
        return embed(input_ids, pixels, **given)


def hook_placeholders(model: nn.Module, checkpoint: Mapping[str, Any]) -> int:
    """Let a model of these families take a token for each feature, and MiniCPM a prompt alone. Returns 1 if
    it is one. `checkpoint`: its config.json."""
    if type(model).__module__ in _MINICPM:
        mix_in(model, _OnePrompt, "OnePrompt")
        return 1
    found = find_placeholder(checkpoint) if hasattr(model, "get_input_embeddings") else None
    if found is None:
        return 0
    mix_in(model, _FeatureTokens, "FeatureTokens")
    model._placeholder = found
    return 1
