"""Processed images are split into units where their layout is known."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from mlxrun.model.run.prompt_inputs import make_arrays
from mlxrun.model.vision.image_units import read_media_token, split_images
from mlxrun.model.vision.media_sampling import read_audio_sampling


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


def test_media_of_several_kinds_are_units_in_the_order_of_the_prompt() -> None:
    """Videos of several frames, whose arrays have a row for each; None fits if the prompt has others."""
    media = {
        "pixel_values": np.arange(6).reshape(2, 3),
        "pixel_values_videos": np.arange(10).reshape(5, 2),
        "num_frames_per_video": np.array([2, 3]),
        "input_features": np.arange(4).reshape(1, 2, 2),
        "mm_token_type_ids": np.zeros((1, 9)),
    }
    found = split_images(media, ["video", "image", "audio", "image", "video"])
    assert [sorted(unit) for unit in found.units[1:3]] == [["pixel_values"], ["input_features"]]
    assert [len(found.units[at]["pixel_values_videos"]) for at in (0, 4)] == [2, 3]
    assert found.units[3]["pixel_values"].tolist() == [[3, 4, 5]]
    assert len(split_images(media, ["video", "image", "audio"]).units) == 1


class FakeProcessor:
    """A processor that takes audio. `values`: of its own, such as how much audio it takes."""

    def __init__(self, cut: int | None = None, **values: int) -> None:
        self.feature_extractor = SimpleNamespace(sampling_rate=16_000)
        if cut is not None:
            self.feature_extractor.n_samples = cut
        vars(self).update(values)

    def __call__(self, text: str, audio: list[np.ndarray]) -> None:
        """Never called."""


@pytest.mark.parametrize(
    ("processor", "most"),
    [
        (FakeProcessor(), None),
        (FakeProcessor(cut=480_000), 480_000),
        (FakeProcessor(audio_seq_length=100, audio_ms_per_token=40), 64_000),
        (FakeProcessor(cut=480_000, audio_seq_length=1000, audio_ms_per_token=40), 480_000),
    ],
)
def test_audio_is_as_long_as_processors_take_it(processor: FakeProcessor, most: int | None) -> None:
    processor.feature_extractor = make_extractor(processor.feature_extractor)
    config = {"audio_config": {"a": 1}, "audio_token_id": 7}
    found = read_audio_sampling(processor, config)
    assert (found.rate, found.max_samples, found.several) == (16_000, most, False)
    for other in (
        {"audio_token_id": 7},
        {"audio_config": None, "audio_token_id": 7},
        {"audio_config": {"a": 1}},
    ):
        assert read_audio_sampling(processor, other) is None
    assert read_audio_sampling(SimpleNamespace(__call__=len), config) is None


def make_extractor(values: SimpleNamespace) -> object:
    def extract(samples: np.ndarray) -> None:
        """Never called."""

    vars(extract).update(vars(values))
    return extract


def test_images_that_differ_in_size_are_a_tuple() -> None:
    """Each is a unit with the axis of images; those of one size are one array when they are joined again."""
    pixels = tuple(np.full((3, side, 8), side, np.float32) for side in (8, 16, 16))
    media = {"pixel_values": pixels, "tgt_sizes": np.array([[1, 1], [2, 1], [2, 1]])}
    units = split_images(media)
    assert units is not None
    assert [unit["pixel_values"].shape for unit in units.units] == [
        (1, 3, 8, 8),
        (1, 3, 16, 8),
        (1, 3, 16, 8),
    ]
    assert [unit["tgt_sizes"].tolist() for unit in units.units] == [[[1, 1]], [[2, 1]], [[2, 1]]]
    some, every = units.concatenate(1, 3)["pixel_values"], units.concatenate(0, 3)["pixel_values"]
    assert some.shape == (2, 3, 16, 8) and [each.shape for each in every] == [each.shape for each in pixels]
    first, second, third = units.compute_digests()
    assert first != second == third
    given = make_arrays(units.concatenate(0, 3))
    assert [each.shape for each in given["pixel_values"]] == [each.shape for each in pixels]
    assert given["tgt_sizes"].shape == (3, 2)


def test_a_tuple_beside_arrays_of_another_number_stays_whole() -> None:
    pixels = tuple(np.zeros((3, side, 8), np.float32) for side in (8, 16))
    units = split_images({"pixel_values": pixels, "tgt_sizes": np.zeros((3, 2))})
    assert units is not None and len(units.units) == 1 and len(units.compute_digests()[0]) == 16
