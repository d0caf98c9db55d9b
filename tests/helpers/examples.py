"""How many examples hypothesis makes of a test that costs seconds."""

from __future__ import annotations

from hypothesis import settings


def count_examples(most: int) -> int:
    """A quarter of `most`, the same ones each time; all with `pytest --hypothesis-profile full`, and all, but
    others each time, with `random`."""
    return max(1, most // 4) if settings.get_current_profile_name() == "mlxrun" else most
