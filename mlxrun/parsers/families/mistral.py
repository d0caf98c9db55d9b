"""Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, since v11 `[TOOL_CALLS]name[ARGS]{...}`.

The new form has one marker a call, and in v13 `[CALL_ID]` and an id behind the name. One reader reads both,
also where `[ARGS]` was dropped as a special token; the two families differ in what a template asks for.
Templates take ids of nine letters and digits only.
"""

from __future__ import annotations

import re

from mlxrun.parsers.argument_writer import quoted
from mlxrun.parsers.family import ToolCallFamily
from mlxrun.parsers.readers.json_call import read_arguments, read_calls
from mlxrun.parsers.text_stream import MAX_NAME, Malformed, Step, StreamCut, TextStream

_START, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_IDS = re.compile(r"[A-Za-z0-9]{9}")


def _short(id: str) -> str:
    return id[-9:]


def _read(s: TextStream, opener: str) -> Step[None]:
    if (yield from s.skip_space()) in ("[", "{"):
        yield from read_calls(s, _IDS)
        return
    name = yield from _name(s)
    if name not in s.tools:
        raise Malformed
    id = ""
    if (yield from s.take_literal(_ID)):
        id, mark = yield from s.read_name(_ARGUMENTS)
        if not mark:
            raise StreamCut
    elif not (yield from s.take_literal(_ARGUMENTS)) and (yield from s.peek()) != "{":
        raise Malformed
    yield from read_arguments(s, s.begin_call(name, id.strip()))


def _name(s: TextStream) -> Step[str]:
    """The characters up to a bracket, which is not taken."""
    count = 1
    while (seen := (yield from s.peek(count)))[-1:] not in ("", "[", "{", "\n") and len(seen) == count:
        count += 1
        if count > MAX_NAME:
            raise Malformed
    if len(seen) < count:
        raise StreamCut
    return s.take(count - 1).strip()


OLD = ToolCallFamily(
    name="mistral_v3",
    detect=lambda template, tokens: _START in template and _ARGUMENTS not in template,
    openers=(_START,),
    read=_read,
    ends_reasoning=True,
    convert_id=_short,
    aliases=("mistral_old", "mixtral"),
    markers=(_START, _ID, _ARGUMENTS),
    prefix_suffix=lambda name: (f'{_START}[{{"name": {quoted(name)}, "arguments": ', "}]"),
)
NEW = ToolCallFamily(
    name="mistral",
    detect=lambda template, tokens: (
        (_START in template and _ARGUMENTS in template) or {_START, _ARGUMENTS} <= tokens
    ),
    openers=(_START,),
    read=_read,
    ends_reasoning=True,
    convert_id=_short,
    aliases=("mistral_v11", "magistral", "devstral"),
    markers=(_START, _ID, _ARGUMENTS),
    prefix_suffix=lambda name: (f"{_START}{name}{_ARGUMENTS}", ""),
)
FAMILIES = (OLD, NEW)
