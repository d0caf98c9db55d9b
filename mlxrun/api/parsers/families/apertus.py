"""Apertus: `<|tools_prefix|>[{"f": {...}}, ...]<|tools_suffix|>`, objects whose key is the tool's name."""

from __future__ import annotations

from mlxrun.api.parsers.family import ToolCallFamily
from mlxrun.api.parsers.readers.json_call import read_arguments, read_block
from mlxrun.api.parsers.readers.json_text import expect, read_key, read_raw_value
from mlxrun.api.parsers.text_stream import Step, TextStream
from mlxrun.api.parsers.tool_schemas import encode_json

_START, _END = "<|tools_prefix|>", "<|tools_suffix|>"


def _read(s: TextStream, opener: str) -> Step[None]:
    yield from read_block(s, _END, read_object=_read_object)


def _read_object(s: TextStream) -> Step[bool]:
    """Read an object behind its brace, of one call or several. False: a tool in it is not offered."""
    if (yield from s.skip_space()) == "}":
        s.take(1)
        return False
    while True:
        name = yield from read_key(s)
        if name not in s.tools:
            yield from read_raw_value(s)
            yield from expect(s, "}")
            return False
        yield from read_arguments(s, s.begin_call(name))
        char = yield from s.skip_space()
        if not char or char not in ",}":
            return True
        s.take(1)
        if char == "}":
            s.commit()
            return True


FAMILY = ToolCallFamily(
    name="apertus",
    detect=lambda template, tokens: _START in template or _START in tokens,
    openers=(_START,),
    read=_read,
    ends=(_END,),
    ends_reasoning=True,
    markers=(_START, _END),
    prefix_suffix=lambda name: (f"{_START}[{{{encode_json(name)}: ", f"}}]{_END}"),
)
