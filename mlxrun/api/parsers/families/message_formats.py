"""Families whose answers are messages with a header each; one reader for content, reasoning and calls.

harmony (gpt-oss): `<|start|>assistant<|channel|>analysis<|message|>...<|end|>`. A message to an offered
function is a call, in any channel, with `to=` before or behind the channel. Others are reasoning in the
analysis channel, and content elsewhere. A message to a tool that is not offered is content with its header.

Muse: `<|start|>assistant to=f<|message|>`. Messages to `self` are reasoning. Messages to `user` or to nobody
are content. A message to a tool holds
`<atem:function_calls><atem:invoke name="f"><atem:parameter name="k">v</atem:parameter></atem:invoke>` and
the end tag. Tags of calls elsewhere are text. The prompt ends with `<|start|>assistant`.

Functionary: messages to a recipient, which is a tool or `all`: `>>>f`, a line feed and `{...}`. The prompt
ends with the beginning of a message, so an answer begins with its recipient. In v2 a message is
`<|from|>assistant`, `<|recipient|>f` and `<|content|>{...}`, a line each.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from mlxrun.api.parsers.delta import TextKind
from mlxrun.api.parsers.family import ReasoningFamily, ToolCallFamily, in_template, is_shown
from mlxrun.api.parsers.readers.json_call import read_arguments, read_ended_arguments
from mlxrun.api.parsers.readers.tagged_arguments import InvokeTags, take_tag
from mlxrun.api.parsers.text_buffer import get_scanner
from mlxrun.api.parsers.text_stream import Malformed, Step, StreamCut, TextStream
from mlxrun.api.parsers.tool_schemas import ToolSchemas

# -- harmony ----------------------------------------------------------------------------------------

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_MARKERS = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, *_ENDS)
_BODY = get_scanner(_START, _CHANNEL, *_ENDS)
_TEXT = get_scanner(*_MARKERS)
# What may stand where a message begins: models forget `<|start|>`, and repeat the role or the channel.
_WORDS = ("assistant", "analysis", "commentary", "final")
_LEADS = (*_MARKERS, "to=", *(w + m for w in _WORDS for m in (_CHANNEL, _MESSAGE, " to=")))
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
# The text behind these markers that belongs to a header.
_KNOWN = {
    _START: re.compile(r"\s*(?:assistant)?(?:\s*to=\S*)?\s*"),
    _CHANNEL: re.compile(r"\s*(?:analysis|commentary|final)?(?:\s*to=\S*)?\s*(?:json|code)?\s*"),
    _CONSTRAIN: re.compile(r"\s*(?:json|code)?\s*"),
}


@dataclass(frozen=True, slots=True)
class _MessageHeader:
    """What stands before a message: as it was written, and what it says. `end`: the marker behind it."""

    raw: str
    is_reasoning: bool
    recipient: str
    end: str
    extra: str = ""  # text of a header that was not completed


def _read_harmony(s: TextStream) -> Step[None]:
    """Read a complete answer, whose first header may have begun in the prompt."""
    lead = ""
    while True:
        if lead not in (_START, _CHANNEL):
            s.commit()
            if not (yield from s.skip_space()) and lead:
                return
            lead = yield from s.take_literal(*_LEADS)
        if not lead:
            s.return_as_text()
            lead = yield from s.pass_text("content", _TEXT)
        if not lead:
            return
        if lead not in _ENDS:
            lead = yield from _read_harmony_message(s, (yield from _read_header(s, lead)))


def _read_header(s: TextStream, lead: str) -> Step[_MessageHeader]:
    """Read a header that begins with `lead`, up to the marker of the message or of what comes instead."""
    mark = next((m for m in _MARKERS if lead.endswith(m)), "")
    raw, channel, text, extra = lead, lead.removesuffix(mark), lead, "" if mark else lead
    while mark != _MESSAGE:
        part, following = yield from s.read_until(*_MARKERS, required=False)
        raw += part + following
        text += part
        if mark == _CHANNEL:
            channel = (part.split() or [""])[0]
        known = _KNOWN[mark].match(part) if mark in _KNOWN else None
        extra += part[known.end() :] if known else part
        if following in ("", _START, *_ENDS):
            return _MessageHeader(raw, channel == "analysis", "", following, extra)
        mark = following
        text += mark
    recipient = _RECIPIENT.search(text)
    return _MessageHeader(raw, channel == "analysis", recipient[1] if recipient else "", _MESSAGE)


def _read_harmony_message(s: TextStream, header: _MessageHeader) -> Step[str]:
    """Read what stands behind a header; return the marker that ended it, "" if that was content."""
    kind: TextKind = "reasoning" if header.is_reasoning and s.separates_reasoning else "content"
    if header.end != _MESSAGE:
        s.out.end_section()
        s.out.add(kind, header.extra)
        return header.end
    name = header.recipient if header.recipient in s.tools else header.recipient.removeprefix("functions.")
    if name in s.tools:
        s.begin_attempt(header.raw)
        try:
            end = yield from read_ended_arguments(s, s.begin_call(name), *_ENDS)
        except (Malformed, StreamCut) as error:
            end = ""
            s.abandon_attempt(isinstance(error, StreamCut))
        if s.end_attempt():
            return end or (yield from s.pass_text("content", _BODY))
    elif header.recipient in ("", "assistant") or header.is_reasoning:
        s.out.end_section()
        return (yield from s.pass_text(kind, _BODY))
    else:
        s.out.add("content", header.raw)
    end = yield from s.pass_text("content", _BODY)
    if end not in _ENDS:
        return end
    s.out.add("content", end)
    return ""


# -- Muse -------------------------------------------------------------------------------------------

_ROLE, _TO = "assistant", "to="
_MUSE_ENDS = ("<|eom|>", "<|eot|>")
_MUSE_BODY = get_scanner(_START, *_MUSE_ENDS)
_BLOCK, _BLOCK_END = "<atem:function_calls>", "</atem:function_calls>"
_CONTENT = ("user", "commentary", "")  # the recipients of content


def _find_name(name: str, tools: ToolSchemas) -> str:
    """Find the tool that a name with its namespace means: a tool without one is called `f` or `f.f`."""
    first, _, second = name.partition(".")
    return first if name not in tools and first == second else name


_TAGS = InvokeTags("atem:", _BLOCK_END, find_name=_find_name)


def _read_muse(s: TextStream) -> Step[None]:
    """Read a complete answer, whose first header may have begun in the prompt."""
    start = ""
    while True:
        kind = yield from _read_muse_message(s, start)
        marker = yield from s.pass_text(kind or "content", _MUSE_BODY)
        if not marker:
            return
        if kind:
            s.out.end_section()
        elif start and marker != _START:  # a message that is content as it was written
            s.out.add("content", marker)
        start = marker if marker == _START else ""


def _read_muse_message(s: TextStream, start: str) -> Step[TextKind | None]:
    """Read a header, and the calls behind it. Return what the text behind that is; None: there is no header,
    or that of a call of a tool that is not offered."""
    kind: TextKind = "content"

    def read() -> Step[None]:
        nonlocal kind
        recipient = "" if (yield from _begins_calls(s)) else (yield from _read_recipient(s))
        if recipient == "self":
            kind = "reasoning" if s.separates_reasoning else "content"
            s.drop()
        elif (yield from _begins_calls(s)):
            yield from _read_calls(s)
        elif recipient in _CONTENT:
            s.drop()

    return kind if (yield from s.attempt(start, read())) else None


def _begins_calls(s: TextStream) -> Step[bool]:
    """Take white space; return whether the tags of calls come then."""
    if (yield from s.skip_space()) != "<":
        return False
    return (yield from s.peek(len(_TAGS.opener))) == _TAGS.opener or (
        yield from s.peek(len(_BLOCK))
    ) == _BLOCK


def _read_recipient(s: TextStream) -> Step[str]:
    """Read a header of which the prompt may have the beginning, and return the recipient."""
    yield from s.skip(_ROLE)
    tag = yield from s.skip(_TO, _MESSAGE)
    if tag == _MESSAGE:
        return ""
    if not tag:
        raise Malformed
    recipient, end = yield from s.read_name(_MESSAGE, _START, "\n", "<atem:")
    if end != _MESSAGE:
        raise Malformed
    return recipient


def _read_calls(s: TextStream) -> Step[None]:
    yield from s.skip(_BLOCK)
    tag = yield from take_tag(s, _TAGS.opener)
    while tag:
        yield from _TAGS.read(s)
        s.commit()
        tag = yield from s.skip(_TAGS.opener)
    yield from s.skip(_BLOCK_END)
    s.commit()


# -- Functionary ------------------------------------------------------------------------------------


def _make_functionary_reader(
    starts: tuple[str, ...], behind: str, stops: tuple[str, ...] = ()
) -> Callable[[TextStream], Step[None]]:
    """Make the reader of an answer whose messages begin with one of `starts`, the recipient and `behind`."""
    scanner = get_scanner(*starts, *stops)

    def read_answer(s: TextStream) -> Step[None]:
        start = ""  # that of the first message is the prompt's end
        while True:
            known = start in stops or (yield from _read_functionary_message(s, start, behind))
            following = yield from s.pass_text("content", scanner)
            if not following:
                return
            if start and not known and following in stops:  # a message that is content as it was written
                s.out.add("content", following)
            start = following

    return read_answer


def _read_functionary_message(s: TextStream, start: str, behind: str) -> Step[bool]:
    """Read a message's beginning: a call, or the recipient of content. False: neither, and it is text."""

    def read() -> Step[None]:
        head = yield from s.skip(*(name + behind for name in ("all", *s.tools.names)))
        if not head:
            raise Malformed
        if head == "all" + behind:
            s.drop()
        else:
            yield from read_arguments(s, s.begin_call(head.removesuffix(behind)))
            yield from s.skip_space()
            s.commit()

    return (yield from s.attempt(start, read()))


# -- records ----------------------------------------------------------------------------------------

HARMONY = ToolCallFamily(
    name="harmony",
    aliases=("gpt_oss", "gptoss", "openai"),
    detect=is_shown(_CHANNEL, _MESSAGE),
    read_answer=_read_harmony,
    markers=_MARKERS,
    call="<|channel|>commentary to=functions.$name <|constrain|>json<|message|>$arguments<|call|>",
)
HARMONY_REASONING = ReasoningFamily(
    name="harmony",
    aliases=HARMONY.aliases,
    detect=HARMONY.detect,
    pairs=((f"{_CHANNEL}analysis{_MESSAGE}", (*_ENDS, _START, _CHANNEL)),),
    anywhere=True,
    read_answer=_read_harmony,
    markers=_MARKERS,
    closing=f"<|end|>{_START}assistant{_CHANNEL}final{_MESSAGE}",
)
MUSE = ToolCallFamily(
    name="muse",
    aliases=("muse_spark", "muse_glimmer", "atem"),
    detect=in_template("<atem:"),
    read_answer=_read_muse,
    markers=(_START, _MESSAGE, *_MUSE_ENDS),
)
MUSE_REASONING = ReasoningFamily(
    name="muse",
    aliases=MUSE.aliases,
    detect=MUSE.detect,
    pairs=((f" {_TO}self{_MESSAGE}", (*_MUSE_ENDS, _START)),),
    anywhere=True,
    read_answer=_read_muse,
    markers=MUSE.markers,
    closing=f"{_MUSE_ENDS[0]}{_START}{_ROLE} {_TO}user{_MESSAGE}",
)
FUNCTIONARY_V2 = ToolCallFamily(
    name="functionary_v2",
    detect=in_template("<|recipient|>", "<|content|>"),
    read_answer=_make_functionary_reader(
        ("<|from|>assistant\n<|recipient|>",), "\n<|content|>", ("<|stop|>",)
    ),
    markers=("<|from|>", "<|recipient|>", "<|content|>", "<|stop|>"),
    call="$name\n<|content|>$arguments",
)
FUNCTIONARY = ToolCallFamily(
    name="functionary",
    aliases=("functionary_v3", "functionary_v32", "meetkai"),
    detect=in_template(">>>all"),
    read_answer=_make_functionary_reader((">>>",), "\n"),
    call="$name\n$arguments",
)
