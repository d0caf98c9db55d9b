"""The memory of decoded images, and of the cache of their features."""

from __future__ import annotations

from mlxrun.config.media_settings import (
    DEFAULT_FEATURE_BYTES,
    DEFAULT_IMAGE_BYTES,
    get_feature_bytes,
    get_image_bytes,
)


def test_as_configured_or_a_part_of_the_memory() -> None:
    assert get_image_bytes(None, None) == get_image_bytes(None, 10**11) == DEFAULT_IMAGE_BYTES
    assert get_image_bytes(None, 2_000_000_000) == 250_000_000
    assert get_image_bytes(7, 2_000_000_000) == get_image_bytes(7, None) == 7
    assert get_feature_bytes(None, None) == get_feature_bytes(None, 10**11) == DEFAULT_FEATURE_BYTES
    assert get_feature_bytes(None, 1_000_000_000) == 125_000_000
    assert get_feature_bytes(0, 10**9) == 0 and get_feature_bytes(7, 16) == get_feature_bytes(7, None) == 7
