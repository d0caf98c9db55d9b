"""Which tests of the sweep a run takes: `--sweep-slice K/N`, or `auto/N` for the slice of the day.

The slice of a test follows from its name alone, so that in N days in a row each test runs once.
"""

from __future__ import annotations

import datetime
import hashlib


def read_slice(text: str, today: datetime.date) -> tuple[int, int]:
    """The slice, from 1, and how many there are; ValueError if the text is none."""
    part, _, count = text.partition("/")
    total = int(count)
    number = today.toordinal() % total + 1 if part == "auto" else int(part)
    if not 1 <= number <= total:
        raise ValueError(f"{text}: a slice is 1/{total} to {total}/{total}, or auto/{total}")
    return number, total


def is_in_slice(test: str, number: int, total: int) -> bool:
    """Whether a test of the sweep belongs to a slice. `test`: its name, as pytest reports it."""
    return int.from_bytes(hashlib.sha256(test.encode()).digest()[:8]) % total == number - 1
