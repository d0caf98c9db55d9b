"""Granite 3 and 4: `<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`; 20b's `<function_call> {...}`.

Granite 3.1 writes `<tool_call>` as plain text. Granite 4 writes Hermes' tags around one object a call; they
are read too.
"""

from __future__ import annotations

from mlxrun.api.parsers.family import ToolCallFamily
from mlxrun.api.parsers.readers.bare_call import BARE, read_bare
from mlxrun.api.parsers.readers.json_call import make_prefix_suffix, read_block
from mlxrun.api.parsers.text_stream import Step, TextStream

_START, _PLAIN, _OLD = "<|tool_call|>", "<tool_call>", "<function_call>"
_ENDS = {_START: "<|/tool_call|>", _PLAIN: "</tool_call>", _OLD: "</function_call>"}


def _read(s: TextStream, opener: str) -> Step[None]:
    yield from s.skip_all(opener)
    if s.out.at_line_start and (yield from s.take_literal(_ENDS[opener])):
        s.drop()
    else:
        yield from read_block(s, _ENDS[opener])


def _detect(template: str, tokens: frozenset[str]) -> bool:
    granite_3 = "<|start_of_role|>" in template and _START in template
    return granite_3 or "<|function_call_library|>" in template or _OLD in template


FAMILY = ToolCallFamily(
    name="granite",
    detect=_detect,
    openers=(_START, _PLAIN, _OLD),
    read=_read,
    bare=BARE,
    read_bare=read_bare,
    ends=tuple(_ENDS.values()),
    aliases=("granite_20b_fc",),
    markers=(_START, _PLAIN, "</tool_call>", _OLD),
    prefix_suffix=make_prefix_suffix(f"{_START}[", "]"),
)
