"""The parser of one answer, and the formats of a model that choose it.

The parser passes text on up to an opener, then runs the family's reader.

Plain text costs one test for the first characters of markers, and makes one delta. No reader runs for it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxrun.api.parsers.argument_writer import ArgumentWriter
from mlxrun.api.parsers.delta import SPACE, Delta, Parser, PlainParser, TextKind, make_call_id
from mlxrun.api.parsers.family import Reader, ReasoningFamily, ToolCallFamily
from mlxrun.api.parsers.text_buffer import get_scanner
from mlxrun.api.parsers.text_stream import Step, TextStream
from mlxrun.api.parsers.tool_schemas import ToolSchemas

# What may follow a tag that a text mentions, and does not follow one that closes reasoning.
_AFTER_MENTION = frozenset(" \t.,;:!?)]}'\"`")


class AnswerParser:
    """Splits one answer into content, reasoning and tool calls (see `delta.Parser`).

    `tools`: the request's tools in OpenAI's format; if there are none, calls are text. `opened`: the prompt
    ends within reasoning. Reasoning that is not closed is never content. `held_calls`: how many of the first
    calls are held until they are complete.

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
        held_calls: int = 0,
    ) -> None:
        offered = ToolSchemas(tools)
        if family is not None and not (offered or family.read_answer):
            family = None
        self.reads = 0
        self._family = family
        self._reasoning = reasoning
        convert = family.convert_id if family is not None else None
        self._make_id = (lambda: convert(new_id())) if convert is not None else new_id
        self._tools = tools
        self._stream = TextStream(offered, self._make_id, reasoning is not None, held_calls)
        self._out = self._stream.out
        # Text that passes this test is returned without a reader, as more of one of the three below.
        self._is_plain: Callable[[str], bool] | None = None
        self._kind: TextKind = "content"
        # The call whose argument, an open string, the text continues
        self._call: ArgumentWriter | None = None
        self._sink: Callable[[str], None] | None = None  # takes text of which no delta is made yet
        self._reasoned = False  # whether there was reasoning
        self._mentioned = 0  # tags of reasoning that are text, and not closed by text yet
        self._recorded: list[str] | None = None  # reasoning from the first opener of a call on
        self._late: list[Delta] = []  # calls in reasoning, which count if nothing comes behind it
        self._late_after = 0  # how many calls came before them
        self._reader = self._run(opened)

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts of special tokens that the detokenizer must not drop."""
        families = [family for family in (self._family, self._reasoning) if family is not None]
        return tuple(dict.fromkeys(marker for family in families for marker in family.markers))

    def feed(self, text: str) -> Sequence[Delta]:
        """Return the deltas that `text` makes certain."""
        if self._recorded is not None:
            self._recorded.append(text)
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

    def finish(self, stopped: bool = False) -> Sequence[Delta]:
        """Return the deltas that were withheld."""
        self._stream.ended, self._stream.stopped = True, stopped
        self._read("")
        out = self._out
        if out.fresh and out.calls == self._late_after:
            for call in self._late:
                out.add_arguments(out.begin_call(call.name, call.id), call.text)
        out.finish()
        return out.take()

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
        pairs |= dict.fromkeys(reasoning.variants, reasoning.pairs[0][1]) if reasoning else {}
        ignored = (*(family.ignored if family else ()), *(reasoning.ignored if reasoning else ()))
        calls = (*family.openers, *family.bare) if family else ()
        closers = {closer for each in pairs.values() for closer in each if " " not in closer} - {*calls}
        openers = get_scanner(*calls, *pairs, *closers, *ignored)
        if opened and pairs:
            yield from self._read_reasoning(pairs, next(iter(pairs.values())))
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
            elif opener in closers:
                yield from self._read_stray(opener)
            elif opener not in pairs:
                assert family is not None
                read = family.read_bare if opener in family.bare else family.read
                assert read is not None
                begins = yield from self._try_call(read, opener)
            elif out.fresh or (reasoning is not None and reasoning.anywhere):
                yield from self._read_reasoning(pairs, pairs[opener])
                begins = True
            else:
                self._mentioned += 1
                out.add("content", opener)

    def _read_stray(self, closer: str) -> Step[None]:
        """Read on behind a tag that closes nothing. It is left out unless the text seems to mention it."""
        out = self._out
        following = yield from self._stream.peek()
        if self._reasoning is not None and self._reasoning.anywhere:
            out.end_section()
        elif self._mentioned:
            self._mentioned -= 1
            out.add("content", closer)
        elif out.at_line_start or (self._reasoned and following not in _AFTER_MENTION and not out.space):
            out.end_section()
        else:
            out.add("content", closer)

    def _read_reasoning(self, openers: Collection[str], closers: tuple[str, ...]) -> Step[None]:
        """Read reasoning up to what closes it: a tag, a call where that does, or the end of the answer."""
        s, out, family = self._stream, self._out, self._family
        read = family.read if family is not None and family.ends_reasoning else None
        calls = family.openers if family is not None else ()
        ignored = family.ignored if family is not None and read is not None else ()
        scanner = get_scanner(*closers, *calls, *ignored)
        out.add("reasoning", "")
        self._reasoned, self._late = True, []
        yield from s.skip_all(*openers)  # also behind one that ends the prompt
        while True:
            marker = yield from s.pass_text("reasoning", scanner)
            if not marker or marker in closers:
                self._close_reasoning(marker)
                return
            if marker in ignored:
                out.end_section()
            elif read is None:
                out.add("reasoning", marker)
                if self._recorded is None:
                    self._recorded = [marker, s.rest]
            elif (yield from self._try_call(read, marker, "reasoning")) and s.found_call():
                return

    def _close_reasoning(self, closer: str) -> None:
        """End reasoning. If it was not closed, the calls in it were meant as calls; so they were if the tag
        comes right behind a call, and nothing behind the tag."""
        recorded, self._recorded = self._recorded, None
        self._out.end_section()
        if recorded is not None:
            text = "".join(recorded)
            calls, is_last = self._find_calls(text[: len(text) - len(self._stream.rest) - len(closer)])
            if not closer or is_last:
                self._late, self._late_after = calls, self._out.calls

    def _find_calls(self, text: str) -> tuple[list[Delta], bool]:
        """Find the complete calls in a text; return one delta each, and whether the text ends with a call."""
        assert self._family is not None
        family = dataclasses.replace(self._family, read_start=None, bare=(), read_bare=None)
        parser = AnswerParser(family, None, self._tools, new_id=self._make_id)
        parser._stream.wasted = self._stream.wasted
        calls: dict[int, Delta] = {}
        last = ""
        for delta in (*parser.feed(text), *parser.finish()):
            last = delta.kind
            if delta.kind == "call":
                head = calls.get(delta.index, delta)
                arguments = delta.text if head is delta else head.text + delta.text
                calls[delta.index] = dataclasses.replace(head, text=arguments)
        self._stream.wasted = parser._stream.wasted
        broken = parser._stream.broken_calls
        return [call for index, call in calls.items() if index not in broken], last == "call"

    def _try_call(self, read: Reader, opener: str, kind: TextKind = "content") -> Step[bool]:
        """Try to read a call. False: there is none, and the opener has become text of this kind."""
        s = self._stream
        if s.exhausted:
            s.out.add(kind, opener)
            return False
        found = yield from s.attempt(opener, read(s, opener), kind)
        ends = (*self._family.ends, *self._family.ignored) if self._family is not None else ()
        if found and ends and s.found_call() and s.out.fresh:
            yield from s.skip_all(*ends)
        return found


@dataclass(frozen=True)
class ModelFormats:
    """The families of one model; see `registry.detect_formats`. Without families all text is content."""

    tool_calls: ToolCallFamily | None = None
    reasoning: ReasoningFamily | None = None

    def make_parser(
        self, tools: Sequence[Mapping[str, Any]] | None, prompt: str, name: str, held_calls: int = 0
    ) -> Parser:
        """Make the parser of an answer to the rendered `prompt` that may call `tools`. The ids of its calls
        follow from `name`, so an answer that is generated again has the same ids. `held_calls`: as for
        AnswerParser."""
        if self.tool_calls is None and self.reasoning is None:
            return PlainParser()
        opened = self.reasoning is not None and self.reasoning.is_opened_by(prompt)
        new_id = _id_maker(name)
        return AnswerParser(
            self.tool_calls, self.reasoning, tools, opened=opened, new_id=new_id, held_calls=held_calls
        )

    def get_call_prefix_suffix(self, name: str) -> tuple[str, str] | None:
        """See ToolCallFamily; None also if there is no family."""
        family = self.tool_calls
        return None if family is None else family.get_call_prefix_suffix(name)

    def get_reasoning_tags(self, prompt: str) -> tuple[str, str] | None:
        """Return the opening and closing tag of the reasoning that may begin an answer to `prompt`. The
        opening tag is empty if the prompt ends with it. None: the answer begins without reasoning."""
        family = self.reasoning
        if family is None or family.read_answer is not None:
            return None
        opening, (closing, *_) = family.pairs[0]
        if family.is_opened_by(prompt):
            return "", closing
        closed = prompt.rstrip().endswith(closing)  # the template has switched reasoning off
        return None if closed else (opening, closing)

    @property
    def call_opener(self) -> str:
        """The marker with which every tool call, and only a tool call, begins; empty if there is none."""
        family, around = self.tool_calls, self.get_call_prefix_suffix("f")
        if family is None or around is None:
            return ""
        return next((opener for opener in family.openers if around[0].startswith(opener)), "")

    @property
    def call_separator(self) -> str | None:
        """The text between two consecutive calls; None if only one call is known to be valid."""
        return "\n" if self.tool_calls is not None and self.tool_calls.name == "hermes" else None


def _id_maker(name: str) -> Callable[[], str]:
    numbers = itertools.count()
    return lambda: "call_" + hashlib.blake2b(f"{name}:{next(numbers)}".encode(), digest_size=12).hexdigest()
