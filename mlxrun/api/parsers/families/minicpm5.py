"""MiniCPM5: `<function name="f"><param name="k">v</param></function>`, one element a call.

A value with markup or newlines stands in `<![CDATA[...]]>`, as it is. Elsewhere the five entities of XML
mean their characters. What is no string is written as JSON or as Python. Models also forget the space in a
tag, and write all arguments as one object in a parameter that the tool does not have.
"""

from __future__ import annotations

import json
from xml.sax.saxutils import unescape

from mlxrun.api.parsers.argument_writer import ArgumentWriter
from mlxrun.api.parsers.family import ToolCallFamily
from mlxrun.api.parsers.marker_scanner import get_scanner
from mlxrun.api.parsers.readers.tagged_arguments import is_followed, read_tagged, read_value_text, take_tag
from mlxrun.api.parsers.text_stream import Malformed, Step, StreamCut, TextStream
from mlxrun.api.parsers.tool_schemas import encode_bare_value, encode_json, repair_value
from mlxrun.api.parsers.value_schema import ValueSchema

_OPENERS, _CLOSE = ("<function name=", "<functionname="), "</function>"
_PARAMS, _END = ("<param name=", "<paramname="), "</param>"
_OBJECT_KEYS = ("arguments", "parameters", "properties")
_CDATA = ("<![CDATA[", "\n<![CDATA[")
_NEXT = (*_PARAMS, _CLOSE, *_OPENERS)
_ENDS = {_END: _NEXT}
_CDATA_ENDS = {f"]]>{_END}": _NEXT, f"]]>\n{_END}": _NEXT}
_ENTITIES = {"&lt;": "<", "&gt;": ">", "&amp;": "&", "&quot;": '"', "&apos;": "'"}
_TEXT_ENDS = get_scanner(_END, *_ENTITIES)


def _read(s: TextStream, opener: str) -> Step[None]:
    call = s.begin_call((yield from _read_name(s)))
    first = True
    while (yield from take_tag(s, *_PARAMS, _CLOSE)) != _CLOSE:
        key = yield from _read_name(s)
        if first and key in _OBJECT_KEYS and key not in call.schema.keys:
            _write_object(call, key, (yield from read_value_text(s, _ENDS))[0])
        elif (yield from _take_cdata(s)):
            yield from read_tagged(s, call, key, _CDATA_ENDS, as_json=True)
        else:
            yield from _read_plain(s, call, key)
        first = False
    call.close()


def _read_name(s: TextStream) -> Step[str]:
    """Read the rest of a tag: a name in quotes or without."""
    name, end = yield from s.read_name(">", "\n")
    if end == "\n":
        raise Malformed
    return name.strip("\"'")


def _write_object(call: ArgumentWriter, key: str, text: str) -> None:
    """Write a value that is an object of all arguments, or an argument of this key if it is no object."""
    value = encode_bare_value(_unescape(text), ValueSchema({"type": "object"}))
    members = json.loads(value)
    if not isinstance(members, dict):
        call.write_member(key, value)
        return
    for name, member in members.items():
        call.write_member(name, encode_json(repair_value(member, call.schema.get_member(name))))


def _unescape(text: str) -> str:
    return unescape(text, {"&quot;": '"', "&apos;": "'"})


def _take_cdata(s: TextStream) -> Step[bool]:
    """Take what begins a value with markup, if that comes. Raises StreamCut if the text ends in it."""
    if (yield from s.take_literal(*_CDATA)):
        return True
    if (yield from s.peek()) in ("", "<", "\n"):
        rest = yield from s.peek(max(map(len, _CDATA)))
        if any(start.startswith(rest) for start in _CDATA):
            raise StreamCut
    return False


def _read_plain(s: TextStream, call: ArgumentWriter, key: str) -> Step[None]:
    schema = call.schema.get_member(key)
    if not schema.is_text_only or schema.options:
        text, _ = yield from read_value_text(s, _ENDS)
        call.write_member(key, encode_bare_value(_unescape(text), schema, guess=True))
        return
    call.open_text_member(key)
    while True:
        end = yield from s.stream_string(_TEXT_ENDS, call.write_text, lambda: call)
        if end == _END and (yield from is_followed(s, _NEXT)):
            break
        call.write_text(_ENTITIES.get(end, end))
    call.close_innermost()


FAMILY = ToolCallFamily(
    name="minicpm5",
    detect=lambda template, tokens: _OPENERS[0] in template and _PARAMS[0] in template,
    openers=_OPENERS,
    read=_read,
    ends=(_CLOSE,),
    aliases=("minicpm5_xml",),
)
