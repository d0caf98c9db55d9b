"""Prompts in which one token stands for all features of an image. They get a token for each feature.

The processors of some families of mlx-vlm make one token of an image. Their models put all features in the
place of this token. An engine counts, splits and caches tokens, so each feature needs its own. The hook of
hooks/single_placeholders.py computes such prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxrun.core.errors import MediaError

FEATURE_TOKEN = 1 << 30  # of each feature: beyond all vocabularies, as -200 would not be for a tokenizer
Counter = Callable[[Mapping[str, Any], Mapping[str, Any]], Sequence[int]]


@dataclass(frozen=True, slots=True)
class SinglePlaceholder:
    """`token`: the one of an image in the processor's prompts. `config`: config.json; `counter`: of the
    features of each image, by this and by the processor's arrays."""

    token: int
    config: Mapping[str, Any]
    counter: Counter

    def count(self, media: Mapping[str, Any]) -> list[int]:
        """The number of features of each image."""
        if "pixel_values" not in media:
            return []
        return [int(count) for count in self.counter(self.config, media)]

    def expand(self, ids: Sequence[int], media: Mapping[str, Any]) -> tuple[int, ...]:
        """The prompt with FEATURE_TOKEN for each feature. MediaError if it has other than a token for each
        image."""
        counts, found = self.count(media), list(ids).count(self.token)
        if found != len(counts):
            raise MediaError(
                f"the model's processor makes {found} placeholders of {len(counts)} images: this model takes "
                "one image in a prompt"
            )
        runs = iter(counts)
        expanded = ([FEATURE_TOKEN] * next(runs) if token == self.token else [token] for token in ids)
        return tuple(token for run in expanded for token in run)


def _count_square(config: Mapping[str, Any], media: Mapping[str, Any]) -> Sequence[int]:
    """Of images that are as large as the tower's: a feature for each patch."""
    tower = config.get("vision_config") or {}
    side = tower.get("image_size", 384) // tower.get("patch_size", 14)
    return [side * side] * len(media["pixel_values"])


def _count_patches(config: Mapping[str, Any], media: Mapping[str, Any]) -> Sequence[int]:
    """Of images [n, 3, H, W] of any size."""
    patch = (config.get("vision_config") or {}).get("patch_size", 64)
    count, _, height, width = media["pixel_values"].shape
    return [(height // patch) * (width // patch)] * count


def _count_fixed(config: Mapping[str, Any], media: Mapping[str, Any]) -> Sequence[int]:
    return [config.get("num_image_tokens", 576)] * len(media["pixel_values"])


def _count_shapes(config: Mapping[str, Any], media: Mapping[str, Any]) -> Sequence[int]:
    """Of images that are padded to the largest, by their height and width in patches."""
    return np.array(media["spatial_shapes"]).prod(axis=-1).tolist()


def _count_masked(config: Mapping[str, Any], media: Mapping[str, Any]) -> Sequence[int]:
    """The same by a mask of what is no padding. Without one, images are not padded."""
    mask = media.get("pixel_attention_mask")
    return _count_square(config, media) if mask is None else np.array(mask).sum(axis=-1).tolist()


# By the module of mlx-vlm: the token if the config names none, and the counter.
_FAMILIES: Mapping[str, tuple[int, Counter]] = {
    "llava_bunny": (-200, _count_square),
    "fastvlm": (-200, _count_patches),
    "multi_modality": (100015, _count_fixed),
    "phi4mm": (-200, _count_shapes),
    "phi4_siglip": (-200, _count_masked),
}


def find_placeholder(config: Mapping[str, Any]) -> SinglePlaceholder | None:
    """Of a model's config.json; None if its processor makes a token of each feature."""
    from mlx_vlm.utils import MODEL_REMAPPING

    kind = config.get("model_type", "")
    family = MODEL_REMAPPING.get(kind, kind)
    if family not in _FAMILIES:
        return None
    token, counter = _FAMILIES[family]
    named = token if family == "phi4_siglip" else config.get("image_token_index", token)
    return SinglePlaceholder(named, config, counter)
