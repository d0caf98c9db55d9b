"""MiniMax M2: `<invoke name="f"><parameter name="k">v</parameter></invoke>` within `<minimax:tool_call>`.

Strings are written as they are, all else as JSON. Each invocation is a call by itself; the tags around them
are dropped wherever they stand.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxrun.parsers.family import ToolCallFamily
from mlxrun.parsers.marker_scanner import get_scanner
from mlxrun.parsers.readers.tagged_arguments import TEXT, read_tagged
from mlxrun.parsers.text_stream import Malformed, Step, StreamCut, TextStream

START, END = "<minimax:tool_call>", "</minimax:tool_call>"
_STRING = ('" string="true', '" string="false')


@dataclass(frozen=True, slots=True)
class InvokeTags:
    """The tags of a format that names calls and values in attributes, by what stands before their names."""

    prefix: str = ""

    @property
    def invoke(self) -> str:
        return f"<{self.prefix}invoke name="

    @property
    def parameter(self) -> str:
        return f"<{self.prefix}parameter name="


def read_invoke(s: TextStream, tags: InvokeTags) -> Step[None]:
    """A call behind `tags.invoke`, with its end tag. Raises Malformed if the tool is not offered."""
    name = yield from _attribute(s)
    if name not in s.tools:
        raise Malformed
    call = s.begin_call(name)
    ends = get_scanner(f"</{tags.prefix}parameter>")
    while (yield from next_tag(s, tags.parameter, f"</{tags.prefix}invoke>")) == tags.parameter:
        key, quoted = yield from _parameter(s)
        schema = call.schema.get_member(key)
        if quoted and not schema.excludes_text:
            schema = TEXT
        yield from read_tagged(s, call, key, ends, layout=False, guess=True, schema=schema)
    call.close()


def next_tag(s: TextStream, *tags: str) -> Step[str]:
    """Which of `tags` comes next, behind white space. Raises Malformed, or Cut if the text ends in it."""
    yield from s.skip_space()
    tag = yield from s.take_literal(*tags)
    if not tag:
        rest = yield from s.peek(max(map(len, tags)))
        raise StreamCut if any(tag.startswith(rest) for tag in tags) else Malformed
    return tag


def _parameter(s: TextStream) -> Step[tuple[str, bool]]:
    """A parameter's name, and whether the tag says that it is a string (DeepSeek V3.2)."""
    key = yield from _attribute(s)
    for mark in _STRING:
        if key.endswith(mark):
            return key.removesuffix(mark), mark == _STRING[0]
    return key, False


def _attribute(s: TextStream) -> Step[str]:
    """The rest of a tag that names something, with quotes or without."""
    name, end = yield from s.read_name(">", "\n")
    if not end:
        raise StreamCut
    if end == "\n":
        raise Malformed
    return name.strip().strip("\"'")


_TAGS = InvokeTags()


def _read(s: TextStream, opener: str) -> Step[None]:
    yield from read_invoke(s, _TAGS)


FAMILY = ToolCallFamily(
    name="minimax_m2",
    detect=lambda template, tokens: START in template,
    openers=(_TAGS.invoke,),
    read=_read,
    aliases=("minimax",),
    markers=(START, END),
    ignored=(START, END),
)
