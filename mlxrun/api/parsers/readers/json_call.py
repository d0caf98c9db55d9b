"""Reads calls that are JSON objects, `{"name": ..., "arguments": {...}}`, in the variants that models write.

Members come in any order. Arguments before the name are kept until it comes. `arguments` may be missing, null
or JSON in a string. The object around the arguments may lack its last brace.

A call may stand without a marker, in a code fence or not. Only its beginning tells such an object from other
JSON. So nothing is taken until it names an offered tool.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from mlxrun.api.parsers.argument_writer import ArgumentWriter
from mlxrun.api.parsers.family import ToolCallFamily
from mlxrun.api.parsers.readers.json_text import expect, read_key, read_raw_value, read_string, read_value
from mlxrun.api.parsers.text_stream import MAX_NAME, Malformed, Step, StreamCut, TextStream
from mlxrun.api.parsers.tool_schemas import ToolSchemas

NAMES = ("name", "tool_name")
ARGUMENTS = ("arguments", "parameters")
FENCE = "```"


def read_calls(
    s: TextStream,
    ids: re.Pattern[str] | None = None,
    opened: str = "",
    read_object: Callable[[TextStream], Step[bool]] | None = None,
) -> Step[bool]:
    """Read one object or several, in an array or one after the other. False if one of them is no call. Then
    it becomes text, and so does all behind the last object.

    `opened`: the brackets that were taken already. `read_object`: reads an object behind its brace if the
    format has its own objects; it returns False if the object is no call."""
    array = opened.removesuffix("{") if opened else (yield from s.take_literal("["))
    all_calls = True
    while True:
        if array:
            yield from s.skip_space()
        if not opened:
            yield from expect(s, "{")
        opened = ""
        if not (yield from (read_object(s) if read_object else _read_object(s, ids))):
            s.return_as_text()
            all_calls = False
        char = yield from s.skip_space()
        if array and char == ",":
            s.take(1)
        elif array or char != "{":
            break
    if array and char == "]":
        s.take(1)
    if not all_calls:
        s.return_as_text()
    return all_calls


def read_block(
    s: TextStream, *ends: str, read_object: Callable[[TextStream], Step[bool]] | None = None
) -> Step[None]:
    """Read calls and the tag behind them, one of `ends`. The tag is text if one of them is no call.
    `read_object`: as for read_calls."""
    yield from s.skip_space()
    if (yield from read_calls(s, read_object=read_object)):
        yield from s.skip(*ends)


def make_json_family(
    name: str,
    tags: Mapping[str, str],
    *,
    behind: tuple[str, ...] = (),
    repeats: bool = False,
    read_object: Callable[[TextStream], Step[bool]] | None = None,
    **fields: Any,
) -> ToolCallFamily:
    """Make the family of a format of JSON objects between `tags`: openers, each with its end tag or "".

    `behind`: texts of which one must follow an opener. `repeats`: models repeat the opener, and write blocks
    without a call, which are left out. `read_object`: as for read_calls. `fields`: other fields of
    ToolCallFamily.
    """

    def read(s: TextStream, opener: str) -> Step[None]:
        if behind and not (yield from s.skip(*behind)):
            raise Malformed
        if not (repeats and (yield from s.drop_empty_block(opener, tags[opener]))):
            yield from read_block(s, tags[opener], read_object=read_object)

    ends = tuple(filter(None, tags.values()))
    made = {"openers": tuple(tags), "read": read, "ends": ends, "markers": (*tags, *ends)}
    return ToolCallFamily(name=name, **{**made, **fields})


def read_ended_arguments(s: TextStream, call: ArgumentWriter, *ends: str) -> Step[str]:
    """Read arguments, which may be missing. Take and return one of `ends`; "" if none comes."""
    end = yield from s.skip(*ends)
    if end:
        call.close()
        return end
    yield from read_arguments(s, call)
    return (yield from s.skip(*ends))


def read_fenced_arguments(s: TextStream, call: ArgumentWriter, end: str) -> Step[None]:
    """Read arguments in a code fence or without one, and the end tag."""
    yield from s.skip(FENCE)
    yield from s.take_literal("json")
    yield from read_arguments(s, call)
    yield from s.skip(FENCE)
    yield from s.skip(end)


def _read_object(s: TextStream, ids: re.Pattern[str] | None, id: str = "") -> Step[bool]:
    """Read one object behind its brace. False if it is no call of an offered tool; then all of it was taken.

    `ids`: the form of an `id` that is used as the call's, if the format has ids. It is used if it comes
    before the arguments, which do not wait for it. `id`: one that was found outside the object.
    """
    name: str | None = None
    arguments: str | None = None
    call: ArgumentWriter | None = None
    if (yield from s.skip_space()) == "}":
        s.take(1)
        return False
    while True:
        key = yield from read_key(s)
        char = yield from s.skip_space()
        first = key in ARGUMENTS and call is None and arguments is None
        if key in NAMES and name is None and char == '"':
            s.take(1)
            name = (yield from read_string(s)).strip()
        elif key == "function" and name is None and char == "{":
            return (yield from _read_nested(s, ids, id))
        elif first and name is not None and name in s.tools:
            call = s.begin_call(name, id)
            yield from read_arguments(s, call)
        elif first:
            arguments = yield from read_raw_value(s)
        elif key == "id" and ids is not None and char == '"':
            s.take(1)
            found = yield from read_string(s)
            id = found if ids.fullmatch(found) else id
        else:
            yield from read_raw_value(s)
        if arguments is not None and call is None and name is not None and name in s.tools:
            call = s.begin_call(name, id)
            write_arguments(call, arguments)
        char = yield from s.skip_space()
        if call is not None and (char == "" or char not in ",}"):
            return True
        if (yield from expect(s, ",}")) == "}":
            break
    if call is None and name is not None and name in s.tools:
        call = s.begin_call(name, id)
        call.close()
    if call is not None:
        s.commit()
    return call is not None


def _read_nested(s: TextStream, ids: re.Pattern[str] | None, id: str) -> Step[bool]:
    """Read the call within `{"type": "function", "function": {...}}`, and the members that follow it."""
    yield from expect(s, "{")
    found = yield from _read_object(s, ids, id)
    while (yield from s.skip_space()) not in ("", "}"):
        yield from expect(s, ",")
        yield from read_key(s)
        yield from read_raw_value(s)
    s.take(1)
    if found:
        s.commit()
    return found


def read_arguments(s: TextStream, call: ArgumentWriter) -> Step[None]:
    """Read arguments into `call`, and close it."""
    if (yield from s.skip_space()) == "{":
        yield from read_value(s, call, call.schema)
        call.close()
    else:
        write_arguments(call, (yield from read_raw_value(s)))


def write_arguments(call: ArgumentWriter, text: str) -> None:
    """Write complete arguments into `call`, and close it: an object, null, or one of them as a string.
    Malformed, before anything is written, if they are anything else."""
    text = text.strip()
    try:
        if text.startswith('"'):
            write_arguments(call, json.loads(text))
        elif text.startswith("{"):
            _read_complete(text, read_raw_value)
            _read_complete(text, lambda s: read_value(s, call, call.schema))
            call.close()
        elif text in ("", "null", "[]"):
            call.close()
        else:
            raise Malformed
    except (StreamCut, ValueError):
        raise Malformed from None


def _read_complete(text: str, read: Callable[[TextStream], Step[Any]]) -> None:
    """Run a reader on a text that has come to its end. Raises Malformed if the reader does not take all."""
    s = TextStream(ToolSchemas(None))
    s.add_text(text)
    s.ended = True
    for _ in read(s):
        raise AssertionError("a reader waits for text after the end")
    if not s.is_drained():
        raise Malformed


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
