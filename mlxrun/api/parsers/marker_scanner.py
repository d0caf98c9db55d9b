"""Finding any of several markers in text that comes in chunks.

Of markers that begin at the same character the longest counts, and the first character wins. Both are decided
only when no further text can change them, so the result does not depend on how the text was split.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

ESCAPED = '"\\' + "".join(map(chr, range(32)))  # characters that a JSON string holds in escaped form only


class MarkerScanner:
    """Markers, compiled once.

    `is_plain(text)` is a cheap test, true only if `text` cannot hold any part of a marker;
    `is_plain_string(text)` is true only if the text may also stand in a JSON string as it is.
    """

    def __init__(self, markers: tuple[str, ...]) -> None:
        self.markers = tuple(sorted(dict.fromkeys(markers), key=lambda m: (-len(m), m)))
        self._find = re.compile("|".join(map(re.escape, self.markers)) if markers else r"(?!)").search
        self._beginnings = frozenset(m[:n] for m in markers for n in range(1, len(m)))
        self._longest = max((len(m) for m in markers), default=1) - 1
        self.first_chars = "".join(sorted({m[0] for m in markers}))
        self.is_plain = _make_plain_test(self.first_chars)
        self.is_plain_string = _make_plain_test(self.first_chars + ESCAPED)

    def find_partial(self, text: str, at: int = 0) -> int:
        """Return where the longest ending of `text[at:]` begins that may become a marker, or its end."""
        for start in range(max(len(text) - self._longest, at), len(text)):
            if text[start] in self.first_chars and text[start:] in self._beginnings:
                return start
        return len(text)

    def find(self, text: str, at: int, ended: bool) -> tuple[int, str | None]:
        """Return up to where `text[at:]` is no marker, and the marker there.

        None: further text may complete one; if the text has `ended`, there is none and all is plain text.
        """
        match = self._find(text, at)
        if match is None:
            return (len(text) if ended else self.find_partial(text, at)), None
        if not ended and (partial := self.find_partial(text, at)) <= match.start():
            return partial, None
        return match.start(), match[0]


@functools.lru_cache(maxsize=256)
def get_scanner(*markers: str) -> MarkerScanner:
    """Return the scanner of these markers, which is made once."""
    return MarkerScanner(markers)


def _make_plain_test(first: str) -> Callable[[str], bool]:
    """Make a test that costs tens of nanoseconds: most families' markers begin with the same character."""
    if not first:
        return lambda text: True
    if len(first) == 1:
        return lambda text: first not in text
    if len(first) == 2:
        a, b = first[0], first[1]
        return lambda text: a not in text and b not in text
    find = re.compile(f"[{re.escape(first)}]").search
    return lambda text: find(text) is None
