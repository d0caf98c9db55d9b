"""The parser of one answer: text up to an opener, then the family's reader of what that opens.

Plain text costs one test for the first characters of markers and makes one delta; no reader runs for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlxrun.parsers.argument_writer import ArgumentWriter
from mlxrun.parsers.delta import Delta, TextKind
from mlxrun.parsers.delta_builder import SPACE, make_call_id
from mlxrun.parsers.family import Reader, ReasoningFamily, ToolCallFamily
from mlxrun.parsers.marker_scanner import get_scanner
from mlxrun.parsers.text_stream import Malformed, Step, StreamCut, TextStream
from mlxrun.parsers.tool_schemas import ToolSchemas


class AnswerParser:
    """Splits one answer into content, reasoning and tool calls (see `delta.Parser`).

    `tools`: the request's, as OpenAI's API has them; without any, no calls are looked for. `opened`: the
    prompt ends within reasoning. Reasoning that is not closed is never content.
    `reads` counts how often a reader had to look at text; plain text does not increase it.
    """

    def __init__(
        self,
        family: ToolCallFamily | None,
        reasoning: ReasoningFamily | None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        opened: bool = False,
        new_id: Callable[[], str] = make_call_id,
    ) -> None:
        offered = ToolSchemas(tools)
        if family is not None and not (offered or family.read_answer):
            family = None
        self.reads = 0
        self._family = family
        self._reasoning = reasoning
        convert = family.convert_id if family is not None else None
        make_id = (lambda: convert(new_id())) if convert is not None else new_id
        self._stream = TextStream(offered, make_id, reasoning is not None)
        self._out = self._stream.out
        # Text that passes this test is returned without a reader, as more of one of the three below.
        self._is_plain: Callable[[str], bool] | None = None
        self._kind: TextKind = "content"
        self._call: ArgumentWriter | None = (
            None  # the call whose argument, an open string, the text continues
        )
        self._sink: Callable[[str], None] | None = None  # takes text of which no delta is made yet
        self._reader = self._run(opened)

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts of special tokens that the detokenizer must not drop."""
        families = [family for family in (self._family, self._reasoning) if family is not None]
        return tuple(dict.fromkeys(marker for family in families for marker in family.markers))

    def feed(self, text: str) -> Sequence[Delta]:
        """Return the deltas that `text` makes certain."""
        if self._is_plain is None or not self._is_plain(text):
            return self._read(text) if text else ()
        if self._call is not None:
            return (Delta("call", text, self._call.index),) if text else ()
        if self._sink is not None:
            self._sink(text)
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
        """Return the rest."""
        self._stream.ended = True
        self._read("")
        self._out.finish()
        return self._out.take()

    def _read(self, text: str) -> Sequence[Delta]:
        """Run the reader on more text, and note what text it needs not see."""
        self.reads += 1
        stream, out = self._stream, self._out
        stream.add_text(text)
        next(self._reader, None)
        if stream.ended:
            return ()
        self._is_plain = None
        if stream.pass_through is not None and stream.is_drained():
            target, is_plain = stream.pass_through
            self._call = self._sink = None
            if isinstance(target, ArgumentWriter):
                self._call, self._is_plain = target, is_plain
            elif not isinstance(target, str):
                self._sink, self._is_plain = target, is_plain
            elif out.continues(target):
                self._kind, self._is_plain = target, is_plain
        return out.take()

    def _run(self, opened: bool) -> Step[None]:
        families = [family for family in (self._family, self._reasoning) if family is not None]
        read_answer = next((family.read_answer for family in families if family.read_answer), None)
        if read_answer is not None:
            yield from read_answer(self._stream)
            yield from self._stream.pass_text("content", get_scanner())
        else:
            yield from self._read_answer(opened)

    def _read_answer(self, opened: bool) -> Step[None]:
        s, out = self._stream, self._out
        family, reasoning = self._family, self._reasoning
        pairs = dict(reasoning.pairs) if reasoning else {}
        ignored = (*(family.ignored if family else ()), *(reasoning.ignored if reasoning else ()))
        openers = get_scanner(*(family.openers if family else ()), *pairs, *ignored)
        if opened and pairs:
            opener, closers = next(iter(pairs.items()))
            yield from s.skip_space()
            yield from s.take_literal(opener)  # some models repeat the tag that ends the prompt
            yield from self._read_reasoning(closers)
        begins = True
        while True:
            if begins and family is not None and family.read_start is not None:
                begins = yield from self._try_call(family.read_start, "")
                if begins:
                    continue
            opener = yield from s.pass_text("content", openers)
            if not opener:
                return
            if opener in ignored:
                out.end_section()
            elif opener not in pairs:
                assert family is not None and family.read is not None
                begins = yield from self._try_call(family.read, opener)
            elif out.fresh or (reasoning is not None and reasoning.anywhere):
                yield from self._read_reasoning(pairs[opener])
                begins = True
            else:
                out.add("content", opener)

    def _read_reasoning(self, closers: tuple[str, ...]) -> Step[None]:
        """Read reasoning up to what closes it: a tag, a call where that does, or the end of the answer."""
        s, out, family = self._stream, self._out, self._family
        read = family.read if family is not None and family.ends_reasoning else None
        markers = closers
        if family is not None and read is not None:
            markers = (*closers, *family.openers, *family.ignored)
        out.add("reasoning", "")
        while True:
            marker = yield from s.pass_text("reasoning", get_scanner(*markers))
            if not marker or marker in closers:
                out.end_section()
                return
            if family is not None and read is not None and marker in family.openers:
                if (yield from self._try_call(read, marker, "reasoning")) and s.found_call():
                    return
            else:
                out.end_section()

    def _try_call(self, read: Reader, opener: str, kind: TextKind = "content") -> Step[bool]:
        """Try to read a call. False: there is none, and the opener has become text of this kind."""
        s = self._stream
        if s.exhausted:
            s.out.add(kind, opener)
            return False
        s.begin_attempt(opener, kind)
        try:
            yield from read(s, opener)
        except (Malformed, StreamCut) as error:
            s.abandon_attempt(isinstance(error, StreamCut))
        return s.end_attempt()
