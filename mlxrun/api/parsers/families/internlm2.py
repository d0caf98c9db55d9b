"""InternLM 2 and Intern-S1: `<|action_start|><|plugin|>{"name": ..., "parameters": {...}}<|action_end|>`.

What stands behind `<|interpreter|>` is code, and content.
"""

from __future__ import annotations

from mlxrun.api.parsers.family import ToolCallFamily
from mlxrun.api.parsers.readers.json_call import make_prefix_suffix, read_block
from mlxrun.api.parsers.text_stream import Malformed, Step, TextStream

_START, _PLUGIN, _END = "<|action_start|>", "<|plugin|>", "<|action_end|>"


def _read(s: TextStream, opener: str) -> Step[None]:
    if not (yield from s.skip(_PLUGIN)):
        raise Malformed
    yield from read_block(s, _END)


FAMILY = ToolCallFamily(
    name="internlm2",
    detect=lambda template, tokens: _START in template or _START in tokens,
    openers=(_START,),
    read=_read,
    ends=(_END,),
    ends_reasoning=True,
    aliases=("internlm", "intern_s1"),
    markers=(_START, _PLUGIN, _END, "<|interpreter|>"),
    prefix_suffix=make_prefix_suffix(f"{_START}{_PLUGIN}\n", _END, "parameters"),
)
