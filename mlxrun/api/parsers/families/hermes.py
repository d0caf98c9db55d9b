"""Hermes 2/3, Qwen 2.5 and 3, Nemotron: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Within the tags the XML of Qwen3-Coder is read too (Nemotron), and that XML also where the tag before it was
forgotten. So is the JSON without tags where it begins a line, also in a code fence.
"""

from __future__ import annotations

from mlxrun.api.parsers.family import ToolCallFamily
from mlxrun.api.parsers.readers.bare_call import BARE, read_bare
from mlxrun.api.parsers.readers.json_call import make_prefix_suffix, read_calls
from mlxrun.api.parsers.readers.tagged_arguments import OPENER, read_function
from mlxrun.api.parsers.text_stream import Malformed, Step, TextStream

START, END = "<tool_call>", "</tool_call>"
_ENDS = {"<TOOLCALL>": "</TOOLCALL>"}


def read(s: TextStream, opener: str) -> Step[None]:
    """Read one block, of one call or several, or a call without its tags. What is no call in it is text, and
    so is its end tag then."""
    if opener == OPENER:
        yield from read_function(s)
        return
    yield from s.skip_all(opener)
    end = _ENDS.get(opener, END)
    if (yield from s.skip_space()) == "<":
        if (yield from s.take_literal(OPENER)):
            yield from read_function(s)
        elif s.out.at_line_start and (yield from s.take_literal(end)):
            s.drop()
            return
        else:
            raise Malformed
    elif not (yield from read_calls(s)):
        return
    yield from s.skip(end, "}" + end, "}\n" + end)


FAMILY = ToolCallFamily(
    name="hermes",
    detect=lambda template, tokens: (
        (START in template or "<TOOLCALL>" in template)
        and '"arguments"' in template
        and OPENER not in template
    ),
    openers=(START, *_ENDS, OPENER),
    read=read,
    bare=BARE,
    read_bare=read_bare,
    ends=(END, "</function>"),
    aliases=("qwen", "qwen2_5", "qwen3", "nemotron"),
    markers=(START, END),
    prefix_suffix=make_prefix_suffix(f"{START}\n", f"\n{END}"),
)
