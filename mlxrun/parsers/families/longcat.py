"""LongCat: `<longcat_tool_call>` with JSON (Flash Chat), or with keys and values in tags of their own."""

from __future__ import annotations

from mlxrun.parsers.families.glm import PairTags, read_pairs
from mlxrun.parsers.family import ToolCallFamily
from mlxrun.parsers.text_stream import Step, TextStream

_TAGS = PairTags("longcat_")


def _read(s: TextStream, opener: str) -> Step[None]:
    yield from read_pairs(s, _TAGS)


FAMILY = ToolCallFamily(
    name="longcat",
    detect=lambda template, tokens: _TAGS.start in template,
    openers=(_TAGS.start,),
    read=_read,
    ends_reasoning=True,
    aliases=("longcat_flash",),
    markers=_TAGS.all,
)
