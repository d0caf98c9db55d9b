"""Reads calls that are written as Python: `f(a=1, b="x")`, or a list of them.

Values are Python's literals or JSON's. Each is passed on when it is complete.
"""

from __future__ import annotations

import ast
import json
import math
import re
from typing import Any

from mlxrun.api.parsers.argument_writer import ArgumentWriter
from mlxrun.api.parsers.text_stream import MAX_NAME, Malformed, Step, StreamCut, TextStream
from mlxrun.api.parsers.tool_schemas import (
    ValueSchema,
    encode_bare_value,
    encode_json,
    parse_python,
    repair_value,
)
from mlxrun.core.limited_json import check_depth

_STOPS = ("(", ")", "[", "]", "{", "}", ",", '"', "'")
_NAMED = re.compile(r"\s*(\w+)\s*=(?!=)(.*)", re.DOTALL)
_BARE = re.compile(r"\w[\w .:/+-]*")
_ESCAPES = {0: "\\0", 10: "\\n", 13: "\\r"}
# What may follow a string as an argument, and within brackets. "known" is there once it is certain.
_NEXT = re.compile(
    r"""\s*(?:(?P<known>["']|,\s*(?:["'\[{(\-\d)]|\w+\s*[=,)])|\)[ \t]*(?:[\],;\n<`]|\)[ \t]*[\n`]))"""
    r"""|(?:,\s*(?:\w+\s*)?|\)[ \t]*(?:\)[ \t]*)?)?\Z)"""
)
_NEXT_INSIDE = re.compile(r"""\s*(?:(?P<known>["',)\]}:+])|\Z)""")
_WORDS = {"true": True, "false": False, "null": None}


def read_list(s: TextStream, opened: bool = False) -> Step[bool]:
    """Read a list of calls to its end. False if one of them is no call; then it becomes text. `opened`: the
    list's bracket was taken already. Malformed if the text is no list."""
    if not opened and not (yield from s.take_literal("[")):
        raise Malformed
    all_calls, char = True, ","
    while char == ",":
        yield from s.skip_space()
        all_calls &= yield from read_call(s)
        char = yield from s.skip_space()
        if char not in (",", "]"):
            raise Malformed if char else StreamCut
        s.take(1)
    if not all_calls:
        s.return_as_text()
    return all_calls


def read_call(s: TextStream) -> Step[bool]:
    """Read one `f(a=1)`. False if the tool is not offered; then the call has become text."""
    name = yield from s.peek_while(lambda char: char.isalnum() or char in "_.-")
    if not name or (yield from s.peek(len(name) + 1))[-1] != "(":
        raise Malformed
    s.take(len(name) + 1)
    if name not in s.tools:
        name = name.removesuffix(".call")  # Llama 3.1 calls its built-in tools so
    call = s.begin_call(name) if name in s.tools else None
    count, end = 0, ","
    while end == ",":
        text, end = yield from _read_argument(s)
        if call is None:
            s.return_as_text()
        elif text.strip():
            if count or end == "," or not _write_object(call, text):
                _write_argument(call, text, count)
            s.commit()
        elif end == ",":
            raise Malformed
        count += 1
    if call is not None:
        call.close()
    return call is not None


def _read_argument(s: TextStream) -> Step[tuple[str, str]]:
    """Read the source of one argument; return it, and the comma or bracket that ended it."""
    parts: list[str] = []
    depth = 0
    while True:
        text, mark = yield from s.read_until(*_STOPS)
        parts.append(text)
        if mark in "\"'":
            parts.append((yield from _read_string(s, mark, depth)))
        elif mark in ",)" and not depth:
            return "".join(parts), mark
        else:
            parts.append(mark)
            depth += (mark in "([{") - (mark in ")]}")
            if depth < 0:
                raise Malformed


def _read_string(s: TextStream, quote: str, depth: int) -> Step[str]:
    """Read the source of a string behind its first quote. Newlines that Python does not allow are escaped; so
    are quotes behind which the call does not go on: models forget to."""
    long = yield from s.take_literal(quote * 2)
    end = quote + long
    parts = [end]
    while True:
        text, mark = yield from s.read_until(end, "\\")
        parts.append(text if long else text.translate(_ESCAPES))
        if mark == end and not long and not (yield from _goes_on(s, depth)):
            parts.append("\\")
        elif mark == end:
            parts.append(mark)
            return "".join(parts)
        parts.append(mark)
        if mark == "\\":
            if not (yield from s.peek()):
                raise StreamCut
            parts.append(s.take(1))


def _goes_on(s: TextStream, depth: int) -> Step[bool]:
    """Whether what follows a quote may follow a string within `depth` brackets. Nothing is taken."""
    size = 1
    while size < MAX_NAME:
        seen = yield from s.peek(size)
        found = (_NEXT_INSIDE if depth else _NEXT).match(seen)
        if found is None:
            return False
        if found["known"] is not None or len(seen) < size:
            return True
        size += 1
    return False


def _write_object(call: ArgumentWriter, text: str) -> bool:
    """Write all arguments, if the only one is a dictionary of them."""
    if not text.lstrip().startswith("{"):
        return False
    members = json.loads(_convert(text.strip(), ValueSchema({})))
    keys = call.schema.keys
    if not isinstance(members, dict) or (keys and not any(key in keys for key in members)):
        return False
    for key, value in members.items():
        call.write_member(key, encode_json(repair_value(value, call.schema.get_member(key))))
    return True


def _write_argument(call: ArgumentWriter, text: str, position: int) -> None:
    """Write an argument from its source; one without a name is named by its position in the schema."""
    named = _NAMED.fullmatch(text)
    keys = call.schema.keys
    if named is None and position >= len(keys):
        raise Malformed
    key = named[1] if named else keys[position]
    source = (named[2] if named else text).strip()
    call.write_member(key, _convert(source, call.schema.get_member(key)))


def _convert(source: str, schema: ValueSchema) -> str:
    """Convert a literal to JSON. A bare word is taken for a string, as models write them."""
    try:
        node = _JsonWords().visit(parse_python(source))
        value = _check_json(ast.literal_eval(node))
        check_depth(value)
        return encode_json(repair_value(value, schema))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        if _BARE.fullmatch(source) is None:
            raise Malformed from None
        return encode_bare_value(source, schema)


class _JsonWords(ast.NodeTransformer):
    """Replaces JSON's words by Python's, and sets by lists."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in _WORDS:
            return node
        return ast.copy_location(ast.Constant(_WORDS[node.id]), node)

    def visit_Set(self, node: ast.Set) -> ast.expr:
        return ast.copy_location(ast.List([self.visit(item) for item in node.elts], ast.Load()), node)


def _check_json(value: Any) -> Any:
    """Return the value with tuples as lists. Raises ValueError if JSON has no such value."""
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _check_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_check_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise ValueError
