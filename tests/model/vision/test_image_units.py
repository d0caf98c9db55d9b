"""Processed images are split into units where their layout is known."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from mlxrun.model.vision.image_units import read_media_token, split_images


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


def test_types_of_tokens_are_no_part_of_an_image() -> None:
    """They are those of the whole prompt, which grows from turn to turn."""
    pixels, types = np.ones((2, 3, 4, 4)), np.zeros((1, 9), int)
    found = split_images({"pixel_values": pixels, "mm_token_type_ids": types})
    plain = split_images({"pixel_values": pixels})
    assert found is not None and plain is not None
    assert found.compute_digests() == plain.compute_digests() and len(found.units) == 2


@dataclass
class PartConfig:
    image_token_id: int = 7


@dataclass
class WholeConfig:
    vision_config: PartConfig = field(default_factory=PartConfig)
    eos_token_id: int = 1


@pytest.mark.parametrize(
    ("config", "token"),
    [
        ({"image_token_id": 5, "image_token_index": 6}, 5),
        ({"image_token_id": None, "image_token_index": 6}, 6),
        ({"im_patch_id": 4}, 4),
        ({"thinker_config": {"image_token_id": 8}}, 8),
        ({"image_token_id": 5, "thinker_config": {"image_token_id": 8}}, 5),
        (WholeConfig(), 7),
        ({"video_token_id": 9}, None),
    ],
)
def test_the_placeholder_of_images(config: object, token: int | None) -> None:
    """By any name that configs have for it, at the top or in a part."""
    assert read_media_token(config, "image") == token
