"""Pixels as the processors of mlx-vlm's families lay them out, made of images of 32 x 32.

A layout is a function of images [n, 3, 32, 32], float32. It returns the arrays that the model takes beside
token ids. It is for the families of which no processor files are known (processor_files.py).
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


def _make_pixels(images: Array) -> Media:
    return {"pixel_values": images}


def _make_sizes(images: Array) -> Media:
    return {"pixel_values": images, "image_sizes": np.full((len(images), 2), SIDE)}


def _make_aspects(images: Array) -> Media:
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


def _make_packed(images: Array) -> Media:
    count = len(images)
    flat = _cut_patches(images).transpose(0, 1, 2, 4, 5, 3).reshape(count, STEPS * STEPS, -1)
    return {
        "pixel_values": flat,
        "spatial_shapes": np.full((count, 2), STEPS),
        "pixel_attention_mask": np.ones((count, STEPS * STEPS), np.int32),
    }


def _make_grid_sizes(images: Array) -> Array:
    return np.tile(np.array([1, STEPS, STEPS]), (len(images), 1))


def _make_grid(images: Array) -> Media:
    frames = np.repeat(_cut_patches(images)[:, :, :, :, None], 2, axis=4)
    pixels = frames.reshape(len(images) * STEPS * STEPS, -1)
    return {"pixel_values": pixels, "image_grid_thw": _make_grid_sizes(images)}


def _make_flat(images: Array) -> Media:
    pixels = _cut_patches(images).reshape(len(images) * STEPS * STEPS, -1)
    return {"pixel_values": pixels, "image_grid_thw": _make_grid_sizes(images)}


def _make_channels(images: Array) -> Media:
    """Channels last."""
    sizes = np.full((len(images), 2), STEPS, np.int32)
    return {"pixel_values": images.transpose(0, 2, 3, 1), "image_grid_hw": sizes}


LAYOUTS: Mapping[str, Callable[[Array], Media]] = {
    "pixels": _make_pixels,
    "sizes": _make_sizes,
    "aspects": _make_aspects,
    "packed": _make_packed,
    "grid": _make_grid,
    "flat": _make_flat,
    "channels": _make_channels,
}
