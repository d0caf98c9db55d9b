"""gpt-oss: messages with a header each, `<|start|>assistant<|channel|>analysis<|message|>...<|end|>`.

One machine for thoughts and calls. The analysis channel is a thought; a message to an offered function is a
call, in any channel and with `to=` before or behind the channel; all other messages are text. A message to
a tool that is not offered is text as it was written, header and all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mlxrun.parsers.delta import TextKind
from mlxrun.parsers.family import ReasoningFamily, ToolCallFamily
from mlxrun.parsers.marker_scanner import get_scanner
from mlxrun.parsers.readers.json_call import read_arguments
from mlxrun.parsers.text_stream import Malformed, Step, StreamCut, TextStream

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_MARKERS = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, *_ENDS)
_BODY = get_scanner(_START, _CHANNEL, *_ENDS)
_TEXT = get_scanner(*_MARKERS)
# What may stand where a message begins: models forget `<|start|>`, and repeat the role or the channel.
_WORDS = ("assistant", "analysis", "commentary", "final")
_LEADS = (*_MARKERS, "to=", *(w + m for w in _WORDS for m in (_CHANNEL, _MESSAGE, " to=")))
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
# What of the text behind these markers belongs in a header.
_KNOWN = {
    _START: re.compile(r"\s*(?:assistant)?(?:\s*to=\S*)?\s*"),
    _CHANNEL: re.compile(r"\s*(?:analysis|commentary|final)?(?:\s*to=\S*)?\s*(?:json|code)?\s*"),
    _CONSTRAIN: re.compile(r"\s*(?:json|code)?\s*"),
}


@dataclass(frozen=True, slots=True)
class _Header:
    """What stands before a message: as written, and what it says. `end`: the marker behind it."""

    raw: str
    channel: str
    recipient: str
    end: str
    extra: str = ""  # text of a header that was not completed

    @property
    def kind(self) -> TextKind:
        return "reasoning" if self.channel == "analysis" else "content"


def read(s: TextStream) -> Step[None]:
    """A whole answer, whose first header may have begun in the prompt."""
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
            lead = yield from _message(s, (yield from _header(s, lead)))


def _header(s: TextStream, lead: str) -> Step[_Header]:
    """A header that begins with `lead`, up to the marker of the message, or of whatever comes instead."""
    mark = next((m for m in _MARKERS if lead.endswith(m)), "")
    raw, channel, text, extra = lead, lead.removesuffix(mark), lead, "" if mark else lead
    while mark != _MESSAGE:
        part, following = yield from s.read_until(*_MARKERS)
        raw += part + following
        text += part
        if mark == _CHANNEL:
            channel = (part.split() or [""])[0]
        known = _KNOWN[mark].match(part) if mark in _KNOWN else None
        extra += part[known.end() :] if known else part
        if following in ("", _START, *_ENDS):
            return _Header(raw, channel, "", following, extra)
        mark = following
        text += mark
    recipient = _RECIPIENT.search(text)
    return _Header(raw, channel, recipient[1] if recipient else "", _MESSAGE)


def _message(s: TextStream, header: _Header) -> Step[str]:
    """What stands behind a header; the marker that ended it, "" if that was text."""
    if header.end != _MESSAGE:
        s.out.end_section()
        s.out.add(_kind(s, header), header.extra)
        return header.end
    name = header.recipient if header.recipient in s.tools else header.recipient.removeprefix("functions.")
    if name in s.tools:
        s.begin_attempt(header.raw)
        try:
            end = yield from _call(s, name)
        except (Malformed, StreamCut) as error:
            end = ""
            s.abandon_attempt(isinstance(error, StreamCut))
        if s.end_attempt():
            return end or (yield from s.pass_text("content", _BODY))
    elif not header.recipient or header.kind == "reasoning":
        s.out.end_section()
        return (yield from s.pass_text(_kind(s, header), _BODY))
    else:
        s.out.add("content", header.raw)
    end = yield from s.pass_text("content", _BODY)
    if end not in _ENDS:
        return end
    s.out.add("content", end)
    return ""


def _call(s: TextStream, name: str) -> Step[str]:
    call = s.begin_call(name)
    yield from s.skip_space()
    end = yield from s.take_literal(*_ENDS)
    if end:
        call.close()
        return end
    yield from read_arguments(s, call)
    yield from s.skip_space()
    return (yield from s.take_literal(*_ENDS))


def _kind(s: TextStream, header: _Header) -> TextKind:
    return header.kind if s.separates_reasoning else "content"


def _detect(template: str, tokens: frozenset[str]) -> bool:
    return (_CHANNEL in template or _CHANNEL in tokens) and (_MESSAGE in template or _MESSAGE in tokens)


def _frame(name: str) -> tuple[str, str]:
    return f"{_CHANNEL}commentary to=functions.{name} {_CONSTRAIN}json{_MESSAGE}", "<|call|>"


FAMILY = ToolCallFamily(
    name="harmony",
    detect=_detect,
    read_answer=read,
    aliases=("gpt_oss", "gptoss", "openai"),
    markers=_MARKERS,
    prefix_suffix=_frame,
)
REASONING = ReasoningFamily(
    name="harmony",
    detect=_detect,
    read_answer=read,
    aliases=("gpt_oss", "gptoss", "openai"),
    markers=_MARKERS,
    anywhere=True,
    pairs=((f"{_CHANNEL}analysis{_MESSAGE}", (*_ENDS, _START, _CHANNEL)),),
    closing=f"<|end|>{_START}assistant{_CHANNEL}final{_MESSAGE}",
)
