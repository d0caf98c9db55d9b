"""What a format's reader sees: text that comes in pieces, taken by generators that wait by `yield`.

A reader takes text only through the methods below; none of them lets the pieces show, so any split of the
same text gives the same result. A reader that returns without a call has read for nothing: the machine goes
back to behind the opener, which is text then.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

from mlxrun.parsers.argument_writer import ArgumentWriter
from mlxrun.parsers.delta_builder import SPACE, DeltaBuilder, Kind, new_call_id
from mlxrun.parsers.marker_scanner import MarkerScanner, scanner
from mlxrun.parsers.tool_schemas import ToolSchemas

NAME = 400  # characters of a name at most
WASTE = 1_000_000  # characters read in vain, after which openers are text: an answer may consist of them
T = TypeVar("T")
Step = Generator[None, None, T]


class Malformed(Exception):
    """The text is no call, or no longer one, here."""


class StreamCut(Exception):
    """The text has ended in the middle of a call."""


class TextStream:
    """The text not yet read, and where findings go. `tools`: what the request offers."""

    def __init__(
        self, tools: ToolSchemas | None = None, new_id: Callable[[], str] = new_call_id, thinking: bool = True
    ) -> None:
        self.tools = tools or ToolSchemas(None)
        self.thinking = thinking  # whether thoughts are told from text (harmony: else they are text)
        self.out = DeltaBuilder(new_id)
        self.ended = False
        # Where text may go without waking the reader, and the test that it has to pass.
        self.flowing: tuple[Kind | ArgumentWriter | Callable[[str], None], Callable[[str], bool]] | None = (
            None
        )
        self._text = ""
        self._at = 0
        # What was taken and can still be given back: pieces that the text no longer holds, then this on.
        self._past: list[str] = []
        self._kept = 0
        self._kind: Kind = "text"  # what it is when it is given back
        self._settled = True
        self._wasted = 0  # characters that attempts have read in vain
        self._call: ArgumentWriter | None = None

    @classmethod
    def of(cls, text: str) -> TextStream:
        """A text that has come as a whole."""
        stream = cls()
        stream._text, stream.ended = text, True
        return stream

    def run(self, step: Step[T]) -> T:
        """What a step gives; only for text that has come as a whole, where nothing waits."""
        try:
            next(step)
        except StopIteration as stop:
            value: T = stop.value
            return value
        raise AssertionError("a reader waits for text after the end")

    # -- reading ------------------------------------------------------------------------------------

    def peek(self, count: int = 1) -> Step[str]:
        """The next `count` characters, fewer only at the end; nothing is taken."""
        while len(self._text) - self._at < count and not self.ended:
            yield
        return self._text[self._at : self._at + count]

    def take(self, count: int) -> str:
        """Take characters that were seen by `peek`."""
        taken = self._text[self._at : self._at + count]
        self._at += len(taken)
        return taken

    def space(self) -> Step[str]:
        """Take white space; the character after it, not taken, or "" at the end."""
        while True:
            char = yield from self.peek()
            if not char or char not in SPACE:
                return char
            self._at += 1

    def literal(self, *texts: str) -> Step[str]:
        """Take whichever of `texts` comes now, the longest of several; "" if none does."""
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

    def until(self, *markers: str) -> Step[tuple[str, str]]:
        """Take all up to the next of `markers` and it too: what was before it, and it ("" at the end)."""
        parts: list[str] = []
        marker = yield from self.each(scanner(*markers), parts.append)
        return "".join(parts), marker

    def name(self, *markers: str) -> Step[tuple[str, str]]:
        """As `until`, for a name. Malformed if it is too long to be one: else a marker that means nothing
        would hold back all that follows."""
        find = scanner(*markers).find
        while True:
            stop, marker = find(self._text, self._at, self.ended)
            if stop - self._at > NAME:
                raise Malformed
            if marker is not None or self.ended:
                return self.take(stop - self._at), self.take(len(marker or ""))
            yield

    def each(
        self,
        markers: MarkerScanner,
        sink: Callable[[str], None],
        string: Callable[[], ArgumentWriter | None] | None = None,
    ) -> Step[str]:
        """As `until`, with the text before the marker given to `sink` piece by piece.

        `string`: the text is a value, and a marker that a cut has left incomplete, but for its first
        character, is no part of it. Asked when text has run out: the call into whose open string the sink
        would pass text as it is, if it would.
        """
        while True:
            stop, marker = markers.find(self._text, self._at, self.ended)
            if self.ended and marker is None and string is not None:
                half = markers.held(self._text, self._at)
                stop = half if stop - half > 1 else stop
            if stop > self._at:
                sink(self.take(stop - self._at))
            if marker is not None:
                return self.take(len(marker))
            if self.ended:
                return ""
            if string is None:
                self._rest()
                self.flowing = (lambda text: self._hold(text, sink), markers.quiet)
            elif (call := string()) is not None:
                self.flowing = (call, markers.quiet_string)
            yield
            self.flowing = None

    def _rest(self) -> None:
        """What was taken is kept apart from what comes."""
        if self._kept < self._at:
            self._past.append(self._text[self._kept : self._at])
        self._text = self._text[self._at :]
        self._at = self._kept = 0

    def _hold(self, text: str, sink: Callable[[str], None]) -> None:
        """Text that is taken as it comes."""
        self._past.append(text)
        sink(text)

    def calm(self, call: ArgumentWriter) -> Step[None]:
        """Wait for text, in an open string that it may go into as it is."""
        if self.idle() and not self.ended:
            self.flowing = (call, scanner().quiet_string)
            yield
            self.flowing = None

    def flow(self, kind: Kind, markers: MarkerScanner) -> Step[str]:
        """As `each`, into the answer's text or thought, and at no cost while no marker can begin."""
        sink = self.out.text if kind == "text" else self.out.reasoning
        while True:
            stop, marker = markers.find(self._text, self._at, self.ended)
            if stop > self._at:
                sink(self.take(stop - self._at))
            if marker is not None:
                return self.take(len(marker))
            if self.ended:
                return ""
            self._keep()
            self.flowing = (kind, markers.quiet)
            yield
            self.flowing = None

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """What the pattern matches in the text that has come, not taken. Its user sees to it that more text
        would not change what is made of it."""
        return pattern.match(self._text, self._at)

    # -- going back ---------------------------------------------------------------------------------

    def mark(self) -> None:
        """All before is dealt with. Before the first call of a block this does nothing: until then the whole
        block may still be text."""
        if self._settled:
            self._keep()

    def give_back(self) -> None:
        """What was read since the mark is text, as it was written, or more of the thought it was found in."""
        for part in (*self._past, self._text[self._kept : self._at]):
            self.out.flow(self._kind, part)
        self._settled = True
        self._keep()

    def call(self, name: str, id: str = "") -> ArgumentWriter:
        """A call, to begin with its first argument, or its end. The name must be one of `tools`; `id`: the
        model's own, where the format has one."""
        self._call = ArgumentWriter(self.out, name, self.tools.schema(name), self._progress, id)
        return self._call

    def _progress(self, closed: bool) -> None:
        """What was read is in the arguments of a call, or with `closed` in a whole one."""
        self._settled, self._kind = True, "text"
        self._keep()
        if closed:
            self._call = None

    def _keep(self) -> None:
        """Nothing of what was taken can be given back."""
        self._past, self._kept = [], self._at

    # -- for the machine ----------------------------------------------------------------------------

    def attempt(self, opener: str, kind: Kind = "text") -> None:
        """Remember what is taken from here on, and `opener`, which was, until something is settled. `kind`:
        what all that is if it is no call."""
        self._past, self._kept = [opener], self._at
        self._settled, self._kind = False, kind

    def abandon(self, cut: bool) -> None:
        """A reader cannot go on: an open call is closed. What it did not pass on is text, but for the rest of
        a call that was cut, which can be nothing."""
        call, self._call = self._call, None
        if not self._settled:
            return
        if call is not None and call.begun:
            kept = self._past, self._kept
            call.close()
            if cut:
                self._at = len(self._text)
                self._keep()
            else:
                self._past, self._kept = kept
        self.give_back()

    def settled(self) -> bool:
        """Whether the attempt found anything; else reading goes on behind the opener."""
        self._call = None
        found = self._settled
        if not found:
            opener, *parts = self._past
            self._wasted += sum(map(len, parts)) + self._at - self._kept
            if parts:
                self._text, self._kept = "".join((*parts, self._text[self._kept :])), 0
            self._at = self._kept
            self._settled = True
            self.out.flow(self._kind, opener)
        self._keep()
        return found

    @property
    def tired(self) -> bool:
        """Whether so much was read in vain that openers are text from now on."""
        return self._wasted > WASTE

    @property
    def called(self) -> bool:
        """Whether what the attempt found is a call, and not only what is none."""
        return self._kind == "text"

    def add(self, text: str) -> None:
        """More text has come. What was taken is not copied again, however long it is kept."""
        self._rest()
        self._text += text

    def idle(self) -> bool:
        """Whether all that has come is taken."""
        return self._at == len(self._text)
