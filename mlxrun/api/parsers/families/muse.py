"""Muse: messages with a recipient each, `<|start|>assistant to=f<|message|>`, and tags in those to a tool.

A message to `self` is reasoning, one to `user` or to nobody is content. One to a tool holds
`<atem:function_calls><atem:invoke name="f"><atem:parameter name="k">v</atem:parameter></atem:invoke>` and
the end tag; what looks like a call elsewhere is text. The prompt ends with `<|start|>assistant`.
"""

from __future__ import annotations

from mlxrun.api.parsers.delta import TextKind
from mlxrun.api.parsers.family import ReasoningFamily, ToolCallFamily
from mlxrun.api.parsers.marker_scanner import get_scanner
from mlxrun.api.parsers.readers.invoke_tags import InvokeTags
from mlxrun.api.parsers.readers.tagged_arguments import take_tag
from mlxrun.api.parsers.text_stream import Malformed, Step, StreamCut, TextStream
from mlxrun.api.parsers.tool_schemas import ToolSchemas

_START, _ROLE, _TO, _MESSAGE = "<|start|>", "assistant", "to=", "<|message|>"
_ENDS = ("<|eom|>", "<|eot|>")
_BODY = get_scanner(_START, *_ENDS)
_BLOCK, _BLOCK_END = "<atem:function_calls>", "</atem:function_calls>"
_CONTENT = ("user", "commentary", "")  # the recipients of content
_REASONING = "self"


def _find_name(name: str, tools: ToolSchemas) -> str:
    """Find the tool that a name with its namespace means: a tool without one is called `f` or `f.f`."""
    first, _, second = name.partition(".")
    return first if name not in tools and first == second else name


_TAGS = InvokeTags("atem:", _BLOCK_END, find_name=_find_name)
_MARKERS = (_START, _MESSAGE, *_ENDS)


def read_answer(s: TextStream) -> Step[None]:
    """Read a complete answer, whose first header may have begun in the prompt."""
    start = ""
    while True:
        kind = yield from _read_message(s, start)
        marker = yield from s.pass_text(kind or "content", _BODY)
        if not marker:
            return
        if kind:
            s.out.end_section()
        elif start and marker != _START:  # a message that is content as it was written
            s.out.add("content", marker)
        start = marker if marker == _START else ""


def _read_message(s: TextStream, start: str) -> Step[TextKind | None]:
    """Read a header, and the calls behind it. Return what the text behind that is; None: there is no header,
    or that of a call of a tool that is not offered."""
    s.begin_attempt(start)
    kind: TextKind = "content"
    try:
        recipient = "" if (yield from _begins_calls(s)) else (yield from _read_recipient(s))
        if recipient == _REASONING:
            kind = "reasoning" if s.separates_reasoning else "content"
            s.drop()
        elif (yield from _begins_calls(s)):
            yield from _read_calls(s)
        elif recipient in _CONTENT:
            s.drop()
    except (Malformed, StreamCut) as error:
        s.abandon_attempt(isinstance(error, StreamCut))
    return kind if s.end_attempt() else None


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


def _detect(template: str, tokens: frozenset[str]) -> bool:
    return "<atem:" in template


FAMILY = ToolCallFamily(
    name="muse",
    detect=_detect,
    read_answer=read_answer,
    aliases=("muse_spark", "muse_glimmer", "atem"),
    markers=_MARKERS,
)
REASONING = ReasoningFamily(
    name="muse",
    detect=_detect,
    pairs=((f" {_TO}{_REASONING}{_MESSAGE}", (*_ENDS, _START)),),
    anywhere=True,
    read_answer=read_answer,
    aliases=("muse_spark", "muse_glimmer", "atem"),
    markers=_MARKERS,
    closing=f"{_ENDS[0]}{_START}{_ROLE} {_TO}user{_MESSAGE}",
)
