"""Finds stop strings in streamed text. The result does not depend on how the text was split.

The match that is complete first wins, and of those that end together the longest. Text is withheld only
while it may begin a stop string.
"""

from __future__ import annotations

from collections.abc import Iterable


class StopMatcher:
    """Passes text through until a stop string matches; then `matched` is set, and later text is dropped."""

    def __init__(self, stops: Iterable[str]) -> None:
        longest_first = sorted(set(stops) - {""}, key=lambda stop: (-len(stop), stop))
        self._stops = [(stop, _compute_borders(stop)) for stop in longest_first]
        self._progress = [0] * len(self._stops)  # how many characters of each stop the text ends with
        self._withheld = ""
        self.matched: str | None = None

    def feed(self, text: str, *, may_match: bool = True) -> str:
        """Text that is certainly not part of a stop string. Without `may_match`, stop strings that end in
        `text` are passed through."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        for end, char in enumerate(text, 1):
            match = self._advance(char)
            if match is not None and may_match:
                self.matched = match
                until, self._withheld = self._withheld + text[:end], ""
                return until[: len(until) - len(match)]
        text = self._withheld + text
        certain = len(text) - max(self._progress)
        self._withheld = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """The withheld text: the answer has ended without completing a stop string."""
        rest, self._withheld = self._withheld, ""
        self._progress = [0] * len(self._stops)
        return rest

    def _advance(self, char: str) -> str | None:
        found = None
        for i, (stop, borders) in enumerate(self._stops):
            length = self._progress[i]
            while length and stop[length] != char:
                length = borders[length - 1]
            length += stop[length] == char
            if length == len(stop):
                found = found or stop
                length = borders[length - 1]
            self._progress[i] = length
        return found


def _compute_borders(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest border (Knuth, Morris, Pratt)."""
    borders = [0] * len(stop)
    for i in range(1, len(stop)):
        at = borders[i - 1]
        while at and stop[at] != stop[i]:
            at = borders[at - 1]
        borders[i] = at + (stop[at] == stop[i])
    return borders
