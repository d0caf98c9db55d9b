"""Phi-4-mini: `<|tool_call|>[{"name": ..., "arguments": {...}}]<|/tool_call|>`, or `functools[...]`.

The first is what the model's own template shows, the second what its published prompt for tools asks for.
"""

from __future__ import annotations

from mlxrun.api.parsers.family import ToolCallFamily
from mlxrun.api.parsers.readers.bare_call import BARE, read_bare
from mlxrun.api.parsers.readers.json_call import make_prefix_suffix, read_block
from mlxrun.api.parsers.text_stream import Malformed, Step, TextStream

_START, _END, _WORD = "<|tool_call|>", "<|/tool_call|>", "functools"
_WRONG = "</|tool_call|>"  # which the model also writes


def _read(s: TextStream, opener: str) -> Step[None]:
    if opener == _WORD and (yield from s.peek()) != "[":
        raise Malformed
    yield from read_block(s, _END, _WRONG)


FAMILY = ToolCallFamily(
    name="phi4_mini",
    detect=lambda template, tokens: "<|tool|>" in template or f"{_WORD}[" in template,
    openers=(_START, _WORD),
    read=_read,
    bare=BARE,
    read_bare=read_bare,
    ends=(_END, _WRONG),
    aliases=("phi4", "phi4_mini_json"),
    markers=(_START, _END),
    prefix_suffix=make_prefix_suffix(f"{_START}[", f"]{_END}"),
)
