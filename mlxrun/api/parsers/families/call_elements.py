"""Families whose calls are elements of their own markup, with an element for each argument.

Kimi K3: `<|open|>call tool="f" index="1"<|sep|>`, and in it
`<|open|>argument key="k" type="string"<|sep|>v<|close|>argument<|sep|>`. A value that is no string is JSON.
`<|open|>json type="object"<|sep|>{...}<|close|>json<|sep|>` holds all arguments instead. Calls stand in the
channel `tools`, content in the channel `response`; their tags are ignored wherever they stand. The format is
that of `encoding_k3.py`, which comes with the model.

MiniMax M3: `]<]minimax[>[<invoke name="f">]<]minimax[>[<k>v]<]minimax[>[</k>]<]minimax[>[</invoke>`. A token
stands before every tag. Each argument is an element of its own name. Arrays hold `<item>` elements, and
objects an element for each member. A member that is repeated is an array. The schema gives the types of
values. Each invocation is one call; the tags around them are ignored wherever they stand.

MiniCPM5: `<function name="f"><param name="k">v</param></function>`, one element a call. A value with markup
or newlines stands unchanged in `<![CDATA[...]]>`. Elsewhere the five entities of XML mean their characters.
Values that are no strings are JSON or Python. Models also forget the space in a tag, and write all arguments
as one object in a parameter that the tool does not have.
"""

from __future__ import annotations

import json
import re
from xml.sax.saxutils import unescape

from mlxrun.api.parsers.argument_writer import ArgumentWriter
from mlxrun.api.parsers.family import ToolCallFamily, any_of, in_template, in_tokens, is_shown
from mlxrun.api.parsers.readers.json_call import read_arguments
from mlxrun.api.parsers.readers.json_text import MAX_DEPTH
from mlxrun.api.parsers.readers.tagged_arguments import (
    TEXT,
    is_followed,
    read_tagged,
    read_value_text,
    take_tag,
)
from mlxrun.api.parsers.text_buffer import get_scanner
from mlxrun.api.parsers.text_stream import Malformed, Step, StreamCut, TextStream
from mlxrun.api.parsers.tool_schemas import ValueSchema, encode_bare_value, encode_json, repair_value

# -- Kimi K3 ----------------------------------------------------------------------------------------

_OPEN, _CLOSE, _SEP = "<|open|>", "<|close|>", "<|sep|>"
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
_CALL, _CALL_END = f"{_OPEN}call ", f"{_CLOSE}call{_SEP}"
_ARGUMENT, _ARGUMENT_END = f"{_OPEN}argument ", f"{_CLOSE}argument{_SEP}"
_JSON, _JSON_END = f"{_OPEN}json ", f"{_CLOSE}json{_SEP}"
_TOOLS, _TOOLS_END = f"{_OPEN}tools{_SEP}", f"{_CLOSE}tools{_SEP}"
_RESPONSE, _RESPONSE_END = f"{_OPEN}response{_SEP}", f"{_CLOSE}response{_SEP}"
KIMI_K3_CONTENT = (_RESPONSE, _RESPONSE_END, f"{_CLOSE}message{_SEP}", "<|end_of_msg|>")
_ARGUMENT_ENDS = {_ARGUMENT_END: (_ARGUMENT, _CALL_END, _TOOLS_END)}
KIMI_K3_MARKERS = (_OPEN, _CLOSE, _SEP, "<|end_of_msg|>")


def _read_kimi_k3(s: TextStream, opener: str) -> Step[None]:
    call = s.begin_call((yield from _read_attributes(s)).get("tool", ""))
    tag = yield from take_tag(s, _ARGUMENT, _JSON, _CALL_END)
    if tag == _JSON:
        yield from _read_attributes(s)
        yield from read_arguments(s, call)
        yield from s.skip(_JSON_END)
        yield from s.skip(_CALL_END)
        return
    while tag == _ARGUMENT:
        attributes = yield from _read_attributes(s)
        if "key" not in attributes:
            raise Malformed
        schema = call.schema.get_member(attributes["key"])
        if attributes.get("type", "string") == "string" and not schema.excludes_text:
            schema = TEXT
        yield from read_tagged(s, call, attributes["key"], _ARGUMENT_ENDS, as_json=True, schema=schema)
        tag = yield from take_tag(s, _ARGUMENT, _CALL_END)
    call.close()


def _read_attributes(s: TextStream) -> Step[dict[str, str]]:
    """Read the rest of an opening tag."""
    text, _ = yield from s.read_name(_SEP, "\n")
    found = _ATTRIBUTE.findall(text)
    return {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in found}


# -- MiniMax M3 -------------------------------------------------------------------------------------

_TOKEN = "]<]minimax[>["
_TAG, _INVOKE, _INVOKE_END = f"{_TOKEN}<", f"{_TOKEN}<invoke name=", f"{_TOKEN}</invoke>"
_BLOCK = (f"{_TOKEN}<tool_call>", f"{_TOKEN}</tool_call>")


def _read_minimax_m3(s: TextStream, opener: str) -> Step[None]:
    name, _ = yield from s.read_name(">", "\n")
    call = s.begin_call(name.strip("\"'"))
    while (yield from take_tag(s, _TAG, _INVOKE_END)) == _TAG:
        key = yield from _read_tag_name(s)
        schema = call.schema.get_member(key)
        if schema.is_text_only:
            yield from read_tagged(s, call, key, {f"{_TOKEN}</{key}>": (_TOKEN,)}, as_json=True)
        else:
            call.write_member(key, (yield from _read_element(s, key, schema, MAX_DEPTH)))
            s.commit()
    call.close()


def _read_tag_name(s: TextStream) -> Step[str]:
    name, _ = yield from s.read_name(">", "\n")
    if not name or name.startswith("/"):
        raise Malformed
    return name


def _read_element(s: TextStream, key: str, schema: ValueSchema, depth: int) -> Step[str]:
    """Read an element behind its opening tag, with its end tag. Return its value as JSON."""
    text, _ = yield from s.read_until(_TOKEN)
    end = f"</{key}>"
    if (yield from s.skip(end)):
        return _encode_leaf(text, schema)
    if text.strip() or not depth:
        raise Malformed
    members: list[tuple[str, str]] = []
    while (yield from take_tag(s, "<", end)) == "<":
        name = yield from _read_tag_name(s)
        inner = schema.get_items() if _is_array(schema, [name]) else schema.get_member(name)
        members.append((name, (yield from _read_element(s, name, inner, depth - 1))))
        yield from take_tag(s, _TOKEN)
    if _is_array(schema, [name for name, _ in members]):
        return f"[{', '.join(value for _, value in members)}]"
    found: dict[str, list[str]] = {}
    for name, value in members:
        found.setdefault(name, []).append(value)
    values = {name: each[0] if len(each) == 1 else f"[{', '.join(each)}]" for name, each in found.items()}
    return "{" + ", ".join(f"{encode_json(name)}: {value}" for name, value in values.items()) + "}"


def _is_array(schema: ValueSchema, names: list[str]) -> bool:
    """Whether elements of these names are the items of an array, and not the members of an object."""
    return "array" in schema.types or ("object" not in schema.types and set(names) == {"item"})


def _encode_leaf(text: str, schema: ValueSchema) -> str:
    """Encode a value without elements. An empty array or object has none either."""
    if not text.strip() and "string" not in schema.types and schema.types & {"array", "object"}:
        return "[]" if "array" in schema.types else "{}"
    return encode_bare_value(text, schema, guess=True)


# -- MiniCPM5 ---------------------------------------------------------------------------------------

_FUNCTIONS, _FUNCTION_END = ("<function name=", "<functionname="), "</function>"
_PARAMS, _PARAM_END = ("<param name=", "<paramname="), "</param>"
_OBJECT_KEYS = ("arguments", "parameters", "properties")
_CDATA = ("<![CDATA[", "\n<![CDATA[")
_NEXT = (*_PARAMS, _FUNCTION_END, *_FUNCTIONS)
_PARAM_ENDS = {_PARAM_END: _NEXT}
_CDATA_ENDS = {f"]]>{_PARAM_END}": _NEXT, f"]]>\n{_PARAM_END}": _NEXT}
_ENTITIES = {"&lt;": "<", "&gt;": ">", "&amp;": "&", "&quot;": '"', "&apos;": "'"}
_TEXT_ENDS = get_scanner(_PARAM_END, *_ENTITIES)


def _read_minicpm5(s: TextStream, opener: str) -> Step[None]:
    call = s.begin_call((yield from _read_name(s)))
    first = True
    while (yield from take_tag(s, *_PARAMS, _FUNCTION_END)) != _FUNCTION_END:
        key = yield from _read_name(s)
        if first and key in _OBJECT_KEYS and key not in call.schema.keys:
            _write_object(call, key, (yield from read_value_text(s, _PARAM_ENDS))[0])
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
        text, _ = yield from read_value_text(s, _PARAM_ENDS)
        call.write_member(key, encode_bare_value(_unescape(text), schema, guess=True))
        return
    call.open_text_member(key)
    while True:
        end = yield from s.stream_string(_TEXT_ENDS, call.write_text, lambda: call)
        if end == _PARAM_END and (yield from is_followed(s, _NEXT)):
            break
        call.write_text(_ENTITIES.get(end, end))
    call.close_innermost()


# -- records ----------------------------------------------------------------------------------------

KIMI_K3 = ToolCallFamily(
    name="kimi_k3",
    detect=any_of(in_template(_OPEN, _SEP), in_tokens(_OPEN, _CLOSE, _SEP)),
    openers=(_CALL,),
    read=_read_kimi_k3,
    ignored=(_TOOLS, _TOOLS_END, *KIMI_K3_CONTENT),
    ends=(_JSON_END, _CALL_END),
    ends_reasoning=True,
    markers=KIMI_K3_MARKERS,
    call=f'{_RESPONSE_END}{_TOOLS}{_CALL}tool="$name" index="1"{_SEP}{_JSON}type="object"{_SEP}$arguments'
    f"{_JSON_END}{_CALL_END}{_TOOLS_END}",
)
MINIMAX_M3 = ToolCallFamily(
    name="minimax_m3",
    detect=is_shown(_TOKEN),
    openers=(_INVOKE,),
    read=_read_minimax_m3,
    ignored=_BLOCK,
    ends=(_INVOKE_END,),
    ends_reasoning=True,
    markers=(_TOKEN, *_BLOCK),
)
MINICPM5 = ToolCallFamily(
    name="minicpm5",
    aliases=("minicpm5_xml",),
    detect=in_template(_FUNCTIONS[0], _PARAMS[0]),
    openers=_FUNCTIONS,
    read=_read_minicpm5,
    ends=(_FUNCTION_END,),
)
