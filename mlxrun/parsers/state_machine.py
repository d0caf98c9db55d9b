"""One answer, read by the chosen formats: text until an opener, then the reader of what it opens.

Plain text costs one test for the first characters of markers and one delta; the readers are asleep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlxrun.parsers.argument_writer import ArgumentWriter
from mlxrun.parsers.delta import Delta
from mlxrun.parsers.delta_builder import SPACE, Kind, new_call_id
from mlxrun.parsers.family import Reader, ReasoningFamily, ToolCallFamily
from mlxrun.parsers.marker_scanner import scanner
from mlxrun.parsers.text_stream import Malformed, Step, StreamCut, TextStream
from mlxrun.parsers.tool_schemas import ToolSchemas


class AnswerStateMachine:
    """The parser of one answer (see `delta.Parser`). `woken`: how often a reader had to look at text."""

    def __init__(
        self,
        family: ToolCallFamily | None,
        thinking: ReasoningFamily | None,
        tools: ToolSchemas,
        *,
        opened: bool = False,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self.woken = 0
        self._family = family
        self._thinking = thinking
        own_id = family.own_id if family is not None else None
        self._stream = TextStream(
            tools, (lambda: own_id(new_id())) if own_id else new_id, thinking is not None
        )
        self._out = self._stream.out
        self._quiet: Callable[[str], bool] | None = None  # text that passes it wakes nobody and is more of
        self._kind: Kind = "text"  # this,
        self._call: ArgumentWriter | None = None  # or of a string in the arguments of this,
        self._hold: Callable[[str], None] | None = None  # or goes here
        self._reader = self._run(opened)

    def feed(self, text: str) -> Sequence[Delta]:
        """What `text` makes certain."""
        quiet = self._quiet
        if quiet is None or not quiet(text):
            return self._wake(text) if text else ()
        if self._call is not None:
            return (Delta("call", text, self._call.index),) if text else ()
        if self._hold is not None:
            self._hold(text)
            return ()
        out = self._out
        if text and text[-1] in SPACE:
            body = text.rstrip(SPACE)
            if not body:
                out.space.append(text)
                return ()
            space = [text[len(body) :]]
            text = "".join((*out.space, body))
            out.space = space
        elif out.space and text:
            text = "".join((*out.space, text))
            out.space = []
        return (Delta(self._kind, text),) if text else ()

    def finish(self) -> Sequence[Delta]:
        """The rest."""
        self._stream.ended = True
        self._wake("")
        self._out.end()
        return self._out.take()

    def _wake(self, text: str) -> Sequence[Delta]:
        self.woken += 1
        stream, out = self._stream, self._out
        stream.add(text)
        next(self._reader, None)
        if stream.ended:
            return ()
        self._quiet = None
        if stream.flowing is not None and stream.idle():
            where, quiet = stream.flowing
            self._call = self._hold = None
            if isinstance(where, ArgumentWriter):
                self._call, self._quiet = where, quiet
            elif not isinstance(where, str):
                self._hold, self._quiet = where, quiet
            elif out.flowing(where):
                self._kind, self._quiet = where, quiet
        return out.take()

    def _run(self, opened: bool) -> Step[None]:
        whole = next((f.whole for f in (self._family, self._thinking) if f is not None and f.whole), None)
        if whole is not None:
            yield from whole(self._stream)
            yield from self._stream.flow("text", scanner())
        else:
            yield from self._answer(opened)

    def _answer(self, opened: bool) -> Step[None]:
        s, out = self._stream, self._out
        family, thinking = self._family, self._thinking
        ends = dict(thinking.pairs) if thinking else {}
        drops = (*(family.drops if family else ()), *(thinking.drops if thinking else ()))
        openers = scanner(*(family.openers if family else ()), *ends, *drops)
        if opened and ends:
            opener, closers = next(iter(ends.items()))
            yield from s.space()
            yield from s.literal(opener)  # some models open again what the prompt opened
            yield from self._thought(closers)
        begins = True
        while True:
            if begins and family is not None and family.start is not None:
                begins = yield from self._try(family.start, "")
                if begins:
                    continue
            opener = yield from s.flow("text", openers)
            if not opener:
                return
            if opener in drops:
                out.part()
            elif opener not in ends:
                assert family is not None and family.read is not None
                begins = yield from self._try(family.read, opener)
            elif out.fresh or (thinking is not None and thinking.anywhere):
                yield from self._thought(ends[opener])
                begins = True
            else:
                out.text(opener)

    def _thought(self, ends: tuple[str, ...]) -> Step[None]:
        """A thought up to its end, or to a call where that ends one; else all that comes."""
        s, out, family = self._stream, self._out, self._family
        read = family.read if family is not None and family.ends_thought else None
        found = ends
        if family is not None and read is not None:
            found = (*ends, *family.openers, *family.drops)
        out.reasoning("")
        while True:
            marker = yield from s.flow("reasoning", scanner(*found))
            if not marker or marker in ends:
                out.part()
                return
            if family is not None and read is not None and marker in family.openers:
                if (yield from self._try(read, marker, "reasoning")) and s.called:
                    return
            else:
                out.part()

    def _try(self, read: Reader, opener: str, kind: Kind = "text") -> Step[bool]:
        """Whether a reader found a call here, or what is none; `kind`: what it is part of then."""
        s = self._stream
        if s.tired:
            s.out.flow(kind, opener)
            return False
        s.attempt(opener, kind)
        try:
            yield from read(s, opener)
        except (Malformed, StreamCut) as error:
            s.abandon(isinstance(error, StreamCut))
        return s.settled()
