"""Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, since v11 `[TOOL_CALLS]name[ARGS]{...}`.

The new format has one marker a call, and in v13 `[CALL_ID]` and an id behind the name. One reader reads both,
also where `[ARGS]` was dropped as a special token, or no arguments were written; the two families differ in
what a template asks for.
Templates accept ids of nine letters and digits only.
"""

from __future__ import annotations

import dataclasses
import re

from mlxrun.api.parsers.family import ToolCallFamily
from mlxrun.api.parsers.readers.json_call import make_prefix_suffix, read_arguments, read_calls
from mlxrun.api.parsers.text_stream import Malformed, Step, StreamCut, TextStream

_START, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_IDS = re.compile(r"[A-Za-z0-9]{9}")


def _shorten_id(id: str) -> str:
    return id[-9:]


def _read(s: TextStream, opener: str) -> Step[None]:
    yield from s.skip_all(opener)
    if (yield from s.skip_space()) in ("[", "{"):
        yield from read_calls(s, _IDS)
        return
    head = yield from s.peek_while(lambda char: char not in "[{\n", required=False)
    name, id = s.take(len(head)).strip(), ""
    if name not in s.tools:
        raise Malformed
    marker = yield from s.take_literal(_ID, _ARGUMENTS)
    if marker == _ID:
        id, marker = yield from s.read_name(_ARGUMENTS)
    call = s.begin_call(name, id)
    following = yield from s.skip_space()
    if following == "{" or (marker and following == '"'):
        yield from read_arguments(s, call)
    elif (yield from s.peek(len(opener))) == opener or not (following or call.schema.keys):
        call.close()  # without arguments
    else:
        raise Malformed if following else StreamCut


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
NEW = dataclasses.replace(
    OLD,
    name="mistral",
    detect=lambda template, tokens: (
        (_START in template and _ARGUMENTS in template) or {_START, _ARGUMENTS} <= tokens
    ),
    aliases=("mistral_v11", "magistral", "devstral"),
    prefix_suffix=lambda name: (f"{_START}{name}{_ARGUMENTS}", ""),
)
FAMILIES = (OLD, NEW)
