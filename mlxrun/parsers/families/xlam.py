"""xLAM: an answer that is a JSON array of calls, `[{"name": ..., "arguments": {...}}, ...]`.

It may stand in a code fence, or behind the opener of another format, as some of its models write. Other JSON
is passed on as text from the first name that is not offered.
"""

from __future__ import annotations

from mlxrun.parsers.family import ToolCallFamily
from mlxrun.parsers.readers.json_call import make_prefix_suffix, read_calls
from mlxrun.parsers.text_stream import MAX_NAME, Malformed, Step, StreamCut, TextStream

_FENCE = "```"
_ENDS = {"<tool_call>": "</tool_call>", "[TOOL_CALLS]": ""}
_KEYS = ("name", "arguments", "parameters", "type", "id", "function")


def read_bare_calls(s: TextStream) -> Step[bool]:
    """Read calls without an opener. Raises Malformed, with nothing taken, once the text cannot be one."""
    at = yield from _peek_past(s, 0, "[", required=False)
    at = yield from _peek_past(s, at, "{")
    key, at = yield from _peek_string(s, at)
    if key not in _KEYS:
        raise Malformed
    if key == "name":
        at = yield from _peek_past(s, at, ":")
        name, _ = yield from _peek_string(s, at)
        if name not in s.tools:
            raise Malformed
    return (yield from read_calls(s))


def _peek_past(s: TextStream, at: int, char: str, required: bool = True) -> Step[int]:
    """Return where the text continues behind white space and `char`."""
    while (yield from s.peek(at + 1))[at:].isspace() and at < MAX_NAME:
        at += 1
    seen = yield from s.peek(at + 1)
    if len(seen) <= at:
        raise StreamCut
    if seen[at] == char:
        return at + 1
    if required:
        raise Malformed
    return at


def _peek_string(s: TextStream, at: int) -> Step[tuple[str, int]]:
    """Return the string there, and where the text continues behind its quotes."""
    at = yield from _peek_past(s, at, '"')
    text = yield from s.peek_while(lambda char: char not in '"\n\\', at)
    end = at + len(text) + 1
    if (yield from s.peek(end))[-1] != '"':
        raise Malformed
    return text, end


def _read_start(s: TextStream, opener: str) -> Step[None]:
    fence = yield from s.skip(_FENCE)
    if fence:
        yield from s.take_literal("json")
        yield from s.skip_space()
    if (yield from read_bare_calls(s)) and fence:
        yield from s.skip(_FENCE)


def _read(s: TextStream, opener: str) -> Step[None]:
    yield from s.skip_space()
    if (yield from read_calls(s)):
        yield from s.skip(_ENDS[opener])


FAMILY = ToolCallFamily(
    name="xlam",
    detect=lambda template, tokens: "xLAM" in template or '"tool_call_name"' in template,
    openers=tuple(_ENDS),
    read=_read,
    read_start=_read_start,
    aliases=("xlam2",),
    markers=("<tool_call>", "</tool_call>"),
    prefix_suffix=make_prefix_suffix("[", "]"),
)
