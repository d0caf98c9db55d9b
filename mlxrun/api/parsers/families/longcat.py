"""LongCat: `<longcat_tool_call>` with JSON (Flash Chat), or GLM's pairs in tags of its own."""

from __future__ import annotations

from mlxrun.api.parsers.family import ToolCallFamily
from mlxrun.api.parsers.readers.tagged_arguments import PairTags

_TAGS = PairTags("longcat_")

FAMILY = ToolCallFamily(
    name="longcat",
    detect=lambda template, tokens: _TAGS.opener in template,
    openers=(_TAGS.opener,),
    read=_TAGS.read,
    ends=(_TAGS.close,),
    ends_reasoning=True,
    aliases=("longcat_flash",),
    markers=_TAGS.markers,
)
