"""GLM 4.5 to 4.7: `<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value>...</tool_call>`.

4.5 and 4.6 write newlines between the tags, 4.7 none.
"""

from __future__ import annotations

from mlxrun.parsers.family import ToolCallFamily
from mlxrun.parsers.readers.pair_tags import PairTags

_TAGS = PairTags()

FAMILY = ToolCallFamily(
    name="glm",
    detect=lambda template, tokens: _TAGS.key in template,
    openers=(_TAGS.opener,),
    read=_TAGS.read,
    ends_reasoning=True,
    aliases=("glm45", "glm4_moe", "glm47", "laguna"),
    markers=_TAGS.markers,
)
