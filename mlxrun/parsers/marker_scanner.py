"""Finding any of several markers in text that comes in pieces.

Of the markers that begin at one place the longest counts, and the first place wins; both are decided only
when no text to come can change them, so that the result does not depend on the pieces.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

ESCAPED = '"\\' + "".join(map(chr, range(32)))  # what a JSON string cannot hold as it is


class MarkerScanner:
    """Markers, compiled once. `quiet(text)` is cheap and true only if `text` cannot hold any part of one;
    `quiet_string(text)` also asks that it may stand in a JSON string as it is."""

    def __init__(self, markers: tuple[str, ...]) -> None:
        self.markers = tuple(sorted(dict.fromkeys(markers), key=lambda m: (-len(m), m)))
        self._find = re.compile("|".join(map(re.escape, self.markers)) if markers else r"(?!)").search
        self._begin = frozenset(m[:n] for m in markers for n in range(1, len(m)))
        self._reach = max((len(m) for m in markers), default=1) - 1
        self.first_chars = "".join(sorted({m[0] for m in markers}))
        self.is_plain = _make_plain_test(self.first_chars)
        self.is_plain_string = _make_plain_test(self.first_chars + ESCAPED)

    def find_partial(self, text: str, at: int = 0) -> int:
        """Where the longest ending of `text` from `at` on starts that may become a marker, or its length."""
        for start in range(max(len(text) - self._reach, at), len(text)):
            if text[start] in self.first_chars and text[start:] in self._begin:
                return start
        return len(text)

    def find(self, text: str, at: int, ended: bool) -> tuple[int, str | None]:
        """Up to where text from `at` on is no marker, and the marker there.

        None: more text may show one (with `ended`: there is none to come, and all is plain text).
        """
        match = self._find(text, at)
        if match is None:
            return (len(text) if ended else self.find_partial(text, at)), None
        if not ended and (held := self.find_partial(text, at)) <= match.start():
            return held, None
        return match.start(), match[0]


@functools.lru_cache(maxsize=256)
def get_scanner(*markers: str) -> MarkerScanner:
    """The scanner of these markers, made once."""
    return MarkerScanner(markers)


def _make_plain_test(first: str) -> Callable[[str], bool]:
    """A test that costs tens of nanoseconds: most families' markers begin with one character."""
    if not first:
        return lambda text: True
    if len(first) == 1:
        return lambda text: first not in text
    if len(first) == 2:
        a, b = first[0], first[1]
        return lambda text: a not in text and b not in text
    find = re.compile(f"[{re.escape(first)}]").search
    return lambda text: find(text) is None
