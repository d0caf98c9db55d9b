"""LongCat: `<longcat_tool_call>` with JSON (Flash Chat), or with keys and values in tags of their own."""

from __future__ import annotations

from mlxrun.parsers.families.glm import Tags, read_pairs
from mlxrun.parsers.family import Family
from mlxrun.parsers.text_stream import Step, Stream

_TAGS = Tags("longcat_")


def _read(s: Stream, opener: str) -> Step[None]:
    yield from read_pairs(s, _TAGS)


FAMILY = Family(
    name="longcat",
    detect=lambda template, tokens: _TAGS.start in template,
    openers=(_TAGS.start,),
    read=_read,
    ends_thought=True,
    aliases=("longcat_flash",),
    markers=_TAGS.all,
)
