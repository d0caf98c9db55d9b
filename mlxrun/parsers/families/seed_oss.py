"""Seed-OSS: the XML of Qwen3-Coder in `<seed:tool_call>...</seed:tool_call>`, one or several functions."""

from __future__ import annotations

from mlxrun.parsers.family import ToolCallFamily
from mlxrun.parsers.readers.xml_call import OPENER, read_function
from mlxrun.parsers.text_stream import Malformed, Step, TextStream

START, END = "<seed:tool_call>", "</seed:tool_call>"


def _read(s: TextStream, opener: str) -> Step[None]:
    """Read one block, or a function whose block's tag was forgotten."""
    if opener == START and not (yield from s.skip(OPENER)):
        raise Malformed
    more = True
    while more:
        yield from read_function(s)
        more = (yield from s.skip(END, OPENER)) == OPENER


FAMILY = ToolCallFamily(
    name="seed_oss",
    detect=lambda template, tokens: START in template or START in tokens,
    openers=(START, OPENER),
    read=_read,
    aliases=("seed",),
    markers=(START, END),
)
