"""JSON that a model writes, read as it comes and passed on as soon as it is certain.

What is passed on is valid JSON again: raw newlines in strings are escaped, escapes that JSON does not know
are taken literally, Python's True, False and None are mended, and so is what the schema excludes.
"""

from __future__ import annotations

import json
import re

from mlxrun.parsers.argument_writer import ArgumentWriter, quoted
from mlxrun.parsers.text_stream import Malformed, Step, StreamCut, TextStream
from mlxrun.parsers.tool_schemas import NUMBER, ValueSchema, encode_json, repair_string

_SAFE = re.compile(  # characters of a string, escapes, and both halves of a surrogate pair together
    r"""(?:[^"\\\x00-\x1f]+|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}"""
    r"""|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})+"""
)
_HEX = "[0-9a-fA-F]"
_PART = re.compile(  # what may become one of these
    rf"\\(?:u(?:{_HEX}{{0,3}}|[dD][89abAB]{_HEX}{{2}}(?:\\(?:u(?:[dD](?:[c-fC-F]{_HEX}?)?)?)?)?)?)?\Z"
)
_QUOTE = re.compile("'")
_ESCAPE = re.compile(r"\\u[0-9a-fA-F]{4}")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_ATOM = 400  # characters of a number at most
_DEPTH = 64


def read_value(s: TextStream, call: ArgumentWriter, schema: ValueSchema, depth: int = _DEPTH) -> Step[None]:
    """A JSON value into `call`. Raises Malformed or Cut; what was passed on stays closable."""
    char = yield from s.skip_space()
    if not char:
        raise StreamCut
    if char == '"':
        yield from _string_value(s, call, schema)
    elif char in "{[":
        if not depth:
            raise Malformed
        s.take(1)
        call.open_container(char)
        if char == "{":
            yield from _members(s, call, schema, depth - 1)
        else:
            yield from _items(s, call, schema.get_items(), depth - 1)
        call.close_innermost()
    else:
        atom = yield from read_atom(s)
        call.write_value(encode_json(atom) if schema.is_text_only and atom != "null" else atom)


def _members(s: TextStream, call: ArgumentWriter, schema: ValueSchema, depth: int) -> Step[None]:
    """All behind the opening brace of an object, with the closing one."""
    char = yield from s.skip_space()
    if char == "}":
        s.take(1)
        return
    while True:
        yield from expect(s, '"')
        key = yield from read_string(s)
        yield from expect(s, ":")
        call.write_key(quoted(key))
        yield from read_value(s, call, schema.get_member(key), depth)
        if (yield from expect(s, ",}")) == "}":
            return


def _items(s: TextStream, call: ArgumentWriter, schema: ValueSchema, depth: int) -> Step[None]:
    char = yield from s.skip_space()
    if char == "]":
        s.take(1)
        return
    while True:
        yield from read_value(s, call, schema, depth)
        if (yield from expect(s, ",]")) == "]":
            return


def _string_value(s: TextStream, call: ArgumentWriter, schema: ValueSchema) -> Step[None]:
    s.take(1)
    if schema.excludes_text:
        text = yield from read_string(s)
        call.write_value(repair_string(text, schema))
        return
    call.open_string()
    yield from s.wait_in_string(call)
    while piece := (yield from _piece(s)):
        call.write_escaped(piece)
        yield from s.wait_in_string(call)
    call.close_innermost()


def read_string(s: TextStream) -> Step[str]:
    """A whole string, its opening quote taken already."""
    parts: list[str] = []
    while piece := (yield from _piece(s)):
        parts.append(piece)
    return str(json.loads(f'"{"".join(parts)}"'))


def read_atom(s: TextStream) -> Step[str]:
    """A number or a word, which are certain when something follows them."""
    count = 1
    while True:
        seen = yield from s.peek(count)
        if len(seen) < count:
            raise StreamCut
        if not (seen[-1].isalnum() or seen[-1] in "+-."):
            break
        count += 1
        if count > _ATOM:
            raise Malformed
    atom = seen[:-1]
    if NUMBER.fullmatch(atom) is None and atom not in _WORDS:
        raise Malformed
    s.take(len(atom))
    return _WORDS.get(atom, atom)


def raw_value(s: TextStream, depth: int = _DEPTH) -> Step[str]:
    """A whole value as JSON."""
    char = yield from s.skip_space()
    if not char:
        raise StreamCut
    if char == '"':
        s.take(1)
        return encode_json((yield from read_string(s)))
    if char not in "{[":
        return (yield from read_atom(s))
    if not depth:
        raise Malformed
    parts = [s.take(1)]
    closer = "}" if char == "{" else "]"
    if (yield from s.skip_space()) == closer:
        return char + s.take(1)
    while True:
        if char == "{":
            yield from expect(s, '"')
            parts.append(encode_json((yield from read_string(s))))
            yield from expect(s, ":")
            parts.append(": ")
        parts.append((yield from raw_value(s, depth - 1)))
        if (yield from expect(s, "," + closer)) == closer:
            return "".join(parts) + closer
        parts.append(", ")


def expect(s: TextStream, chars: str) -> Step[str]:
    """Take one of these characters, after white space."""
    char = yield from s.skip_space()
    if not char:
        raise StreamCut
    if char not in chars:
        raise Malformed
    return s.take(1)


def _piece(s: TextStream) -> Step[str]:
    """More of a string, escaped; "" when its closing quote was taken."""
    while True:
        safe = s.match(_SAFE)
        if safe is not None:
            return s.take(len(safe[0]))
        char = yield from s.peek()
        if not char:
            raise StreamCut
        if char == '"':
            s.take(1)
            return ""
        if char != "\\":
            if s.match(_SAFE) is None:
                return quoted(s.take(1))[1:-1]
        elif s.match(_PART) is None:
            if s.match(_SAFE) is None:
                return _mend(s)
        elif s.ended:
            raise StreamCut
        else:
            yield


def _mend(s: TextStream) -> str:
    """An escape that JSON does not know: a quote is one, half of a surrogate pair cannot be saved, else the
    backslash is meant."""
    if s.match(_ESCAPE):
        s.take(6)
        return "\\ufffd"
    s.take(1)
    if s.match(_QUOTE):
        return s.take(1)
    return "\\\\"
