"""What a prompt has that a model may refuse."""

from __future__ import annotations

import pytest

from mlxrun.config.media_settings import AudioSampling
from mlxrun.core.media_names import MediaKind, describe_input, describe_refusal, list_refusable
from tests.helpers.tokenizers import FakeModelInfo


@pytest.mark.parametrize(
    ("kinds", "names"),
    [
        ([], []),
        (["image", "image"], ["images"]),
        (["video", "image"], ["images", "videos", "images beside videos"]),
        (["audio"], ["audio"]),
        (["audio", "audio"], ["audio", "audio beside audio"]),
        (["audio", "video"], ["videos", "audio", "videos beside audio"]),
    ],
)
def test_kinds_and_pairs(kinds: list[MediaKind], names: list[str]) -> None:
    assert list_refusable(kinds) == names


def test_refusals_are_sentences() -> None:
    assert describe_refusal("audio", "no") == "audio is refused for this model: no"
    assert describe_refusal("images beside audio", "no").startswith("images beside audio are refused")


def test_what_a_model_takes_is_described_without_what_it_refuses() -> None:
    hears = FakeModelInfo(vision=True, audio_sampling=AudioSampling(16_000))
    assert describe_input(hears) == "images, audio and text"
    assert describe_input(FakeModelInfo(vision=True, refused_media={"images": "no"})) == "text"
