"""gpt-oss: messages with a header each, `<|start|>assistant<|channel|>analysis<|message|>...<|end|>`.

One reader for reasoning and calls. The analysis channel is reasoning; a message to an offered function is a
call, in any channel and with `to=` before or behind the channel; all other messages are content. A message to
a tool that is not offered is content as it was written, with its header.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mlxrun.api.parsers.delta import TextKind
from mlxrun.api.parsers.family import ReasoningFamily, ToolCallFamily
from mlxrun.api.parsers.marker_scanner import get_scanner
from mlxrun.api.parsers.readers.json_call import read_arguments
from mlxrun.api.parsers.text_stream import Malformed, Step, StreamCut, TextStream

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


def read_answer(s: TextStream) -> Step[None]:
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
            lead = yield from _read_message(s, (yield from _read_header(s, lead)))


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


def _read_message(s: TextStream, header: _MessageHeader) -> Step[str]:
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
            end = yield from _read_call(s, name)
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


def _read_call(s: TextStream, name: str) -> Step[str]:
    call = s.begin_call(name)
    end = yield from s.skip(*_ENDS)
    if end:
        call.close()
        return end
    yield from read_arguments(s, call)
    return (yield from s.skip(*_ENDS))


def _detect(template: str, tokens: frozenset[str]) -> bool:
    return (_CHANNEL in template or _CHANNEL in tokens) and (_MESSAGE in template or _MESSAGE in tokens)


_ALIASES = ("gpt_oss", "gptoss", "openai")

FAMILY = ToolCallFamily(
    name="harmony",
    detect=_detect,
    read_answer=read_answer,
    aliases=_ALIASES,
    markers=_MARKERS,
    prefix_suffix=lambda name: (
        f"{_CHANNEL}commentary to=functions.{name} {_CONSTRAIN}json{_MESSAGE}",
        "<|call|>",
    ),
)
REASONING = ReasoningFamily(
    name="harmony",
    detect=_detect,
    read_answer=read_answer,
    aliases=_ALIASES,
    markers=_MARKERS,
    anywhere=True,
    pairs=((f"{_CHANNEL}analysis{_MESSAGE}", (*_ENDS, _START, _CHANNEL)),),
    closing=f"<|end|>{_START}assistant{_CHANNEL}final{_MESSAGE}",
)
