"""Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, since v11 `[TOOL_CALLS]name[ARGS]{...}`.

The new format has one marker a call, and in v13 `[CALL_ID]` and an id behind the name. One reader reads both,
also where `[ARGS]` was dropped as a special token; the two families differ in what a template asks for.
Templates accept ids of nine letters and digits only.
"""

from __future__ import annotations

import re

from mlxrun.parsers.family import ToolCallFamily
from mlxrun.parsers.readers.json_call import make_prefix_suffix, read_arguments, read_calls
from mlxrun.parsers.text_stream import Malformed, Step, TextStream

_START, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_IDS = re.compile(r"[A-Za-z0-9]{9}")


def _shorten_id(id: str) -> str:
    return id[-9:]


def _read(s: TextStream, opener: str) -> Step[None]:
    if (yield from s.skip_space()) in ("[", "{"):
        yield from read_calls(s, _IDS)
        return
    head = yield from s.peek_while(lambda char: char not in "[{\n")
    name, id = s.take(len(head)).strip(), ""
    if name not in s.tools:
        raise Malformed
    if (yield from s.take_literal(_ID)):
        id, _ = yield from s.read_name(_ARGUMENTS)
    elif not (yield from s.take_literal(_ARGUMENTS)) and (yield from s.peek()) != "{":
        raise Malformed
    yield from read_arguments(s, s.begin_call(name, id))


OLD = ToolCallFamily(
    name="mistral_v3",
    detect=lambda template, tokens: _START in template and _ARGUMENTS not in template,
    openers=(_START,),
    read=_read,
    ends_reasoning=True,
    convert_id=_shorten_id,
    aliases=("mistral_old", "mixtral"),
    markers=(_START, _ID, _ARGUMENTS),
    prefix_suffix=make_prefix_suffix(f"{_START}[", "]"),
)
NEW = ToolCallFamily(
    name="mistral",
    detect=lambda template, tokens: (
        (_START in template and _ARGUMENTS in template) or {_START, _ARGUMENTS} <= tokens
    ),
    openers=(_START,),
    read=_read,
    ends_reasoning=True,
    convert_id=_shorten_id,
    aliases=("mistral_v11", "magistral", "devstral"),
    markers=(_START, _ID, _ARGUMENTS),
    prefix_suffix=lambda name: (f"{_START}{name}{_ARGUMENTS}", ""),
)
FAMILIES = (OLD, NEW)
