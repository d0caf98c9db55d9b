"""Gemma 4: `<|tool_call>call:f{k:<|"|>text<|"|>,n:1}<tool_call|>`; FunctionGemma in tokens of its own.

The arguments are JSON with bare keys and with strings between special tokens, without escapes. Models also
write several calls in one block, parentheses in place of braces, `k="v"`, and single quotes. They forget a
call's token, and write Python in a fence of `tool_code`.
"""

from __future__ import annotations

from typing import NamedTuple

from mlxrun.api.parsers.argument_writer import ArgumentWriter
from mlxrun.api.parsers.family import Reader, ToolCallFamily, in_template
from mlxrun.api.parsers.readers.json_call import read_arguments
from mlxrun.api.parsers.readers.json_text import (
    CLOSERS,
    MAX_DEPTH,
    expect,
    open_container,
    read_string,
    read_value,
)
from mlxrun.api.parsers.readers.python_call import read_call, read_list
from mlxrun.api.parsers.readers.tagged_arguments import is_followed
from mlxrun.api.parsers.text_buffer import get_scanner
from mlxrun.api.parsers.text_stream import Malformed, Step, StreamCut, TextStream
from mlxrun.api.parsers.tool_schemas import ValueSchema, encode_bare_value, repair_string


class _Tokens(NamedTuple):
    """What begins a call, what ends it, and what stands around strings."""

    start: str
    end: str
    quote: str


_FENCE = "```"
_CODE = _FENCE + "tool_code"
_MORE = tuple(f"{separator}call:" for separator in ("", ",", ", ", ",\n", ";", "; ", ";\n"))
_BRACKETS = ",}])"  # what may follow a string
_GEMMA4 = _Tokens("<|tool_call>", "<tool_call|>", '<|"|>')
_FUNCTION = _Tokens("<start_function_call>", "<end_function_call>", "<escape>")


def _make_reader(tokens: _Tokens) -> Reader:
    def read(s: TextStream, opener: str) -> Step[None]:
        yield from s.skip_all(opener)
        yield from s.skip("call:", ":call:", ":")
        yield from _read_calls(s, tokens)

    return read


def _read_calls(s: TextStream, tokens: _Tokens, name: str = "") -> Step[None]:
    """Read one call or several, the first from its name on, or behind the brace if its `name` was read."""
    more, end = "call:", "{"
    while more:
        if not name:
            name, end = yield from s.read_name("{", "(", "\n", tokens.end)
        if end == "\n":
            raise Malformed
        call, name = s.begin_call(name), ""
        if end == tokens.end:
            call.close()
            return
        yield from _read_arguments(s, call, tokens.quote, ")" if end == "(" else "}")
        more = yield from s.skip(*_MORE)
    yield from s.skip(tokens.end)


def _read_arguments(s: TextStream, call: ArgumentWriter, quote: str, closer: str) -> Step[None]:
    """Read the arguments behind their bracket. Within parentheses they may be one object of JSON."""
    if closer == ")" and (yield from s.skip_space()) == "{":
        yield from read_arguments(s, call)
        yield from expect(s, ")")
        return
    call.open_container("{")
    yield from _read_members(s, call, call.schema, quote, closer, MAX_DEPTH)
    call.close()


def _read_bare(s: TextStream, opener: str) -> Step[None]:
    """Read calls whose token is missing: behind "call:", or as Python in a code fence."""
    if opener == _CODE:
        yield from _read_code(s)
    else:
        yield from _read_calls(s, _GEMMA4)


def _read_start(s: TextStream, opener: str) -> Step[None]:
    """Read calls whose token is missing where text begins; there "call:" may be missing too."""
    begun = yield from s.skip("call:", *(name + "{" for name in s.tools.names))
    if not begun:
        raise Malformed
    yield from _read_calls(s, _GEMMA4, begun.removesuffix("{").removeprefix("call:"))


def _read_code(s: TextStream) -> Step[None]:
    """Read calls in a code fence, one a line or in a list, each printed or not."""
    if (yield from s.skip_space()) == "[":
        if (yield from read_list(s)):
            yield from s.skip(_FENCE)
        return
    while (yield from s.skip_space()) and not (yield from s.take_literal(_FENCE)):
        printed = yield from s.take_literal("print(")
        if not (yield from read_call(s)):
            return
        if printed:
            yield from s.skip(")")


def _read_members(
    s: TextStream, call: ArgumentWriter, schema: ValueSchema, quote: str, closer: str, depth: int
) -> Step[None]:
    """Read all behind the opening bracket of an object or an array, with the closing one."""
    end, inner = ",", schema.get_items()
    while end == ",":
        if (yield from s.skip_space()) == closer:
            s.take(1)
            return
        if closer != "]":
            key = yield from _read_key(s, quote)
            call.write_key(key)
            inner = schema.get_member(key)
        end = yield from _read_value(s, call, inner, quote, closer, depth)
        end = end or (yield from expect(s, "," + closer))
    if end != closer:
        raise Malformed


def _read_key(s: TextStream, quote: str) -> Step[str]:
    """Read a key, bare or as a string, with the colon or equals sign behind it."""
    mark = yield from s.take_literal(quote, '"', "'")
    if not mark:
        key, end = yield from s.read_name(":", "=", ",", "{", "}", "(", ")", "\n")
        if end not in (":", "=") or not key:
            raise Malformed
        return key
    key = (yield from read_string(s)) if mark == '"' else (yield from s.read_name(mark, strip=False))[0]
    yield from expect(s, ":=")
    return key


def _read_value(
    s: TextStream, call: ArgumentWriter, schema: ValueSchema, quote: str, closer: str, depth: int
) -> Step[str]:
    """Read a value into `call`; return the comma or bracket that ended a bare one, else ""."""
    char = yield from s.skip_space()
    if not char:
        raise StreamCut
    end = ""
    if char == '"':
        yield from read_value(s, call, schema)
    elif char == "'":
        s.take(1)
        call.write_value(repair_string((yield from _read_single_quoted(s)), schema))
    elif char in CLOSERS:
        open_container(s, call, depth - 1)
        yield from _read_members(s, call, schema, quote, CLOSERS[char], depth - 1)
        call.close_innermost()
    elif (yield from s.take_literal(quote)):
        yield from _read_text(s, call, schema, quote)
    else:
        text, end = yield from s.read_until(",", "}", "]", quote, *((")",) if closer == ")" else ()))
        if not text.strip():
            raise Malformed
        if end == quote:  # the one before the string is missing
            call.write_value(repair_string(text, schema))
            end = ""
        else:
            call.write_value(encode_bare_value(text.strip(), schema, guess=True))
    s.commit()
    return end


def _read_single_quoted(s: TextStream) -> Step[str]:
    """Read a string behind its quote. A quote behind which no value ends belongs to the text."""
    parts: list[str] = []
    while True:
        text, mark = yield from s.read_until("'", "\\")
        parts.append(text)
        if mark == "'" and (yield from is_followed(s, tuple(_BRACKETS))):
            return "".join(parts)
        escaped = (yield from s.peek()) if mark == "\\" else ""
        if escaped and escaped in "'\"\\":
            mark = s.take(1)
        parts.append(mark)


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
    aliases=("gemma",),
    detect=in_template(_GEMMA4.start),
    openers=(_GEMMA4.start, "<call>"),
    read=_make_reader(_GEMMA4),
    read_start=_read_start,
    bare=("\ncall:", _CODE),
    read_bare=_read_bare,
    ends=(_GEMMA4.end, "<turn|>"),
    ends_reasoning=True,
    markers=_GEMMA4,
)
FUNCTION_GEMMA = ToolCallFamily(
    name="function_gemma",
    aliases=("functiongemma",),
    detect=in_template(_FUNCTION.start),
    openers=(_FUNCTION.start,),
    read=_make_reader(_FUNCTION),
    ends=(_FUNCTION.end,),
    markers=_FUNCTION,
)
