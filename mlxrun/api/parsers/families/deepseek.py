"""DeepSeek V3, R1 and V3.1: `<｜tool▁call▁begin｜>...<｜tool▁sep｜>...<｜tool▁call▁end｜>`; V3.2: tags.

V3 and R1 write `function`, the separator, the name and the arguments in a code fence of JSON; V3.1 the name,
the separator and bare arguments; V3.2 MiniMax's tags by other names, which say of each value whether it is a
string. The markers around all calls are ignored wherever they stand.
"""

from __future__ import annotations

import dataclasses

from mlxrun.api.parsers.families.deepseek_v4 import BLOCKS, PREFIX, find_version
from mlxrun.api.parsers.family import Reader, ToolCallFamily
from mlxrun.api.parsers.readers.invoke_tags import InvokeTags
from mlxrun.api.parsers.readers.json_call import read_arguments
from mlxrun.api.parsers.text_stream import Malformed, Step, TextStream

_BEGIN, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_TYPE = "function"
_FENCE = "```"


def _make_reader(fenced: bool) -> Reader:
    """Make the reader of V3 (`fenced`) or V3.1; each reads the other's calls where they cannot be its own."""

    def read(s: TextStream, opener: str) -> Step[None]:
        name, marker = yield from s.read_name(_SEP, _BEGIN, _END, *_SECTION)
        if name == _TYPE and (fenced or name not in s.tools):
            name, marker = yield from s.read_name("\n", _FENCE, "{", _BEGIN, _END, *_SECTION)
            if marker not in ("\n", _FENCE):
                raise Malformed
        elif marker != _SEP:
            raise Malformed
        call = s.begin_call(name)
        yield from s.skip(_FENCE)
        yield from s.take_literal("json")
        yield from read_arguments(s, call)
        yield from s.skip(_FENCE)
        yield from s.skip(_END)

    return read


V3 = ToolCallFamily(
    name="deepseek_v3",
    detect=lambda template, tokens: _BEGIN in template and _FENCE + "json" in template,
    openers=(_BEGIN,),
    read=_make_reader(fenced=True),
    aliases=("deepseek_r1", "deepseek"),
    markers=(_BEGIN, _SEP, _END, *_SECTION),
    ignored=_SECTION,
    ends=(_END,),
    ends_reasoning=True,
    prefix_suffix=lambda name: (
        f"{_SECTION[0]}{_BEGIN}{_TYPE}{_SEP}{name}\n{_FENCE}json\n",
        f"\n{_FENCE}{_END}{_SECTION[1]}",
    ),
)
V31 = dataclasses.replace(
    V3,
    name="deepseek_v31",
    detect=lambda template, tokens: _BEGIN in template and _FENCE + "json" not in template,
    read=_make_reader(fenced=False),
    aliases=("deepseek_v3_1",),
    prefix_suffix=lambda name: (f"{_SECTION[0]}{_BEGIN}{name}{_SEP}", f"{_END}{_SECTION[1]}"),
)
_TAGS = InvokeTags(PREFIX, *BLOCKS)
V32 = ToolCallFamily(
    name="deepseek_v32",
    detect=lambda template, tokens: find_version(template, tokens) == "3.2",
    openers=(_TAGS.opener,),
    read=_TAGS.read,
    ends=(_TAGS.close,),
    ignored=BLOCKS,
    ends_reasoning=True,
    aliases=("deepseek_v3_2",),
    markers=(PREFIX, *BLOCKS),
    prefix_suffix=lambda name: (
        f'\n\n<{PREFIX}function_calls>\n{_TAGS.opener}"{name}">\n',
        f"\n{_TAGS.close}\n</{PREFIX}function_calls>",
    ),
)
FAMILIES = (V32, V3, V31)
