"""Cohere: `<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {...}}]<|END_ACTION|>`.

Command R+ writes `Action:` and the same objects, without ids, in a code fence. The ids count the calls of a
conversation, and its template counts them again, so they are not used: calls of two answers may have the
same.
"""

from __future__ import annotations

from mlxrun.api.parsers.family import ToolCallFamily
from mlxrun.api.parsers.readers.json_call import read_block
from mlxrun.api.parsers.text_stream import Malformed, Step, TextStream
from mlxrun.api.parsers.tool_schemas import encode_json

_START, _END = "<|START_ACTION|>", "<|END_ACTION|>"
_ACTION, _FENCE = "Action:", "```"
CONTENT_TAGS = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")


def _read(s: TextStream, opener: str) -> Step[None]:
    yield from read_block(s, _END)


def _read_fenced(s: TextStream, opener: str) -> Step[None]:
    if not (yield from s.skip(_FENCE)):
        raise Malformed
    yield from s.take_literal("json")
    yield from read_block(s, _FENCE)


ACTIONS = ToolCallFamily(
    name="cohere",
    detect=lambda template, tokens: (
        _START in template or (_START in tokens and '"tool_name"' not in template)
    ),
    openers=(_START,),
    read=_read,
    ends=(_END,),
    ignored=CONTENT_TAGS,
    ends_reasoning=True,
    aliases=("command_a", "command_r7b", "cohere_command3", "cohere_command4"),
    markers=(_START, _END, *CONTENT_TAGS),
    prefix_suffix=lambda name: (
        f'{_START}[\n    {{"tool_call_id": "0", "tool_name": {encode_json(name)}, "parameters": ',
        f"}}\n]{_END}",
    ),
)
COMMAND_R = ToolCallFamily(
    name="command_r",
    detect=lambda template, tokens: (
        _ACTION in template and '"tool_name"' in template and _START not in template
    ),
    openers=(_ACTION,),
    read=_read_fenced,
    aliases=("command_r_plus",),
    prefix_suffix=lambda name: (
        f'{_ACTION}\n{_FENCE}json\n[\n    {{"tool_name": {encode_json(name)}, "parameters": ',
        f"}}\n]{_FENCE}",
    ),
)
FAMILIES = (ACTIONS, COMMAND_R)
