"""xLAM: an answer that is a JSON array of calls, `[{"name": ..., "arguments": {...}}, ...]`.

It may stand in a code fence, or behind the opener of another format, as some of its models write. Other JSON
is passed on as text from the first name that is not offered.
"""

from __future__ import annotations

from mlxrun.api.parsers.family import ToolCallFamily
from mlxrun.api.parsers.readers.bare_call import FENCE, read_bare_calls
from mlxrun.api.parsers.readers.json_call import make_prefix_suffix, read_block
from mlxrun.api.parsers.text_stream import Step, TextStream

_ENDS = {"<tool_call>": "</tool_call>", "[TOOL_CALLS]": ""}


def _read_start(s: TextStream, opener: str) -> Step[None]:
    fence = yield from s.skip(FENCE)
    if fence:
        yield from s.take_literal("json")
        yield from s.skip_space()
    if (yield from read_bare_calls(s)) and fence:
        yield from s.skip(FENCE)


def _read(s: TextStream, opener: str) -> Step[None]:
    yield from read_block(s, _ENDS[opener])


FAMILY = ToolCallFamily(
    name="xlam",
    detect=lambda template, tokens: "xLAM" in template or '"tool_call_name"' in template,
    openers=tuple(_ENDS),
    read=_read,
    read_start=_read_start,
    aliases=("xlam2",),
    markers=("<tool_call>", "</tool_call>"),
    ends=("</tool_call>",),
    prefix_suffix=make_prefix_suffix("[", "]"),
)
