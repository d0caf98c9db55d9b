"""Kimi K2: `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`.

The calls stand in a section, whose markers are dropped wherever they stand. The text that names a call is
its id too: the template shows ids to the model, which learned them in this form.
"""

from __future__ import annotations

import re

from mlxrun.parsers.family import ToolCallFamily
from mlxrun.parsers.readers.json_call import read_arguments
from mlxrun.parsers.text_stream import Malformed, Step, StreamCut, TextStream

_BEGIN, _ARGUMENTS, _END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_SECTIONS = tuple(
    f"<|tool_{calls}_section_{end}|>" for calls in ("calls", "call") for end in ("begin", "end")
)
_ID = re.compile(r"(?:functions[.]?)?(.+?)(?::?\d+)?")


def _read(s: TextStream, opener: str) -> Step[None]:
    head, mark = yield from s.read_name(_ARGUMENTS, _BEGIN, _END, *_SECTIONS)
    if not mark:
        raise StreamCut
    if mark != _ARGUMENTS:
        raise Malformed
    id = head.strip()
    name = _name(id, s)
    if (yield from s.skip_space()) == "<" and (yield from s.take_literal(_END)):
        s.begin_call(name, id).close()
        return
    yield from read_arguments(s, s.begin_call(name, id))
    yield from s.skip_space()
    yield from s.take_literal(_END)


def _name(id: str, s: TextStream) -> str:
    """The tool that an id names, also where its point or colon is missing. Malformed if none is offered."""
    plain = id.removeprefix("functions.")
    match = _ID.fullmatch(id)
    for name in (plain.rpartition(":")[0], plain, match[1] if match else ""):
        if name in s.tools:
            return name
    raise Malformed


def _frame(name: str) -> tuple[str, str]:
    begin, end = _SECTIONS[:2]
    return f"{begin}{_BEGIN}functions.{name}:0{_ARGUMENTS}", f"{_END}{end}"


FAMILY = ToolCallFamily(
    name="kimi_k2",
    detect=lambda template, tokens: _SECTIONS[0] in template or _SECTIONS[0] in tokens,
    openers=(_BEGIN,),
    read=_read,
    aliases=("kimi",),
    markers=(_BEGIN, _ARGUMENTS, _END, *_SECTIONS),
    ignored=_SECTIONS,
    ends_reasoning=True,
    prefix_suffix=_frame,
)
