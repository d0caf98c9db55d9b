"""Stop strings, found in text that comes in pieces; any split of the same text gives the same result.

The match that is complete first wins, and of those that end together the longest. Text is held back only
while it is the beginning of a stop string.
"""

from __future__ import annotations

from collections.abc import Iterable


class StopMatcher:
    """Feeds text through; after a match `matched` is the stop string and everything later is dropped."""

    def __init__(self, stops: Iterable[str]) -> None:
        longest_first = sorted(set(stops) - {""}, key=lambda stop: (-len(stop), stop))
        self._stops = [(stop, _borders(stop)) for stop in longest_first]
        self._at = [0] * len(self._stops)  # how much of each stop the text so far ends with
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Text that is certainly not part of a stop string."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        for end, char in enumerate(text, 1):
            match = self._advance(char)
            if match is not None:
                self.matched = match
                seen, self._held = self._held + text[:end], ""
                return seen[: len(seen) - len(match)]
        seen = self._held + text
        keep = max(self._at)
        self._held = seen[len(seen) - keep :]
        return seen[: len(seen) - keep]

    def finish(self) -> str:
        """What was held back; the text has ended without completing a stop string."""
        held, self._held = self._held, ""
        self._at = [0] * len(self._stops)
        return held

    def _advance(self, char: str) -> str | None:
        found = None
        for i, (stop, borders) in enumerate(self._stops):
            at = self._at[i]
            while at and stop[at] != char:
                at = borders[at - 1]
            at += stop[at] == char
            if at == len(stop):
                found = found or stop
                at = borders[at - 1]
            self._at[i] = at
        return found


def _borders(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest border (Knuth, Morris, Pratt)."""
    borders = [0] * len(stop)
    for i in range(1, len(stop)):
        at = borders[i - 1]
        while at and stop[at] != stop[i]:
            at = borders[at - 1]
        borders[i] = at + (stop[at] == stop[i])
    return borders
