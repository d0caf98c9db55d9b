"""Text of which more comes: characters that can be looked at, and taken, without seeing how it was split.

A scanner finds any of several markers in it. Of markers that begin at the same character the longest counts,
and the first character wins. Both are decided only when no further text can change them, so the result does
not depend on how the text was split.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator
from typing import TypeVar

from mlxrun.api.parsers.delta import SPACE

ESCAPED = '"\\' + "".join(map(chr, range(32)))  # characters that a JSON string holds in escaped form only
MAX_NAME = 400  # characters of a name, a number or a word
T = TypeVar("T")
Step = Generator[None, None, T]


class Malformed(Exception):
    """The text is not a call, or is one no longer."""


class StreamCut(Exception):
    """The text has ended in the middle of a call."""


class TextBuffer:
    """The text that has come and is not yet taken. Its readers are generators, which `yield` to wait for
    more."""

    def __init__(self) -> None:
        self.ended = False
        self._text = ""
        self._at = 0

    def peek(self, count: int = 1) -> Step[str]:
        """Return the next `count` characters, fewer only at the end, without taking them."""
        while len(self._text) - self._at < count and not self.ended:
            yield
        return self._text[self._at : self._at + count]

    def peek_while(self, accepts: Callable[[str], bool], start: int = 0, required: bool = True) -> Step[str]:
        """Return the characters from `start` on up to the first that `accepts` refuses, without taking them.
        Raises StreamCut if the text ends before that and one is `required`, Malformed at MAX_NAME of them."""
        end = start
        while True:
            seen = yield from self.peek(end + 1)
            if len(seen) <= end:
                if required:
                    raise StreamCut
                return seen[start:]
            if not accepts(seen[end]):
                return seen[start:end]
            end += 1
            if end - start == MAX_NAME:
                raise Malformed

    def take(self, count: int) -> str:
        """Take characters that `peek` has shown."""
        taken = self._text[self._at : self._at + count]
        self._at += len(taken)
        return taken

    def skip_space(self) -> Step[str]:
        """Take white space; return the character after it, which is not taken, or "" at the end."""
        while True:
            char = yield from self.peek()
            if not char or char not in SPACE:
                return char
            self._at += 1

    def take_literal(self, *texts: str) -> Step[str]:
        """Take whichever of `texts` comes now, the longest of several, and return it; "" if none does."""
        longest = sorted(texts, key=len, reverse=True)
        while True:
            for text in longest:
                if self._text.startswith(text, self._at):
                    return self.take(len(text))
                rest = len(self._text) - self._at
                if rest < len(text) and text.startswith(self._text[self._at :]) and not self.ended:
                    break
            else:
                return ""
            yield

    def skip(self, *texts: str) -> Step[str]:
        """Take white space, then whichever of `texts` comes, and return that; "" if none does."""
        yield from self.skip_space()
        return (yield from self.take_literal(*texts))

    def skip_all(self, *texts: str) -> Step[None]:
        """Take white space and `texts` as often as they come: models repeat tags."""
        while (yield from self.skip(*texts)):
            pass

    def read_name(self, *markers: str, strip: bool = True) -> Step[tuple[str, str]]:
        """Take a name up to the next of `markers`, and the marker; return both. Raises StreamCut at the end,
        and Malformed if the text is too long for a name: it shall not hold back the rest of the answer."""
        find = get_scanner(*markers).find
        while True:
            stop, marker = find(self._text, self._at, self.ended)
            if stop - self._at > MAX_NAME:
                raise Malformed
            if marker is not None:
                name = self.take(stop - self._at)
                return name.strip() if strip else name, self.take(len(marker))
            if self.ended:
                raise StreamCut
            yield

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Match the text that has come, without taking it. More text must not change what the caller does."""
        return pattern.match(self._text, self._at)

    @property
    def rest(self) -> str:
        """The text that has come and is not taken."""
        return self._text[self._at :]

    def is_drained(self) -> bool:
        """Whether all text that has come is taken."""
        return self._at == len(self._text)


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
