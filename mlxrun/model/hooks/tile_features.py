"""Features of images in tiles, one for each token that the processor makes.

mlx-vlm's LLaVA-NeXT and Granite Vision put all features of a tile in the place of one token, and a tile of
newlines after them. So a prompt has more embeddings than tokens. Here features are packed as transformers'
models pack them. Those of the whole image, made small, are first. Those of the large one follow, line by line
and without its padding. Each line ends with a newline.

mlx-vlm's DeepSeek-VL2 reads the grids of as many images as there are tiles, beyond the end of their array.
Here the array has rows of zeros, which end the list of images.

mlx-vlm's PaliGemma gives tokens the features of their index in the prompt, which are right if it begins with
the image. Here the image's tokens are the first of the prompt that the library embeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxrun.model.hooks.derived_layers import mix_in


class _PackedTiles:
    """Before the methods of the library's model. `_resolutions`: [height, width] of images in tiles."""

    _resolutions: Sequence[Sequence[int]]
    config: Any
    language_model: Any
    vision_tower: Any
    multi_modal_projector: Any
    image_newline: mx.array

    def get_input_embeddings(
        self, input_ids: mx.array | None = None, pixel_values: mx.array | None = None, **given: Any
    ) -> Any:
        """The embeddings of a prompt [1, L]. `pixel_values`: [images, tiles, 3, H, W]. ValueError if they
        have other than as many features as the prompt has tokens for them."""
        from mlx_vlm.models.base import InputEmbeddingsFeatures

        embeds = self.language_model.model.embed_tokens(input_ids)
        if pixel_values is not None:
            sizes = np.array(given["image_sizes"]).reshape(-1, 2).tolist()
            features = self._compute_features(pixel_values, sizes)
            places = np.flatnonzero(np.array(input_ids)[0] == self.config.image_token_index)
            if len(features) != len(places):
                raise ValueError(f"{len(features)} features of images for {len(places)} tokens")
            embeds[0, mx.array(places)] = features.astype(embeds.dtype)
        return InputEmbeddingsFeatures(inputs_embeds=embeds)

    def _compute_features(self, pixels: mx.array, sizes: Sequence[Sequence[int]]) -> mx.array:
        """Features [tokens, D] of all images. `sizes`: their heights and widths in pixels."""
        from transformers.image_processing_utils import select_best_resolution

        side = self.config.vision_config.image_size
        chosen = [select_best_resolution(size, self._resolutions) for size in sizes]
        grids = [(height // side, width // side) for height, width in chosen]
        counts = [1 + rows * columns for rows, columns in grids]  # the others are padding
        tiles = mx.concatenate([image[:count] for image, count in zip(pixels, counts, strict=True)])
        *_, states = self.vision_tower(tiles.transpose(0, 2, 3, 1), output_hidden_states=True)
        layer = self.config.vision_feature_layer
        layers = [layer] if isinstance(layer, int) else layer
        first = int(self.config.vision_feature_select_strategy == "default")  # without the class token
        selected = mx.concatenate([states[index][:, first:] for index in layers], axis=-1)
        features = self.multi_modal_projector(selected)
        parts = mx.split(features, np.cumsum(counts)[:-1].tolist())
        images = zip(parts, grids, sizes, strict=True)
        return mx.concatenate([pack_tiles(*image, newline=self.image_newline) for image in images])


def pack_tiles(features: mx.array, grid: tuple[int, int], size: Sequence[int], newline: mx.array) -> mx.array:
    """The features [tokens, D] of one image, of those of its tiles [1 + rows * columns, side * side, D].
    `size`: of the image in pixels, height before width; `newline` [D]."""
    rows, columns = grid
    side, width = math.isqrt(features.shape[1]), features.shape[2]
    lines = features[1:].reshape(rows, columns, side, side, width).transpose(0, 2, 1, 3, 4)
    lines = drop_padding(lines.reshape(rows * side, columns * side, width), size)
    ends = mx.broadcast_to(newline.astype(lines.dtype), (lines.shape[0], 1, width))
    return mx.concatenate([features[0], mx.concatenate([lines, ends], axis=1).reshape(-1, width)])


def drop_padding(features: mx.array, size: Sequence[int]) -> mx.array:
    """The middle of features [H, W, D]: what an image of this height and width fills."""
    (height, width), (full_height, full_width) = size, features.shape[:2]
    if width / height > full_width / full_height:
        padding = (full_height - int(round(height * (full_width / width), 7))) // 2
        return features[padding : full_height - padding]
    padding = (full_width - int(round(width * (full_height / height), 7))) // 2
    return features[:, padding : full_width - padding]


class _PaddedGrids:
    """Before the methods of the library's model."""

    def get_input_embeddings(
        self,
        input_ids: mx.array | None = None,
        pixel_values: mx.array | None = None,
        images_spatial_crop: mx.array | None = None,
        **given: Any,
    ) -> Any:
        """The library's result. `pixel_values`: [1, tiles, 3, H, W]; `images_spatial_crop`: the columns and
        rows of tiles of each image [1, images, 2]."""
        if pixel_values is not None and images_spatial_crop is not None:
            missing = max(0, pixel_values.shape[1] - images_spatial_crop.shape[1])
            images_spatial_crop = mx.pad(images_spatial_crop, ((0, 0), (0, missing), (0, 0)))
        embed = super().get_input_embeddings  # type: ignore[misc]
        return embed(input_ids, pixel_values, images_spatial_crop=images_spatial_crop, **given)


class _LeadingImage:
    """Before the methods of the library's model."""

    config: Any

    def get_input_embeddings(
        self,
        input_ids: mx.array | None = None,
        pixel_values: mx.array | None = None,
        mask: mx.array | None = None,
        **given: Any,
    ) -> Any:
        """The library's result for a prompt [1, L]. ValueError for more than one image, which it confuses."""
        embed = super().get_input_embeddings  # type: ignore[misc]
        if pixel_values is None or input_ids is None:
            return embed(input_ids, pixel_values, mask, **given)
        if len(pixel_values) > 1:
            raise ValueError("this model takes one image in a prompt")
        order = np.argsort(np.array(input_ids)[0] != self.config.image_token_index, kind="stable")
        made = embed(input_ids[:, mx.array(order)], pixel_values, mask, **given)
        made.inputs_embeds = made.inputs_embeds[:, mx.array(np.argsort(order))]
        return made


_FAMILIES: Mapping[str, type] = {
    "mlx_vlm.models.llava_next.llava_next": _PackedTiles,
    "mlx_vlm.models.granite_vision.granite_vision": _PackedTiles,
    "mlx_vlm.models.deepseek_vl_v2.deepseek_vl_v2": _PaddedGrids,
    "mlx_vlm.models.paligemma.paligemma": _LeadingImage,
}


def hook_tiles(model: nn.Module, checkpoint: Mapping[str, Any]) -> int:
    """Let a model of these families take images in tiles. Returns 1 if it is one. `checkpoint`: its
    config.json, of which mlx-vlm does not read the resolutions."""
    mixin, resolutions = _FAMILIES.get(type(model).__module__), checkpoint.get("image_grid_pinpoints")
    if mixin is None or (mixin is _PackedTiles and not resolutions):
        return 0
    mix_in(model, mixin, "Tiled")
    if mixin is _PackedTiles:
        model._resolutions = resolutions
    return 1
