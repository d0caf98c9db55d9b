"""Reads calls without a marker: JSON objects `{"name": ..., "arguments": {...}}`, in a code fence or not.

Only its beginning tells such an object from other JSON. So nothing is taken until it names an offered tool.
"""

from __future__ import annotations

from mlxrun.api.parsers.readers.json_call import ARGUMENTS, FENCE, read_calls
from mlxrun.api.parsers.text_stream import MAX_NAME, Malformed, Step, StreamCut, TextStream

BARE = ("{", "[{", FENCE)  # the `bare` openers of a family that reads such calls
_LANGUAGES = ("json", "tool_call", "tool_calls", "xml")
_KEYS = ("name", *ARGUMENTS, "type", "id", "function")


def read_bare(s: TextStream, opener: str, anywhere: bool = False) -> Step[bool]:
    """Read calls behind one of BARE that begins a line, or stands `anywhere`. Malformed if there is no call.
    False if not all objects are calls."""
    if not (anywhere or s.out.at_line_start):
        raise Malformed
    if opener != FENCE:
        yield from _peek_call(s, 0)
        return (yield from read_calls(s, opened=opener))
    yield from s.take_literal(*_LANGUAGES)
    if (yield from s.skip_space()) not in ("{", "["):
        raise Malformed
    yield from _peek_call(s, (yield from _peek_brackets(s)))
    found = yield from read_calls(s)
    if found:
        yield from s.skip(FENCE)
    return found


def read_bare_calls(s: TextStream) -> Step[bool]:
    """Read calls at the beginning of an answer that is expected to be nothing else. Malformed, with nothing
    taken, once the text cannot be a call. False if not all objects are calls."""
    key, at = yield from _peek_string(s, (yield from _peek_brackets(s)))
    if key not in _KEYS:
        raise Malformed
    if key == "name":
        yield from _peek_name(s, at)
    return (yield from read_calls(s))


def _peek_call(s: TextStream, at: int) -> Step[None]:
    """Look at the beginning of an object, behind its brace. Raises Malformed if it is no call."""
    key, at = yield from _peek_string(s, at)
    if key == "name":
        at = yield from _peek_name(s, at)
        at = yield from _peek_past(s, at, ",")
        key, at = yield from _peek_string(s, at)
        if key not in _KEYS:
            raise Malformed
    elif key == "type":
        at = yield from _peek_past(s, at, ":")
        kind, at = yield from _peek_string(s, at)
        if kind != "function":
            raise Malformed
    elif key in ("function", *ARGUMENTS):
        at = yield from _peek_past(s, at, ":")
        yield from _peek_past(s, at, "{")
    else:
        raise Malformed


def _peek_name(s: TextStream, at: int) -> Step[int]:
    """Look at the name of an offered tool, behind its key; return where the text continues."""
    at = yield from _peek_past(s, at, ":")
    name, at = yield from _peek_string(s, at)
    if name.strip() not in s.tools:
        raise Malformed
    return at


def _peek_brackets(s: TextStream) -> Step[int]:
    """Return where the text continues behind the bracket of an array, which may be missing, and a brace."""
    at = yield from _peek_past(s, 0, "[", required=False)
    return (yield from _peek_past(s, at, "{"))


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
