"""Calls written as Python: `[f(a=1, b="x"), g()]`, of Llama 3.2 and 4, and of LFM2 between special tokens.

Values are Python's literals or JSON's; they are passed on one by one, when they are whole. Without an opener
a list counts only where the answer begins.
"""

from __future__ import annotations

import ast
import math
import re
from typing import Any

from mlxrun.parsers.argument_writer import ArgumentWriter
from mlxrun.parsers.family import ToolCallFamily
from mlxrun.parsers.readers.json_call import read_calls
from mlxrun.parsers.text_stream import MAX_NAME, Malformed, Step, StreamCut, TextStream
from mlxrun.parsers.tool_schemas import ValueSchema, encode_json, parse_python, repair_value, encode_bare_value

_ENDS = {"<|tool_call_start|>": "<|tool_call_end|>", "<|python_start|>": "<|python_end|>"}
_STOPS = ("(", ")", "[", "]", "{", "}", ",", '"', "'")
_NAMED = re.compile(r"\s*(\w+)\s*=(?!=)(.*)", re.DOTALL)
_BARE = re.compile(r"\w[\w .:/+-]*")
_WORDS = {"true": True, "false": False, "null": None}


def read_list(s: TextStream) -> Step[bool]:
    """All of a list of calls. What is no call is given back as text; False: there was such."""
    if (yield from s.take_literal("[")) != "[":
        raise Malformed
    whole = True
    while True:
        yield from s.skip_space()
        whole &= yield from read_call(s)
        char = yield from s.skip_space()
        if char not in (",", "]"):
            raise Malformed if char else StreamCut
        s.take(1)
        if char == "]":
            break
    if not whole:
        s.return_as_text()
    return whole


def read_call(s: TextStream) -> Step[bool]:
    """One `f(a=1)`. False: the tool is not offered; it is taken, and given back as text."""
    name = yield from _name(s)
    if name not in s.tools and name.removesuffix(".call") in s.tools:
        name = name.removesuffix(".call")  # Llama 3.1 calls its built-in tools so
    s.take(1)
    call = s.begin_call(name) if name in s.tools else None
    count, end = 0, ","
    while end == ",":
        text, end = yield from _argument(s)
        if call is None:
            s.return_as_text()
        elif text.strip():
            _write(call, text, count)
            s.commit()
        elif end == ",":
            raise Malformed
        count += 1
    if call is not None:
        call.close()
    return call is not None


def _name(s: TextStream) -> Step[str]:
    """A name with a bracket behind it, which is not taken."""
    count = 1
    while True:
        seen = yield from s.peek(count)
        if len(seen) < count:
            raise StreamCut
        if not (seen[-1].isalnum() or seen[-1] in "_.-"):
            break
        count += 1
        if count > MAX_NAME:
            raise Malformed
    if seen[-1] != "(" or count == 1:
        raise Malformed
    return s.take(count - 1)


def _argument(s: TextStream) -> Step[tuple[str, str]]:
    """The source of one argument, and the comma or bracket that ended it."""
    parts: list[str] = []
    depth = 0
    while True:
        text, mark = yield from s.read_until(*_STOPS)
        parts.append(text)
        if not mark:
            raise StreamCut
        if mark in "\"'":
            parts.append((yield from _string(s, mark)))
        elif mark in ",)" and not depth:
            return "".join(parts), mark
        else:
            parts.append(mark)
            depth += (mark in "([{") - (mark in ")]}")
            if depth < 0:
                raise Malformed


def _string(s: TextStream, quote: str) -> Step[str]:
    """The source of a string, behind its first quote. Newlines that Python would not allow are escaped."""
    long = yield from s.take_literal(quote * 2)
    end = quote + long
    parts = [end]
    while True:
        text, mark = yield from s.read_until(end, "\\")
        parts.append(text if long else text.replace("\r", "\\r").replace("\n", "\\n"))
        if not mark:
            raise StreamCut
        parts.append(mark)
        if mark == end:
            return "".join(parts)
        if not (yield from s.peek()):
            raise StreamCut
        parts.append(s.take(1))


def _write(call: ArgumentWriter, text: str, position: int) -> None:
    """An argument from its source; one without a name goes by its position in the schema."""
    named = _NAMED.fullmatch(text)
    keys = call.schema.keys
    if named is None and position >= len(keys):
        raise Malformed
    key = named[1] if named else keys[position]
    schema = call.schema.get_member(key)
    source = (named[2] if named else text).strip()
    call.write_member(key, _json(source, schema))


def _json(source: str, schema: ValueSchema) -> str:
    """JSON of a literal. A bare word is a string, as models write them."""
    try:
        node = _Words().visit(parse_python(source))
        value = _plain(ast.literal_eval(node))
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        if _BARE.fullmatch(source) is None:
            raise Malformed from None
        return encode_bare_value(source, schema)
    return encode_json(repair_value(value, schema))


class _Words(ast.NodeTransformer):
    """Takes JSON's words for Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in _WORDS:
            return node
        return ast.copy_location(ast.Constant(_WORDS[node.id]), node)


def _plain(value: Any) -> Any:
    """A value that JSON has. Raises ValueError for others."""
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise ValueError


def _start(s: TextStream, opener: str) -> Step[None]:
    if (yield from s.skip_space()) != "[":
        raise Malformed
    yield from read_list(s)


def _read(s: TextStream, opener: str) -> Step[None]:
    yield from s.skip_space()
    seen = yield from s.peek(2)
    if (yield from (read_calls(s) if "{" in seen else read_list(s))):
        yield from s.skip_space()
        yield from s.take_literal(_ENDS[opener])


def _detect(template: str, tokens: frozenset[str]) -> bool:
    lfm = "<|tool_list_start|>" in template or "<|tool_call_start|>" in template
    return lfm or "<|tool_call_start|>" in tokens or "[func_name1(" in template


FAMILY = ToolCallFamily(
    name="pythonic",
    detect=_detect,
    openers=tuple(_ENDS),
    read=_read,
    read_start=_start,
    aliases=("llama3_2_pythonic", "llama4_pythonic", "lfm2"),
    markers=(*_ENDS, *_ENDS.values()),
)
