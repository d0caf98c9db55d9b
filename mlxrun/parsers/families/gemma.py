"""Gemma 4: `<|tool_call>call:f{k:<|"|>text<|"|>,n:1}<tool_call|>`; FunctionGemma in tokens of its own.

It is JSON with bare keys and strings between special tokens, without escapes; it is passed on as it comes.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxrun.parsers.argument_writer import ArgumentWriter, quoted
from mlxrun.parsers.family import Reader, ToolCallFamily
from mlxrun.parsers.marker_scanner import get_scanner
from mlxrun.parsers.readers.json_text import expect, read_string, read_value
from mlxrun.parsers.text_stream import Malformed, Step, StreamCut, TextStream
from mlxrun.parsers.tool_schemas import ValueSchema, repair_string, encode_bare_value

_DEPTH = 64


@dataclass(frozen=True, slots=True)
class _Format:
    """What opens a call, what ends it, and what stands around strings."""

    start: str
    end: str
    quote: str

    @property
    def all(self) -> tuple[str, ...]:
        return (self.start, self.end, self.quote)


_GEMMA4 = _Format("<|tool_call>", "<tool_call|>", '<|"|>')
_FUNCTION = _Format("<start_function_call>", "<end_function_call>", "<escape>")


def _reader(form: _Format) -> Reader:
    def read(s: TextStream, opener: str) -> Step[None]:
        yield from s.skip_space()
        yield from s.take_literal("call:")
        name, end = yield from s.read_name("{", "\n", form.end)
        if not end:
            raise StreamCut
        if end != "{" or name.strip() not in s.tools:
            raise Malformed
        call = s.begin_call(name.strip())
        call.open_container("{")
        yield from _members(s, call, call.schema, form.quote, _DEPTH)
        call.close()
        yield from s.skip_space()
        yield from s.take_literal(form.end)

    return read


def _members(s: TextStream, call: ArgumentWriter, schema: ValueSchema, quote: str, depth: int) -> Step[None]:
    """All behind the opening brace of an object, with the closing one."""
    end = ","
    while end == ",":
        if (yield from s.skip_space()) == "}":
            s.take(1)
            return
        key = yield from _key(s, quote)
        call.write_key(quoted(key))
        end = yield from _value(s, call, schema.get_member(key), quote, depth)
        end = end or (yield from expect(s, ",}"))
    if end != "}":
        raise Malformed


def _items(s: TextStream, call: ArgumentWriter, schema: ValueSchema, quote: str, depth: int) -> Step[None]:
    end = ","
    while end == ",":
        if (yield from s.skip_space()) == "]":
            s.take(1)
            return
        end = yield from _value(s, call, schema, quote, depth)
        end = end or (yield from expect(s, ",]"))
    if end != "]":
        raise Malformed


def _key(s: TextStream, quote: str) -> Step[str]:
    """A key, bare or as a string, with the colon behind it."""
    mark = yield from s.take_literal(quote, '"')
    if mark == '"':
        key = yield from read_string(s)
        yield from expect(s, ":")
        return key
    key, end = yield from s.read_name(*((mark,) if mark else (":", ",", "{", "}", "\n")))
    if not end:
        raise StreamCut
    if mark:
        yield from expect(s, ":")
    elif end != ":" or not key.strip():
        raise Malformed
    return key if mark else key.strip()


def _value(s: TextStream, call: ArgumentWriter, schema: ValueSchema, quote: str, depth: int) -> Step[str]:
    """A value into `call`; what ended it, if that was taken: a bare one goes up to a comma or bracket."""
    char = yield from s.skip_space()
    if not char:
        raise StreamCut
    if char == '"':
        yield from read_value(s, call, schema)
    elif char in "{[":
        if not depth:
            raise Malformed
        s.take(1)
        call.open_container(char)
        if char == "{":
            yield from _members(s, call, schema, quote, depth - 1)
        else:
            yield from _items(s, call, schema.get_items(), quote, depth - 1)
        call.close_innermost()
    elif (yield from s.take_literal(quote)):
        yield from _text(s, call, schema, quote)
    else:
        text, end = yield from s.read_until(",", "}", "]")
        if not end:
            raise StreamCut
        if not text.strip():
            raise Malformed
        call.write_value(encode_bare_value(text.strip(), schema, guess=True))
        s.commit()
        return end
    s.commit()
    return ""


def _text(s: TextStream, call: ArgumentWriter, schema: ValueSchema, quote: str) -> Step[None]:
    """A string, behind what begins it."""
    if schema.excludes_text:
        text, end = yield from s.read_until(quote)
        if end:
            call.write_value(repair_string(text, schema))
    else:
        call.open_string()
        end = yield from s.stream_string(get_scanner(quote), call.write_text, lambda: call)
        if end:
            call.close_innermost()
    if not end:
        raise StreamCut


GEMMA4 = ToolCallFamily(
    name="gemma4",
    detect=lambda template, tokens: _GEMMA4.start in template,
    openers=(_GEMMA4.start,),
    read=_reader(_GEMMA4),
    ends_reasoning=True,
    aliases=("gemma",),
    markers=_GEMMA4.all,
)
FUNCTION = ToolCallFamily(
    name="function_gemma",
    detect=lambda template, tokens: _FUNCTION.start in template,
    openers=(_FUNCTION.start,),
    read=_reader(_FUNCTION),
    aliases=("functiongemma",),
    markers=_FUNCTION.all,
)
FAMILIES = (GEMMA4, FUNCTION)
