"""Reads JSON that a model writes, and passes it on as soon as it is certain.

The result is valid JSON. Raw newlines in strings are escaped. Escapes that JSON does not know are taken
literally. Python's True, False and None become JSON's. Values that the schema excludes are repaired.

Readers raise Malformed for other text, and StreamCut at the end of the text.
"""

from __future__ import annotations

import json
import re

from mlxrun.api.parsers.argument_writer import ArgumentWriter
from mlxrun.api.parsers.text_stream import Malformed, Step, StreamCut, TextStream
from mlxrun.api.parsers.tool_schemas import NUMBER, ValueSchema, encode_json, repair_string

MAX_DEPTH = 64
CLOSERS = {"{": "}", "[": "]"}
_SAFE = re.compile(  # characters of a string, escapes, and the two escapes of a surrogate pair together
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


def read_value(
    s: TextStream, call: ArgumentWriter, schema: ValueSchema, depth: int = MAX_DEPTH
) -> Step[None]:
    """Read a JSON value into `call`. After Malformed or StreamCut `call` can still be closed."""
    char = yield from s.skip_space()
    if char == '"':
        yield from _read_string_value(s, call, schema)
    elif char in CLOSERS:
        yield from _read_container(s, call, schema, depth - 1)
    else:
        atom = yield from read_atom(s)
        call.write_value(encode_json(atom) if schema.is_text_only and atom != "null" else atom)


def open_container(s: TextStream, call: ArgumentWriter, depth: int) -> str:
    """Take an opening bracket into `call` and return it. Malformed if it is nested too deeply."""
    if depth < 0:
        raise Malformed
    bracket = s.take(1)
    call.open_container(bracket)
    return bracket


def _read_container(s: TextStream, call: ArgumentWriter, schema: ValueSchema, depth: int) -> Step[None]:
    bracket = open_container(s, call, depth)
    closer, inner = CLOSERS[bracket], schema.get_items()
    more = (yield from s.skip_space()) != closer
    if not more:
        s.take(1)
    while more:
        if bracket == "{":
            key = yield from read_key(s)
            call.write_key(key)
            inner = schema.get_member(key)
        yield from read_value(s, call, inner, depth)
        more = (yield from expect(s, "," + closer)) == ","
    call.close_innermost()


def _read_string_value(s: TextStream, call: ArgumentWriter, schema: ValueSchema) -> Step[None]:
    s.take(1)
    if schema.excludes_text:
        text = yield from read_string(s)
        call.write_value(repair_string(text, schema))
        return
    call.open_string()
    yield from s.wait_in_string(call)
    while part := (yield from _read_string_part(s)):
        call.write_escaped(part)
        yield from s.wait_in_string(call)
    call.close_innermost()


def read_key(s: TextStream) -> Step[str]:
    """Read a key in quotes and the colon behind it."""
    yield from expect(s, '"')
    key = yield from read_string(s)
    yield from expect(s, ":")
    return key


def read_string(s: TextStream) -> Step[str]:
    """Read a string to its end, behind its opening quote."""
    parts: list[str] = []
    while part := (yield from _read_string_part(s)):
        parts.append(part)
    return str(json.loads(f'"{"".join(parts)}"'))


def read_atom(s: TextStream) -> Step[str]:
    """Read a number or a word, and return it as JSON. It is certain once another character follows."""
    atom = yield from s.peek_while(lambda char: char.isalnum() or char in "+-.")
    if NUMBER.fullmatch(atom) is None and atom not in _WORDS:
        raise Malformed
    s.take(len(atom))
    return _WORDS.get(atom, atom)


def read_raw_value(s: TextStream, depth: int = MAX_DEPTH) -> Step[str]:
    """Read a value to its end and return it as JSON."""
    char = yield from s.skip_space()
    if char == '"':
        s.take(1)
        return encode_json((yield from read_string(s)))
    if char not in CLOSERS:
        return (yield from read_atom(s))
    if not depth:
        raise Malformed
    s.take(1)
    closer, members = CLOSERS[char], []
    more = (yield from s.skip_space()) != closer
    if not more:
        s.take(1)
    while more:
        key = encode_json((yield from read_key(s))) + ": " if char == "{" else ""
        members.append(key + (yield from read_raw_value(s, depth - 1)))
        more = (yield from expect(s, "," + closer)) == ","
    return char + ", ".join(members) + closer


def expect(s: TextStream, chars: str) -> Step[str]:
    """Take white space and one of these characters; return the character."""
    char = yield from s.skip_space()
    if not char:
        raise StreamCut
    if char not in chars:
        raise Malformed
    return s.take(1)


def _read_string_part(s: TextStream) -> Step[str]:
    """Read more of a string, in escaped form; "" once its closing quote was taken."""
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
                return encode_json(s.take(1))[1:-1]
        elif s.match(_PART) is None:
            if s.match(_SAFE) is None:
                return _repair_escape(s)
        elif s.ended:
            raise StreamCut
        else:
            yield


def _repair_escape(s: TextStream) -> str:
    """Take an escape that JSON does not know: an escaped single quote is a quote, a lone surrogate becomes
    U+FFFD, and in all others the backslash is meant literally."""
    if s.match(_ESCAPE):
        s.take(6)
        return "\\ufffd"
    s.take(1)
    return s.take(1) if s.match(_QUOTE) else "\\\\"
