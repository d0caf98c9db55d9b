"""Pixels as the processors of mlx-vlm's families lay them out, made of images of 32 x 32.

A layout is a function of images [n, 3, 32, 32], float32, and of the prompt's token ids; it returns the arrays
that the model takes beside the ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks.tiny.byte_tokenizer import TOKEN_ID

IMAGE, START, END = (TOKEN_ID[name] for name in ("<image>", "<|vision_start|>", "<|vision_end|>"))
SIDE, PATCH = 32, 8  # pixels
STEPS = SIDE // PATCH  # patches in a line

Array = np.ndarray[Any, Any]
Media = dict[str, Array]


def _make_pixels(images: Array, ids: Array) -> Media:
    return {"pixel_values": images}


def _make_typed(images: Array, ids: Array) -> Media:
    """With the type of each token."""
    return {"pixel_values": images, "mm_token_type_ids": (ids == IMAGE)[None].astype(np.int32)}


def _make_sizes(images: Array, ids: Array) -> Media:
    return {"pixel_values": images, "image_sizes": np.full((len(images), 2), SIDE)}


def _make_anyres(images: Array, ids: Array) -> Media:
    return _make_sizes(images, ids) | {"pixel_values": np.stack([images, images], axis=1)}


def _make_tiles(images: Array, ids: Array) -> Media:
    return {"pixel_values": images[None]}


def _make_masked(images: Array, ids: Array) -> Media:
    mask = np.ones((1, len(images), SIDE, SIDE), np.int32)
    return {"pixel_values": images[None], "pixel_attention_mask": mask}


def _make_aspects(images: Array, ids: Array) -> Media:
    count = len(images)
    return {
        "pixel_values": images[None, :, None],
        "aspect_ratio_ids": np.ones((1, count), np.int32),
        "aspect_ratio_mask": np.ones((1, count, 1), np.int32),
    }


def _cut_patches(images: Array) -> Array:
    """[n, steps, steps, 3, patch, patch]."""
    cut = images.reshape(len(images), 3, STEPS, PATCH, STEPS, PATCH)
    return cut.transpose(0, 2, 4, 1, 3, 5)


def _make_patches(images: Array, ids: Array) -> Media:
    pixels = _cut_patches(images).reshape(-1, 3, PATCH, PATCH)
    return {"pixel_values": pixels, "image_grid_hws": np.full((len(images), 2), STEPS)}


def _make_packed(images: Array, ids: Array) -> Media:
    count = len(images)
    flat = _cut_patches(images).transpose(0, 1, 2, 4, 5, 3).reshape(count, STEPS * STEPS, -1)
    return {
        "pixel_values": flat,
        "spatial_shapes": np.full((count, 2), STEPS),
        "pixel_attention_mask": np.ones((count, STEPS * STEPS), np.int32),
    }


def _make_grid_sizes(images: Array) -> Array:
    return np.tile(np.array([1, STEPS, STEPS]), (len(images), 1))


def _make_still(images: Array, ids: Array) -> Media:
    pixels = _cut_patches(images).reshape(1, -1, 3, PATCH, PATCH)
    return {"pixel_values": pixels, "image_grid_thw": _make_grid_sizes(images)}


def _make_grid(images: Array, ids: Array) -> Media:
    frames = np.repeat(_cut_patches(images)[:, :, :, :, None], 2, axis=4)
    pixels = frames.reshape(len(images) * STEPS * STEPS, -1)
    return {"pixel_values": pixels, "image_grid_thw": _make_grid_sizes(images)}


def _make_flat(images: Array, ids: Array) -> Media:
    pixels = _cut_patches(images).reshape(len(images) * STEPS * STEPS, -1)
    return {"pixel_values": pixels, "image_grid_thw": _make_grid_sizes(images)}


def _make_places(images: Array, ids: Array) -> Media:
    """With the place of each patch, as (column, row), and the type of each token."""
    places = np.stack(np.meshgrid(np.arange(STEPS), np.arange(STEPS)), axis=-1).reshape(1, -1, 2)
    pixels = _cut_patches(images).transpose(0, 1, 2, 4, 5, 3).reshape(len(images), STEPS * STEPS, -1)
    types = (ids == IMAGE)[None].astype(np.int32)
    every = np.repeat(places, len(images), axis=0)
    return {"pixel_values": pixels, "image_position_ids": every, "mm_token_type_ids": types}


def _make_targets(images: Array, ids: Array) -> Media:
    sizes = np.full((1, len(images), 2), STEPS, np.int32)
    return {"pixel_values": images[None], "tgt_sizes": sizes}


def _make_bounds(images: Array, ids: Array) -> Media:
    """With the first token of each image's features and the one behind them, as the processor finds them."""
    edges = np.flatnonzero(np.diff(ids == IMAGE, prepend=False, append=False))
    return _make_targets(images, ids) | {"image_bound": edges.reshape(1, -1, 2)}


def _make_pairs(images: Array, ids: Array) -> Media:
    """Patches of 16 pixels a side, each twice: as two frames."""
    patch = SIDE // 2
    cut = images.reshape(len(images), 3, 2, patch, 2, patch).transpose(0, 2, 4, 3, 5, 1)
    return {"pixel_values": np.repeat(cut.reshape(-1, 1, patch, patch, 3), 2, axis=1)}


def _make_channels(images: Array, ids: Array) -> Media:
    """Channels last."""
    sizes = np.full((len(images), 2), STEPS, np.int32)
    return {"pixel_values": images.transpose(0, 2, 3, 1), "image_grid_hw": sizes}


def _make_crops(images: Array, ids: Array) -> Media:
    """One crop an image, with the places of its features in the prompt."""
    count = len(images)
    return {
        "pixel_values": _cut_patches(images).transpose(0, 1, 2, 4, 5, 3).reshape(1, count, STEPS * STEPS, -1),
        "image_masks": np.ones((1, count, STEPS * STEPS), np.float32),
        "image_input_idx": np.flatnonzero(ids == IMAGE).reshape(1, count, -1),
    }


def _make_pooled(images: Array, ids: Array) -> Media:
    """Two crops an image, with the patches of each feature."""
    count, width = len(images), STEPS // 2
    patches = _cut_patches(images).transpose(0, 1, 2, 4, 5, 3).reshape(count, 1, STEPS * STEPS, -1)
    places = np.arange(STEPS * STEPS).reshape(width, 2, width, 2).transpose(0, 2, 1, 3).reshape(-1, 4)
    return {
        "pixel_values": patches.repeat(2, axis=1).reshape(2 * count, STEPS * STEPS, -1),
        "image_token_pooling": np.tile(np.concatenate([places, places + STEPS * STEPS]), (count, 1)),
        "image_grids": np.full((count, 4), width),
        "image_num_crops": np.full(count, 2),
    }


LAYOUTS: Mapping[str, Callable[[Array, Array], Media]] = {
    "pixels": _make_pixels,
    "typed": _make_typed,
    "sizes": _make_sizes,
    "anyres": _make_anyres,
    "tiles": _make_tiles,
    "masked": _make_masked,
    "aspects": _make_aspects,
    "patches": _make_patches,
    "packed": _make_packed,
    "still": _make_still,
    "grid": _make_grid,
    "flat": _make_flat,
    "places": _make_places,
    "targets": _make_targets,
    "bounds": _make_bounds,
    "pairs": _make_pairs,
    "channels": _make_channels,
    "crops": _make_crops,
    "pooled": _make_pooled,
}
