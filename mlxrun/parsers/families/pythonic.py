"""Calls written as Python: `[f(a=1, b="x"), g()]`, of Llama 3.2 and 4, and of LFM2 between special tokens.

Values are Python's literals or JSON's; they are passed on one by one, when they are complete. Without an
opener a list counts only where the answer begins.
"""

from __future__ import annotations

import ast
import math
import re
from typing import Any

from mlxrun.parsers.argument_writer import ArgumentWriter
from mlxrun.parsers.family import ToolCallFamily
from mlxrun.parsers.readers.json_call import read_calls
from mlxrun.parsers.text_stream import Malformed, Step, StreamCut, TextStream
from mlxrun.parsers.tool_schemas import (
    ValueSchema,
    encode_bare_value,
    encode_json,
    parse_python,
    repair_value,
)

_ENDS = {"<|tool_call_start|>": "<|tool_call_end|>", "<|python_start|>": "<|python_end|>"}
_STOPS = ("(", ")", "[", "]", "{", "}", ",", '"', "'")
_NAMED = re.compile(r"\s*(\w+)\s*=(?!=)(.*)", re.DOTALL)
_BARE = re.compile(r"\w[\w .:/+-]*")
_WORDS = {"true": True, "false": False, "null": None}


def read_list(s: TextStream) -> Step[bool]:
    """Read a list of calls to its end. What is no call becomes text; False: there was such."""
    if (yield from s.take_literal("[")) != "[":
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
    """Read one `f(a=1)`. False: the tool is not offered, and what was taken has become text."""
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
            parts.append((yield from _read_string(s, mark)))
        elif mark in ",)" and not depth:
            return "".join(parts), mark
        else:
            parts.append(mark)
            depth += (mark in "([{") - (mark in ")]}")
            if depth < 0:
                raise Malformed


def _read_string(s: TextStream, quote: str) -> Step[str]:
    """Read the source of a string behind its first quote. Newlines that Python does not allow are escaped."""
    long = yield from s.take_literal(quote * 2)
    end = quote + long
    parts = [end]
    while True:
        text, mark = yield from s.read_until(end, "\\")
        parts += [text if long else text.replace("\r", "\\r").replace("\n", "\\n"), mark]
        if mark == end:
            return "".join(parts)
        if not (yield from s.peek()):
            raise StreamCut
        parts.append(s.take(1))


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
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        if _BARE.fullmatch(source) is None:
            raise Malformed from None
        return encode_bare_value(source, schema)
    return encode_json(repair_value(value, schema))


class _JsonWords(ast.NodeTransformer):
    """Replaces JSON's words by Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in _WORDS:
            return node
        return ast.copy_location(ast.Constant(_WORDS[node.id]), node)


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


def _read_start(s: TextStream, opener: str) -> Step[None]:
    if (yield from s.skip_space()) != "[":
        raise Malformed
    yield from read_list(s)


def _read(s: TextStream, opener: str) -> Step[None]:
    yield from s.skip_space()
    seen = yield from s.peek(2)
    if (yield from (read_calls(s) if "{" in seen else read_list(s))):
        yield from s.skip(_ENDS[opener])


def _detect(template: str, tokens: frozenset[str]) -> bool:
    lfm = "<|tool_list_start|>" in template or "<|tool_call_start|>" in template
    return lfm or "<|tool_call_start|>" in tokens or "[func_name1(" in template


FAMILY = ToolCallFamily(
    name="pythonic",
    detect=_detect,
    openers=tuple(_ENDS),
    read=_read,
    read_start=_read_start,
    aliases=("llama3_2_pythonic", "llama4_pythonic", "lfm2"),
    markers=(*_ENDS, *_ENDS.values()),
)
