"""Processed images are split into units where their layout is known."""

from __future__ import annotations

import numpy as np

from mlxrun.model.vision.image_units import split_images


def test_layouts_that_are_not_known_stay_whole() -> None:
    pixels = np.zeros((2, 3, 4, 4))
    assert len(split_images({"pixel_values": pixels}).units) == 2
    assert (
        len(
            split_images({"pixel_values": pixels[None], "pixel_attention_mask": np.zeros((1, 2, 4, 4))}).units
        )
        == 2
    )
    assert len(split_images({"pixel_values": pixels, "more": np.zeros(3)}).units) == 1
    assert (
        len(split_images({"pixel_values": np.zeros((5, 6)), "image_grid_thw": np.ones((2, 3), int)}).units)
        == 1
    )
    assert split_images({"pixel_values": np.array([object()])}) is None
    assert split_images({}) is None
