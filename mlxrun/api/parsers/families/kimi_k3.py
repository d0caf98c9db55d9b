"""Kimi K3: `<|open|>call tool="f" index="1"<|sep|>`, and in it an element for each argument.

An argument is `<|open|>argument key="k" type="string"<|sep|>v<|close|>argument<|sep|>`, whose value is JSON
unless it is a string; `<|open|>json type="object"<|sep|>{...}<|close|>json<|sep|>` holds all arguments
instead. Calls stand in the channel `tools`, content in the channel `response`; their tags are ignored
wherever they stand. The format is that of `encoding_k3.py`, which comes with the model.
"""

from __future__ import annotations

import re

from mlxrun.api.parsers.family import ReasoningFamily, ToolCallFamily
from mlxrun.api.parsers.readers.json_call import read_arguments
from mlxrun.api.parsers.readers.tagged_arguments import TEXT, read_tagged, take_tag
from mlxrun.api.parsers.text_stream import Malformed, Step, TextStream

_OPEN, _CLOSE, _SEP = "<|open|>", "<|close|>", "<|sep|>"
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
_CALL, _CALL_END = f"{_OPEN}call ", f"{_CLOSE}call{_SEP}"
_ARGUMENT, _ARGUMENT_END = f"{_OPEN}argument ", f"{_CLOSE}argument{_SEP}"
_JSON, _JSON_END = f"{_OPEN}json ", f"{_CLOSE}json{_SEP}"
_TOOLS, _TOOLS_END = f"{_OPEN}tools{_SEP}", f"{_CLOSE}tools{_SEP}"
_RESPONSE, _RESPONSE_END = f"{_OPEN}response{_SEP}", f"{_CLOSE}response{_SEP}"
_THINK, _THINK_END = f"{_OPEN}think{_SEP}", f"{_CLOSE}think{_SEP}"
_MESSAGE_ENDS = (f"{_CLOSE}message{_SEP}", "<|end_of_msg|>")
_IGNORED = (_RESPONSE, _RESPONSE_END, *_MESSAGE_ENDS)
_ENDS = {_ARGUMENT_END: (_ARGUMENT, _CALL_END, _TOOLS_END)}
_MARKERS = (_OPEN, _CLOSE, _SEP, "<|end_of_msg|>")


def _read(s: TextStream, opener: str) -> Step[None]:
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
        yield from read_tagged(s, call, attributes["key"], _ENDS, as_json=True, schema=schema)
        tag = yield from take_tag(s, _ARGUMENT, _CALL_END)
    call.close()


def _read_attributes(s: TextStream) -> Step[dict[str, str]]:
    """Read the rest of an opening tag."""
    text, _ = yield from s.read_name(_SEP, "\n")
    found = _ATTRIBUTE.findall(text)
    return {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in found}


def _detect(template: str, tokens: frozenset[str]) -> bool:
    return (_OPEN in template and _SEP in template) or {_OPEN, _CLOSE, _SEP} <= tokens


FAMILY = ToolCallFamily(
    name="kimi_k3",
    detect=_detect,
    openers=(_CALL,),
    read=_read,
    ignored=(_TOOLS, _TOOLS_END, *_IGNORED),
    ends=(_JSON_END, _CALL_END),
    ends_reasoning=True,
    markers=_MARKERS,
    prefix_suffix=lambda name: (
        f'{_RESPONSE_END}{_TOOLS}{_CALL}tool="{name}" index="1"{_SEP}{_JSON}type="object"{_SEP}',
        f"{_JSON_END}{_CALL_END}{_TOOLS_END}",
    ),
)
REASONING = ReasoningFamily(
    name="kimi_k3",
    detect=_detect,
    # Structured output begins where content does: behind the tag that opens its channel.
    pairs=((_THINK, (_RESPONSE, _THINK_END)),),
    anywhere=True,
    ignored=_IGNORED,
    markers=_MARKERS,
    closing=f"{_THINK_END}{_RESPONSE}",
)
