"""What a prompt has that a model may refuse."""

from __future__ import annotations

import pytest

from mlxrun.core.media_names import MediaKind, describe_refusal, list_refusable


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
