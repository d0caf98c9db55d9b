"""MiniMax M2: `<invoke name="f"><parameter name="k">v</parameter></invoke>` within `<minimax:tool_call>`.

Each invocation is a call by itself; the tags around them are ignored wherever they stand.
"""

from __future__ import annotations

from mlxrun.api.parsers.family import ToolCallFamily
from mlxrun.api.parsers.readers.invoke_tags import InvokeTags

START, END = "<minimax:tool_call>", "</minimax:tool_call>"
_TAGS = InvokeTags("", START, END)

FAMILY = ToolCallFamily(
    name="minimax_m2",
    detect=lambda template, tokens: START in template,
    openers=(_TAGS.opener,),
    read=_TAGS.read,
    ends=(_TAGS.close,),
    aliases=("minimax",),
    markers=(START, END),
    ignored=(START, END),
)
