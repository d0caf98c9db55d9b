"""How many examples hypothesis makes of a test that costs seconds."""

from __future__ import annotations

from hypothesis import settings


def count_examples(most: int) -> int:
    """A quarter of `most`, the same ones each time; with `pytest --hypothesis-profile random` all, and others
    each time."""
    return max(1, most // 4) if settings().derandomize else most
