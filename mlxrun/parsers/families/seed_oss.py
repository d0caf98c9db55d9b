"""Seed-OSS: the XML of Qwen3-Coder in `<seed:tool_call>...</seed:tool_call>`, one or several functions."""

from __future__ import annotations

from mlxrun.parsers.family import ToolCallFamily
from mlxrun.parsers.readers.xml_call import OPENER, read_function
from mlxrun.parsers.text_stream import Malformed, Step, TextStream

START, END = "<seed:tool_call>", "</seed:tool_call>"


def read(s: TextStream, opener: str) -> Step[None]:
    """One block, or a function whose block's tag was forgotten."""
    if opener == START:
        yield from s.skip_space()
        if not (yield from s.take_literal(OPENER)):
            raise Malformed
    yield from read_function(s)
    while (yield from s.skip_space()) == "<":
        if (yield from s.take_literal(END, OPENER)) != OPENER:
            return
        yield from read_function(s)


FAMILY = ToolCallFamily(
    name="seed_oss",
    detect=lambda template, tokens: START in template or START in tokens,
    openers=(START, OPENER),
    read=read,
    aliases=("seed",),
    markers=(START, END),
)
