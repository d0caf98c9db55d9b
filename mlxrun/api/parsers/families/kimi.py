"""Kimi K2: `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`.

The calls stand in a section, whose markers are ignored wherever they stand. The text that names a call is its
id too: the template shows ids to the model, which learned them in this form.
"""

from __future__ import annotations

import re

from mlxrun.api.parsers.family import ToolCallFamily
from mlxrun.api.parsers.readers.json_call import read_arguments
from mlxrun.api.parsers.text_stream import Malformed, Step, TextStream
from mlxrun.api.parsers.tool_schemas import ToolSchemas

_BEGIN, _ARGUMENTS, _END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_SECTIONS = tuple(
    f"<|tool_{calls}_section_{end}|>" for calls in ("calls", "call") for end in ("begin", "end")
)
_ID = re.compile(r"(?:functions[.]?)?(.+?)(?::?\d+)?")


def _read(s: TextStream, opener: str) -> Step[None]:
    id, marker = yield from s.read_name(_ARGUMENTS, _BEGIN, _END, *_SECTIONS)
    if marker != _ARGUMENTS:
        raise Malformed
    call = s.begin_call(_find_name(id, s.tools), id)
    if (yield from s.skip(_END)):
        call.close()
        return
    yield from read_arguments(s, call)
    yield from s.skip(_END)


def _find_name(id: str, tools: ToolSchemas) -> str:
    """Find the tool that an id names, also where its point or colon is missing; "" if none is offered."""
    plain = id.removeprefix("functions.")
    match = _ID.fullmatch(id)
    names = (plain.rpartition(":")[0], plain, match[1] if match else "")
    return next((name for name in names if name in tools), "")


FAMILY = ToolCallFamily(
    name="kimi_k2",
    detect=lambda template, tokens: _SECTIONS[0] in template or _SECTIONS[0] in tokens,
    openers=(_BEGIN,),
    read=_read,
    aliases=("kimi",),
    markers=(_BEGIN, _ARGUMENTS, _END, *_SECTIONS),
    ignored=_SECTIONS,
    ends=(_END,),
    ends_reasoning=True,
    prefix_suffix=lambda name: (
        f"{_SECTIONS[0]}{_BEGIN}functions.{name}:0{_ARGUMENTS}",
        f"{_END}{_SECTIONS[1]}",
    ),
)
