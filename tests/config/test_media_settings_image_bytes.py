"""The memory of decoded images."""

from __future__ import annotations

from mlxrun.config.media_settings import DEFAULT_IMAGE_BYTES, get_image_bytes


def test_as_configured_or_a_part_of_the_memory() -> None:
    assert get_image_bytes(None, None) == get_image_bytes(None, 10**11) == DEFAULT_IMAGE_BYTES
    assert get_image_bytes(None, 2_000_000_000) == 250_000_000
    assert get_image_bytes(7, 2_000_000_000) == get_image_bytes(7, None) == 7
