"""Byte sizes as people write them: 4GB is 4 * 1000**3, 4GiB is 4 * 1024**3; upper or lower case."""

from __future__ import annotations

import re

BYTES_PATTERN = r"^[0-9]+(\.[0-9]+)? ?([kKmMgGtT]([iI])?)?[bB]$"
_PARTS = re.compile(r"^(?P<number>[0-9]+(?:\.[0-9]+)?) ?(?P<prefix>[kmgt]?)(?P<binary>i?)b$", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Return the number of bytes of a string such as `512MiB`. ValueError if it is not a size."""
    match = _PARTS.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not a byte size such as 4GB or 512MiB")
    power = "kmgt".find(match["prefix"].lower()) + 1 if match["prefix"] else 0
    return int(float(match["number"]) * (1024 if match["binary"] else 1000) ** power)


def format_bytes(size: int) -> str:
    """Return the size as written in a config: `20MB`, `4GiB`, or the plain number if no unit fits exactly."""
    for base, binary in ((1000, ""), (1024, "i")):
        for power in (4, 3, 2):
            if size and size % base**power == 0:
                return f"{size // base**power}{' kMGT'[power]}{binary}B"
    return str(size)


def format_rounded(size: int) -> str:
    """A size for people, in powers of 1000: `1.5 GB`."""
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if size >= 1000**power:
            return f"{size / 1000**power:.1f} {unit}"
    return f"{size} B"
