"""ERNIE 4.5: Hermes' `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, and content in tags."""

from __future__ import annotations

import dataclasses

from mlxrun.api.parsers.families import hermes
from mlxrun.api.parsers.family import ReasoningFamily

_RESPONSE = ("<response>", "</response>")


def _detect(template: str, tokens: frozenset[str]) -> bool:
    """Whether both tags occur. MiniMax writes results of tools in `<response>`, Granite no `<tool_call>`."""
    both = (hermes.START, _RESPONSE[0])
    return "minimax" not in template and (all(tag in template for tag in both) or tokens.issuperset(both))


FAMILY = dataclasses.replace(
    hermes.FAMILY,
    name="ernie45",
    detect=_detect,
    openers=(hermes.START,),
    ignored=_RESPONSE,
    aliases=("ernie_x1",),
    markers=(hermes.START, hermes.END, *_RESPONSE),
)
REASONING = ReasoningFamily(
    name="ernie45",
    detect=_detect,
    pairs=(("<think>", ("</think>",)),),
    ignored=_RESPONSE,
    aliases=("ernie_x1",),
    markers=("<think>", "</think>", *_RESPONSE),
    closing="\n</think>\n\n",
)
