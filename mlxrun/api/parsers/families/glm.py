"""GLM 4.5 to 4.7: `<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value>...</tool_call>`.

4.5 and 4.6 write newlines between the tags, 4.7 none. Ling 3 writes the same, and sometimes the end of its
turn as text.
"""

from __future__ import annotations

import dataclasses

from mlxrun.api.parsers.family import ToolCallFamily
from mlxrun.api.parsers.readers.tagged_arguments import PairTags

_TAGS = PairTags()

FAMILY = ToolCallFamily(
    name="glm",
    # Hunyuan writes these tags within a block.
    detect=lambda template, tokens: _TAGS.key in template and "<tool_calls" not in template,
    openers=(_TAGS.opener,),
    read=_TAGS.read,
    ends=(_TAGS.close,),
    ends_reasoning=True,
    aliases=("glm45", "glm4_moe", "glm47", "laguna"),
    markers=_TAGS.markers,
)
_TURN_END = "<|role_end|>"
LING3 = dataclasses.replace(
    FAMILY,
    name="ling3",
    detect=lambda template, tokens: FAMILY.detect(template, tokens) and _TURN_END in template,
    ignored=(_TURN_END,),
    aliases=("bailing_v3",),
    markers=(*_TAGS.markers, _TURN_END),
)
FAMILIES = (LING3, FAMILY)
