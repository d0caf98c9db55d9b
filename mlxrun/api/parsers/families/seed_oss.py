"""Seed-OSS: the XML of Qwen3-Coder in `<seed:tool_call>...</seed:tool_call>`, one or several functions."""

from __future__ import annotations

from mlxrun.api.parsers.family import ToolCallFamily
from mlxrun.api.parsers.readers.bare_call import BARE, read_bare
from mlxrun.api.parsers.readers.json_call import read_block
from mlxrun.api.parsers.readers.tagged_arguments import OPENER, read_function
from mlxrun.api.parsers.text_stream import Step, TextStream

START, END = "<seed:tool_call>", "</seed:tool_call>"


def _read(s: TextStream, opener: str) -> Step[None]:
    """Read one block, or a call whose block's tag was forgotten."""
    if opener == START and not (yield from _read_block_start(s)):
        return
    more = True
    while more:
        yield from read_function(s)
        more = (yield from s.skip(END, OPENER)) == OPENER


def _read_block_start(s: TextStream) -> Step[bool]:
    """Read up to the first function of a block. False: the block holds JSON, or nothing, and was read."""
    yield from s.skip_all(START)
    if (yield from s.skip(OPENER)):
        return True
    if s.out.at_line_start and (yield from s.take_literal(END)):
        s.drop()
    else:
        yield from read_block(s, END)
    return False


FAMILY = ToolCallFamily(
    name="seed_oss",
    detect=lambda template, tokens: START in template or START in tokens,
    openers=(START, OPENER),
    read=_read,
    bare=BARE,
    read_bare=read_bare,
    ends=(END, "</function>"),
    aliases=("seed",),
    markers=(START, END),
)
