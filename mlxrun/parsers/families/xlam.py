"""xLAM: an answer that is a JSON array of calls, `[{"name": ..., "arguments": {...}}, ...]`.

It may stand in a fence of code, or behind the opener of another format, as some of its models write. Other
JSON flows on as text from the first name that is not offered.
"""

from __future__ import annotations

from mlxrun.parsers.argument_writer import quoted
from mlxrun.parsers.family import ToolCallFamily
from mlxrun.parsers.readers.json_call import read_calls
from mlxrun.parsers.text_stream import MAX_NAME, Malformed, Step, StreamCut, TextStream

_FENCE = "```"
_ENDS = {"<tool_call>": "</tool_call>", "[TOOL_CALLS]": ""}
_KEYS = ('"name"', '"arguments"', '"parameters"', '"type"', '"id"', '"function"')


def read_naked(s: TextStream) -> Step[bool]:
    """Calls without an opener. Raises Malformed as soon as the text cannot be one; nothing was taken then."""
    yield from _plausible(s)
    return (yield from read_calls(s))


def _plausible(s: TextStream) -> Step[None]:
    """Looks at the text up to the first member's key, and the name if it is that. Takes nothing."""
    rest = yield from _skipped(s, 0, "[")
    rest = yield from _skipped(s, rest, "{", must=True)
    key, rest = yield from _word(s, rest)
    if key not in _KEYS:
        raise Malformed
    if key == '"name"':
        rest = yield from _skipped(s, rest, ":", must=True)
        name, _ = yield from _word(s, rest)
        if name[1:-1] not in s.tools:
            raise Malformed


def _skipped(s: TextStream, at: int, char: str, must: bool = False) -> Step[int]:
    """Where the text goes on behind white space and `char`."""
    while (yield from s.peek(at + 1))[at:].isspace() and at < MAX_NAME:
        at += 1
    seen = yield from s.peek(at + 1)
    if len(seen) <= at:
        raise StreamCut
    if seen[at] == char:
        return at + 1
    if must:
        raise Malformed
    return at


def _word(s: TextStream, at: int) -> Step[tuple[str, int]]:
    """The string there, in its quotes, and where the text goes on."""
    at = yield from _skipped(s, at, '"', must=True)
    end = at
    while True:
        seen = yield from s.peek(end + 1)
        if len(seen) <= end:
            raise StreamCut
        if seen[end] == '"':
            return seen[at - 1 : end + 1], end + 1
        if seen[end] in "\n\\" or end > MAX_NAME:
            raise Malformed
        end += 1


def _start(s: TextStream, opener: str) -> Step[None]:
    yield from s.skip_space()
    fence = yield from s.take_literal(_FENCE)
    if fence:
        yield from s.take_literal("json")
        yield from s.skip_space()
    if (yield from read_naked(s)) and fence:
        yield from s.skip_space()
        yield from s.take_literal(_FENCE)


def _read(s: TextStream, opener: str) -> Step[None]:
    yield from s.skip_space()
    if (yield from read_calls(s)):
        yield from s.skip_space()
        yield from s.take_literal(_ENDS[opener])


FAMILY = ToolCallFamily(
    name="xlam",
    detect=lambda template, tokens: "xLAM" in template or '"tool_call_name"' in template,
    openers=tuple(_ENDS),
    read=_read,
    read_start=_start,
    aliases=("xlam2",),
    markers=("<tool_call>", "</tool_call>"),
    prefix_suffix=lambda name: (f'[{{"name": {quoted(name)}, "arguments": ', "}]"),
)
