"""The text of an answer as a family's reader sees it. Readers are generators that `yield` to wait for more.

A reader takes text through these methods only. None of them shows where the text was split, so any split of
the same text gives the same result. If a reader returns without having begun a call, the parser goes back.
The opener becomes text, and the text behind it is read again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mlxrun.api.parsers.argument_writer import ArgumentWriter
from mlxrun.api.parsers.delta import DeltaBuilder, TextKind, make_call_id
from mlxrun.api.parsers.text_buffer import (
    MAX_NAME,
    Malformed,
    MarkerScanner,
    Step,
    StreamCut,
    TextBuffer,
    get_scanner,
)
from mlxrun.api.parsers.tool_schemas import ToolSchemas

__all__ = ["MAX_NAME", "MAX_WASTED", "Malformed", "PassThrough", "Step", "StreamCut", "TextStream"]
MAX_WASTED = 1_000_000  # characters read without finding a call, as an answer may be full of openers
# Where text goes without running the reader, and the test that it has to pass.
PassThrough = tuple[TextKind | ArgumentWriter | Callable[[str], None], Callable[[str], bool]]


class TextStream(TextBuffer):
    """The text that is not read yet, and the deltas found so far. `tools`: the request's tools.

    `held_calls`: how many of the first calls are held until they are complete. If the answer is `stopped`
    within one of these, that call becomes text."""

    def __init__(
        self,
        tools: ToolSchemas,
        new_id: Callable[[], str] = make_call_id,
        separates_reasoning: bool = True,
        held_calls: int = 0,
    ) -> None:
        super().__init__()
        self.stopped = False
        self.tools = tools
        self.separates_reasoning = separates_reasoning  # for harmony: else reasoning is content
        self.out = DeltaBuilder(new_id)
        self.exhausted = False  # whether so much was read without finding a call that openers are text now
        self.pass_through: PassThrough | None = None
        # Taken text that may yet be returned as text: these chunks, then `_text` from `_start` up to `_at`.
        self._taken: list[str] = []
        self._start = 0
        self._kind: TextKind = "content"  # its kind if it is returned
        self._settled = True  # whether the current attempt has found something
        self.wasted = 0  # characters read in attempts that found nothing
        self.broken_calls: set[int] = set()  # calls that their reader could not complete
        self._call: ArgumentWriter | None = None
        self._held_calls = held_calls
        self._held: list[str] = []  # the text of a call that is held

    # -- reading ------------------------------------------------------------------------------------

    def read_until(self, *markers: str, required: bool = True) -> Step[tuple[str, str]]:
        """Take and return the text up to the next of `markers`, and the marker. At the end of the answer
        StreamCut is raised; if the marker is not `required`, it is "" instead."""
        parts: list[str] = []
        scanner = get_scanner(*markers)

        def collect(text: str) -> None:
            self._taken.append(text)
            parts.append(text)

        def pass_to_collect() -> PassThrough:
            self.keep_taken()
            return collect, scanner.is_plain

        marker = yield from self._scan(scanner, parts.append, pass_to_collect)
        if required and not marker:
            raise StreamCut
        return "".join(parts), marker

    def stream_string(
        self,
        markers: MarkerScanner,
        sink: Callable[[str], None],
        get_call: Callable[[], ArgumentWriter | None],
    ) -> Step[str]:
        """Take a string up to the next of `markers`, and return the marker. `sink` gets the text as it comes.

        `get_call` returns the call whose open string may be continued without the sink, or None. StreamCut at
        the end of the answer, where a partial marker of two or more characters is dropped."""

        def pass_to_call() -> PassThrough | None:
            call = get_call()
            return None if call is None or call.held else (call, markers.is_plain_string)

        marker = yield from self._scan(markers, sink, pass_to_call, drop_partial=True)
        if not marker:
            raise StreamCut
        return marker

    def pass_text(self, kind: TextKind, markers: MarkerScanner) -> Step[str]:
        """Add text up to the next of `markers` to the answer. Take and return the marker; "" at the end."""

        def pass_to_answer() -> PassThrough:
            self._forget_taken()
            return kind, markers.is_plain

        return (yield from self._scan(markers, functools.partial(self.out.add, kind), pass_to_answer))

    def _scan(
        self,
        markers: MarkerScanner,
        sink: Callable[[str], None],
        get_pass_through: Callable[[], PassThrough | None],
        drop_partial: bool = False,
    ) -> Step[str]:
        """Take text into `sink` up to a marker, which is taken and returned; "" at the end of the answer."""
        while True:
            stop, marker = markers.find(self._text, self._at, self.ended)
            if drop_partial and self.ended and marker is None:
                partial = markers.find_partial(self._text, self._at)
                stop = partial if stop - partial > 1 else stop
            if stop > self._at:
                sink(self.take(stop - self._at))
            if marker is not None:
                return self.take(len(marker))
            if self.ended:
                return ""
            self.pass_through = get_pass_through()
            yield
            self.pass_through = None

    def wait_in_string(self, call: ArgumentWriter) -> Step[None]:
        """Wait for more text in an open JSON string. Plain text goes to `call` without running the reader."""
        if self.is_drained() and not self.ended and not call.held:
            self.pass_through = (call, get_scanner().is_plain_string)
            yield
            self.pass_through = None

    # -- results ------------------------------------------------------------------------------------

    def commit(self) -> None:
        """Forget what was read. Does nothing before an attempt's first call, since all may still be text."""
        if self._settled:
            self._forget_taken()

    def return_as_text(self) -> None:
        """Add what was read since the last commit to the answer, as text of the attempt's kind."""
        for part in (*self._taken, self._text[self._start : self._at]):
            self.out.add(self._kind, part)
        self._settled = True
        self._forget_taken()

    def drop(self) -> None:
        """Leave what was read out of the answer."""
        self.out.end_section()
        self._settled = True
        self._forget_taken()

    def drop_empty_block(self, opener: str, end: str) -> Step[bool]:
        """Take `opener` as often as it is repeated. If `end` follows, leave this empty block out of the
        answer and return True."""
        yield from self.skip_all(opener)
        if not (self.out.at_line_start and (yield from self.take_literal(end))):
            return False
        self.drop()
        return True

    def begin_call(self, name: str, id: str = "") -> ArgumentWriter:
        """Return the writer of a call. Its first argument or its end begins the call in the answer.

        `id`: the model's own, if the format has one. Malformed if the tool is not offered."""
        name = name if name in self.tools else name.strip()
        if name not in self.tools:
            raise Malformed
        held = self.out.calls < self._held_calls
        self._call = ArgumentWriter(self.out, name, self.tools.get_schema(name), self._on_progress, id, held)
        return self._call

    def _on_progress(self, closed: bool) -> None:
        """Note that what was read is in the arguments of a call or, with `closed`, in a complete call."""
        self._settled = True
        if closed or not (self._call and self._call.held):
            self._kind = "content"
        self._forget_taken()
        if closed:
            self._call, self._held = None, []

    def _forget_taken(self) -> None:
        if self._call is not None and self._call.held:
            self._held += [*self._taken, self._text[self._start : self._at]]
        self._taken, self._start = [], self._at

    # -- for the parser -----------------------------------------------------------------------------

    def begin_attempt(self, opener: str, kind: TextKind = "content") -> None:
        """Keep `opener` and all that is taken from now on. If it is no call, it becomes text of `kind`."""
        self._taken, self._start = [opener], self._at
        self._settled, self._kind = False, kind

    def abandon_attempt(self, cut: bool) -> None:
        """Close a call that the reader cannot complete. The rest becomes text, or is dropped if `cut`."""
        call, self._call = self._call, None
        if not self._settled:
            return
        if call is not None and call.held and (self.stopped or not call.started):
            self._taken, self._held = [*self._held, *self._taken], []
        elif call is not None and call.started:
            taken = self._taken, self._start
            call.close()
            self.broken_calls.add(call.index)
            if cut:
                self._at = len(self._text)
                self._forget_taken()
            else:
                self._taken, self._start = taken
        self.return_as_text()

    def end_attempt(self) -> bool:
        """Return whether the attempt found something. If not, the opener becomes text, and reading resumes
        behind it."""
        self._call = None
        found = self._settled
        if not found:
            opener, *parts = self._taken
            self.wasted += sum(map(len, parts)) + self._at - self._start
            self.exhausted = self.wasted > MAX_WASTED
            if parts:
                self._text, self._start = "".join((*parts, self._text[self._start :])), 0
            self._at = self._start
            self._settled = True
            self.out.add(self._kind, opener)
        self._forget_taken()
        return found

    def attempt(self, opener: str, steps: Step[Any], kind: TextKind = "content") -> Step[bool]:
        """Run a reader behind `opener`. False if it found nothing; then `opener` becomes text of `kind`."""
        self.begin_attempt(opener, kind)
        try:
            yield from steps
        except (Malformed, StreamCut) as error:
            self.abandon_attempt(isinstance(error, StreamCut))
        return self.end_attempt()

    def found_call(self) -> bool:
        """Tell whether what the attempt found is a call."""
        return self._kind == "content"

    def add_text(self, text: str) -> None:
        """Add received text. Taken text is not copied again, however long it is kept."""
        self.keep_taken()
        self._text += text

    def keep_taken(self) -> None:
        """Move the text that was taken since the last call out of the text that is still searched."""
        if self._start < self._at:
            self._taken.append(self._text[self._start : self._at])
        self._text = self._text[self._at :]
        self._at = self._start = 0
