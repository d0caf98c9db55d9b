"""How much memory decoded images may take, which front ends limit and the engine's admission reserves."""

from __future__ import annotations

DEFAULT_IMAGE_BYTES = 1_000_000_000
_SHARE = 8  # at most this part of a configured memory limit, unless the config says otherwise


def get_image_bytes(configured: int | None, memory_limit: int | None) -> int:
    """Bytes for the decoded images of all requests at a time, of media.memory_bytes and
    scheduler.memory_limit."""
    if configured is not None:
        return configured
    return DEFAULT_IMAGE_BYTES if memory_limit is None else min(DEFAULT_IMAGE_BYTES, memory_limit // _SHARE)
