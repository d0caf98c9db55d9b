"""Jamba, Apriel and MiniMax M1: `<tool_calls>[{"name": ..., "arguments": {...}}, ...]</tool_calls>`.

MiniMax M1 writes the objects one a line, without the array.
"""

from __future__ import annotations

from mlxrun.api.parsers.family import ToolCallFamily
from mlxrun.api.parsers.readers.json_call import make_prefix_suffix, read_block
from mlxrun.api.parsers.text_stream import Step, TextStream

START, END = "<tool_calls>", "</tool_calls>"


def read_array(s: TextStream, opener: str) -> Step[None]:
    """Read one block."""
    yield from read_block(s, END)


def _detect(template: str, tokens: frozenset[str]) -> bool:
    """Whether the tag occurs, and no call of Hunyuan's in it."""
    others = ("```json", "<arg_key", "<tool_call>")
    return (START in template and not any(text in template for text in others[:2])) or (
        START in tokens and not any(text in tokens or text in template for text in others)
    )


FAMILY = ToolCallFamily(
    name="jamba",
    detect=_detect,
    openers=(START,),
    read=read_array,
    ends=(END,),
    aliases=("apriel", "minimax_m1"),
    markers=(START, END),
    prefix_suffix=make_prefix_suffix(f"{START}[", f"]{END}"),
)
