"""GigaChat 3: a message of the role `function call`, `{"name": ..., "arguments": {...}}`; 3.5: tags.

3.0 writes the role and `<|role_sep|>` before the object, 3.1 `<|function_call|>`; one reader reads both.
3.5 writes the tags of DeepSeek V4 by another name. What ends a message is ignored wherever it stands.
"""

from __future__ import annotations

import dataclasses

from mlxrun.api.parsers.family import ToolCallFamily
from mlxrun.api.parsers.readers.invoke_tags import InvokeTags
from mlxrun.api.parsers.readers.json_call import make_prefix_suffix, read_calls
from mlxrun.api.parsers.text_stream import Step, TextStream

_ROLE_SEP, _MESSAGE_SEP, _TOKEN = "<|role_sep|>", "<|message_sep|>", "<|function_call|>"
_ROLE = f"function call{_ROLE_SEP}"
_MARKERS = (_ROLE_SEP, _MESSAGE_SEP, _TOKEN)
_PREFIX = "｜GCML｜"
_BLOCK = (f"<{_PREFIX}tool_calls>", f"</{_PREFIX}tool_calls>")
_TAGS = InvokeTags(_PREFIX, *_BLOCK)


def _read(s: TextStream, opener: str) -> Step[None]:
    yield from s.skip_space()
    yield from read_calls(s)


def _detect(template: str) -> bool:
    return _ROLE_SEP in template and _PREFIX not in template


V3 = ToolCallFamily(
    name="gigachat3",
    detect=lambda template, tokens: _detect(template) and _TOKEN not in template,
    openers=(_ROLE, _TOKEN),
    read=_read,
    ignored=(_MESSAGE_SEP,),
    ends_reasoning=True,
    aliases=("gigachat3_0",),
    markers=_MARKERS,
    prefix_suffix=make_prefix_suffix(f"{_MESSAGE_SEP}\n\n{_ROLE}\n"),
)
V31 = dataclasses.replace(
    V3,
    name="gigachat31",
    detect=lambda template, tokens: _detect(template) and _TOKEN in template,
    aliases=("gigachat3_1",),
    prefix_suffix=make_prefix_suffix(_TOKEN),
)
V35 = ToolCallFamily(
    name="gigachat35",
    detect=lambda template, tokens: _PREFIX in template or _PREFIX in tokens,
    openers=(_TAGS.opener,),
    read=_TAGS.read,
    ends=(_TAGS.close,),
    ignored=(*_BLOCK, _MESSAGE_SEP),
    ends_reasoning=True,
    aliases=("gigachat3_5",),
    markers=(_PREFIX, *_BLOCK, _MESSAGE_SEP),
    prefix_suffix=lambda name: (
        f'{_BLOCK[0]}\n{_TAGS.opener}"{name}">\n',
        f"\n{_TAGS.close}\n{_BLOCK[1]}",
    ),
)
FAMILIES = (V35, V31, V3)
