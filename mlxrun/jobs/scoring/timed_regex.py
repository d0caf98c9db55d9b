"""Regular expressions of users: compiled within limits, and searched for a limited time without the GIL."""

from __future__ import annotations

import re
import time
from typing import Any

import regex

SEARCH_SECONDS = 1.0  # for all patterns of a line together
_MOST_REPEATS = 100_000  # of a pattern; `regex` writes "a{1000}" out, so more needs seconds and gigabytes
_REPEAT = re.compile(r"(\)?)\s*\{\s*(\d+)")
_ERRORS = (regex.error, RecursionError, OverflowError, ValueError)


class SearchTimer:
    """The time that is left to search the patterns of one line."""

    def __init__(self) -> None:
        self._end = time.thread_time() + SEARCH_SECONDS  # as `regex` counts: a suspended process takes none

    def search(self, pattern: str, text: str) -> Any:
        """The first match of a checked pattern, or None; TimeoutError if it takes too long."""
        left = max(self._end - time.thread_time(), 1e-3)
        return regex.search(pattern, text, timeout=left, concurrent=True)


def check_pattern(pattern: str) -> Any:
    """The compiled pattern; ValueError with the reason if it is none, or is too long once its repeats are
    written out."""
    try:
        _check_repeats(pattern)
        return regex.compile(pattern)
    except _ERRORS as error:
        raise ValueError(f"is not a regular expression: {error}") from error


def _check_repeats(pattern: str) -> None:
    """A count behind a bracket may multiply all others; so may each count if there can be comments in
    between."""
    length, times = len(pattern), 1
    for bracket, count in _REPEAT.findall(pattern):
        if bracket or "#" in pattern:
            times *= max(1, int(count))
        else:
            length += int(count)
    if length * times > _MOST_REPEATS:
        raise ValueError(f"its repeats make it longer than {_MOST_REPEATS} characters")
