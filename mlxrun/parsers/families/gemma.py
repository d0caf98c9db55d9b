"""Gemma 4: `<|tool_call>call:f{k:<|"|>text<|"|>,n:1}<tool_call|>`; FunctionGemma in tokens of its own.

The arguments are JSON with bare keys and with strings between special tokens, without escapes.
"""

from __future__ import annotations

from typing import NamedTuple

from mlxrun.parsers.argument_writer import ArgumentWriter
from mlxrun.parsers.family import Reader, ToolCallFamily
from mlxrun.parsers.marker_scanner import get_scanner
from mlxrun.parsers.readers.json_text import (
    CLOSERS,
    MAX_DEPTH,
    expect,
    open_container,
    read_string,
    read_value,
)
from mlxrun.parsers.text_stream import Malformed, Step, StreamCut, TextStream
from mlxrun.parsers.tool_schemas import ValueSchema, encode_bare_value, repair_string


class _Tokens(NamedTuple):
    """What begins a call, what ends it, and what stands around strings."""

    start: str
    end: str
    quote: str


_GEMMA4 = _Tokens("<|tool_call>", "<tool_call|>", '<|"|>')
_FUNCTION = _Tokens("<start_function_call>", "<end_function_call>", "<escape>")


def _make_reader(tokens: _Tokens) -> Reader:
    def read(s: TextStream, opener: str) -> Step[None]:
        yield from s.skip("call:")
        name, end = yield from s.read_name("{", "\n", tokens.end)
        if end != "{":
            raise Malformed
        call = s.begin_call(name)
        call.open_container("{")
        yield from _read_members(s, call, call.schema, tokens.quote, "}", MAX_DEPTH)
        call.close()
        yield from s.skip(tokens.end)

    return read


def _read_members(
    s: TextStream, call: ArgumentWriter, schema: ValueSchema, quote: str, closer: str, depth: int
) -> Step[None]:
    """Read all behind the opening bracket of an object or an array, with the closing one."""
    end, inner = ",", schema.get_items()
    while end == ",":
        if (yield from s.skip_space()) == closer:
            s.take(1)
            return
        if closer == "}":
            key = yield from _read_key(s, quote)
            call.write_key(key)
            inner = schema.get_member(key)
        end = yield from _read_value(s, call, inner, quote, depth)
        end = end or (yield from expect(s, "," + closer))
    if end != closer:
        raise Malformed


def _read_key(s: TextStream, quote: str) -> Step[str]:
    """Read a key, bare or as a string, with the colon behind it."""
    mark = yield from s.take_literal(quote, '"')
    if not mark:
        key, end = yield from s.read_name(":", ",", "{", "}", "\n")
        if end != ":" or not key:
            raise Malformed
        return key
    key = (yield from read_string(s)) if mark == '"' else (yield from s.read_name(mark, strip=False))[0]
    yield from expect(s, ":")
    return key


def _read_value(
    s: TextStream, call: ArgumentWriter, schema: ValueSchema, quote: str, depth: int
) -> Step[str]:
    """Read a value into `call`; return the comma or bracket that ended a bare one, else ""."""
    char = yield from s.skip_space()
    if not char:
        raise StreamCut
    end = ""
    if char == '"':
        yield from read_value(s, call, schema)
    elif char in CLOSERS:
        open_container(s, call, depth - 1)
        yield from _read_members(s, call, schema, quote, CLOSERS[char], depth - 1)
        call.close_innermost()
    elif (yield from s.take_literal(quote)):
        yield from _read_text(s, call, schema, quote)
    else:
        text, end = yield from s.read_until(",", "}", "]")
        if not text.strip():
            raise Malformed
        call.write_value(encode_bare_value(text.strip(), schema, guess=True))
    s.commit()
    return end


def _read_text(s: TextStream, call: ArgumentWriter, schema: ValueSchema, quote: str) -> Step[None]:
    """Read a string, behind the token that begins it."""
    if schema.excludes_text:
        text, _ = yield from s.read_until(quote)
        call.write_value(repair_string(text, schema))
    else:
        call.open_string()
        yield from s.stream_string(get_scanner(quote), call.write_text, lambda: call)
        call.close_innermost()


GEMMA4 = ToolCallFamily(
    name="gemma4",
    detect=lambda template, tokens: _GEMMA4.start in template,
    openers=(_GEMMA4.start,),
    read=_make_reader(_GEMMA4),
    ends_reasoning=True,
    aliases=("gemma",),
    markers=_GEMMA4,
)
FUNCTION = ToolCallFamily(
    name="function_gemma",
    detect=lambda template, tokens: _FUNCTION.start in template,
    openers=(_FUNCTION.start,),
    read=_make_reader(_FUNCTION),
    aliases=("functiongemma",),
    markers=_FUNCTION,
)
FAMILIES = (GEMMA4, FUNCTION)
