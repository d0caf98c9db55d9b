"""Text of which more comes. Readers look at its characters and take them, and do not see how it was split.

A scanner finds the first of several markers in it. Of markers that begin at the same character, the longest
counts. A marker is found only when no further text can change the result, so the result does not depend on
how the text was split.
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
    """The text is no call, or the rest of it is not the call that it began."""


class StreamCut(Exception):
    """The text ends in the middle of a call."""


class TextBuffer:
    """The text that was received and not taken. Readers are generators, which `yield` to wait for more."""

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
        """Return the characters from `start` up to the first that `accepts` refuses, without taking them.

        StreamCut if the text ends before a `required` one; Malformed if there are MAX_NAME characters."""
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
        """Take white space. Return the character behind it without taking it; "" at the end."""
        while True:
            char = yield from self.peek()
            if not char or char not in SPACE:
                return char
            self._at += 1

    def take_literal(self, *texts: str) -> Step[str]:
        """Take and return the longest of `texts` that comes now; "" if none does."""
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
        """Take white space. Then take and return one of `texts` as take_literal does."""
        yield from self.skip_space()
        return (yield from self.take_literal(*texts))

    def skip_all(self, *texts: str) -> Step[None]:
        """Take white space and `texts` as often as they come, since models repeat tags."""
        while (yield from self.skip(*texts)):
            pass

    def read_name(self, *markers: str, strip: bool = True) -> Step[tuple[str, str]]:
        """Take and return a name up to the next of `markers`, and the marker. StreamCut at the text's end.

        Malformed if the name is longer than MAX_NAME, since it would hold back the rest of the answer."""
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
        """Match the text received so far, without taking it. More text must not change the result."""
        return pattern.match(self._text, self._at)

    @property
    def rest(self) -> str:
        """The text that was received and not taken."""
        return self._text[self._at :]

    def is_drained(self) -> bool:
        """Tell whether all text received so far is taken."""
        return self._at == len(self._text)


class MarkerScanner:
    """Finds markers in text. `is_plain(text)` is a cheap test: True only if no part of a marker is in it.
    `is_plain_string(text)`: True only if the text may also stand unescaped in a JSON string.
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
        """Return where the longest ending of `text[at:]` begins that may become a marker, or the end."""
        for start in range(max(len(text) - self._longest, at), len(text)):
            if text[start] in self.first_chars and text[start:] in self._beginnings:
                return start
        return len(text)

    def find(self, text: str, at: int, ended: bool) -> tuple[int, str | None]:
        """Return where the plain text that begins at `at` ends, and the marker there.

        The marker is None if further text may complete one, and if the text has `ended` without one.
        """
        match = self._find(text, at)
        if match is None:
            return (len(text) if ended else self.find_partial(text, at)), None
        if not ended and (partial := self.find_partial(text, at)) <= match.start():
            return partial, None
        return match.start(), match[0]


@functools.lru_cache(maxsize=256)
def get_scanner(*markers: str) -> MarkerScanner:
    """Return the scanner of these markers. It is made once."""
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
