"""Calls in the XML of Qwen3-Coder: `<function=name><parameter=key>value</parameter>...</function>`.

A value ends at `</parameter>`; where a model forgets that, at the layout that can follow only behind one.
"""

from __future__ import annotations

from mlxrun.parsers.marker_scanner import get_scanner
from mlxrun.parsers.readers.tagged_arguments import read_tagged
from mlxrun.parsers.text_stream import Malformed, Step, StreamCut, TextStream

OPENER = "<function="
_PARAMETER, _CLOSE = "<parameter=", "</function>"
_ENDS = get_scanner("</parameter>", "\n" + _PARAMETER, "\n" + _CLOSE)


def read_function(s: TextStream) -> Step[None]:
    """A call behind `<function=`, with its end tag. Raises Malformed if the tool is not offered."""
    name = yield from _tag(s)
    if name not in s.tools:
        raise Malformed
    call = s.begin_call(name)
    tag = yield from _next(s)
    while tag == _PARAMETER:
        key = yield from _tag(s)
        end = (yield from read_tagged(s, call, key, _ENDS)).strip()
        tag = end if end in (_PARAMETER, _CLOSE) else (yield from _next(s))
    call.close()


def _next(s: TextStream) -> Step[str]:
    if not (yield from s.skip_space()):
        raise StreamCut
    tag = yield from s.take_literal(_PARAMETER, _CLOSE)
    if not tag:
        rest = yield from s.peek(len(_PARAMETER))
        raise StreamCut if _PARAMETER.startswith(rest) or _CLOSE.startswith(rest) else Malformed
    return tag


def _tag(s: TextStream) -> Step[str]:
    """The rest of a tag: a name and `>`, which some models forget at a line's end."""
    name, end = yield from s.read_name(">", "\n", "<")
    if not end:
        raise StreamCut
    if end == "<" or not name.strip():
        raise Malformed
    return name.strip().strip("\"'")
