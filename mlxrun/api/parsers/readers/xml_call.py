"""Calls in the XML of Qwen3-Coder: `<function=name><parameter=key>value</parameter>...</function>`.

A value ends at `</parameter>`; where a model forgets that, at the layout that can only follow one. Instead of
parameters a function may hold its arguments as JSON.
"""

from __future__ import annotations

from mlxrun.api.parsers.readers.json_call import read_arguments
from mlxrun.api.parsers.readers.tagged_arguments import read_tagged, take_tag
from mlxrun.api.parsers.text_stream import Malformed, Step, TextStream

OPENER = "<function="
_PARAMETER, _CLOSE = "<parameter=", "</function>"
_BLOCK_ENDS = ("</tool_call>", "</seed:tool_call>")
_NEXT = (OPENER, *_BLOCK_ENDS, "<tool_call>", "<seed:tool_call>")
_ENDS = {"</parameter>": (_PARAMETER, _CLOSE, *_NEXT), "\n" + _PARAMETER: (), "\n" + _CLOSE: _NEXT}


def read_function(s: TextStream) -> Step[None]:
    """Read a call behind `<function=`, with its end tag. Raises Malformed if the tool is not offered."""
    call = s.begin_call((yield from _read_name(s)))
    if (yield from s.skip_space()) == "{":
        yield from read_arguments(s, call)
        yield from s.skip(_CLOSE)
        return
    tag = yield from take_tag(s, _PARAMETER, _CLOSE)
    while tag == _PARAMETER:
        key = yield from _read_name(s)
        end = (yield from read_tagged(s, call, key, _ENDS)).strip()
        tag = (
            end if end in (_PARAMETER, _CLOSE) else (yield from take_tag(s, _PARAMETER, _CLOSE, *_BLOCK_ENDS))
        )
    call.close()


def _read_name(s: TextStream) -> Step[str]:
    """Read the rest of a tag: a name and `>`, which some models forget at a line's end."""
    name, end = yield from s.read_name(">", "\n", "<")
    if end == "<" or not name:
        raise Malformed
    return name.strip("\"'")
