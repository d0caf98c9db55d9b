"""Families whose models write Hermes' JSON or the XML of Qwen3-Coder in tags, and sometimes the other one.

Hermes 2/3, Qwen 2.5 and 3, Nemotron: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. The XML
`<function=name><parameter=key>value</parameter></function>` is read too, within these tags and without them.
JSON without tags is read if it begins a line, also in a code fence.

Qwen3-Coder, Qwen 3.5, Nemotron 3 and Step 3.5 write the XML in these tags. Seed-OSS writes one or several
functions in `<seed:tool_call>`, Step 3 also `<steptml:invoke name="f">`. ERNIE 4.5 writes Hermes' JSON.
"""

from __future__ import annotations

import dataclasses

from mlxrun.api.parsers.families.reasoning import RESPONSE, is_ernie
from mlxrun.api.parsers.family import ToolCallFamily, any_of, in_template, is_shown
from mlxrun.api.parsers.readers.json_call import BARE, read_bare, read_block, read_calls
from mlxrun.api.parsers.readers.tagged_arguments import OPENER, InvokeTags, read_function
from mlxrun.api.parsers.text_stream import Step, TextStream

_START, _END = "<tool_call>", "</tool_call>"
_ENDS = {"<TOOLCALL>": "</TOOLCALL>"}
_SEED, _SEED_END = "<seed:tool_call>", "</seed:tool_call>"
_STEP = InvokeTags("steptml:")
_STEP_IGNORED = (
    *("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
    *("<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_begin｜>", "<｜tool_call_end｜>"),
)


def _read(s: TextStream, opener: str) -> Step[None]:
    """Read one block, of one call or several, or a call without its tags. What is no call in it is text, and
    so is its end tag then."""
    if opener == OPENER:
        yield from read_function(s)
        return
    end = _ENDS.get(opener, _END)
    if (yield from s.drop_empty_block(opener, end)):
        return
    if (yield from s.take_literal(OPENER)):
        yield from read_function(s)
    elif not (yield from read_calls(s)):
        return
    yield from s.skip(end, "}" + end, "}\n" + end)


def _read_step(s: TextStream, opener: str) -> Step[None]:
    yield from (_STEP.read if opener == _STEP.opener else _read)(s, opener)


def _read_seed(s: TextStream, opener: str) -> Step[None]:
    """Read one block, or a call whose block's tag was forgotten."""
    if opener == _SEED:
        if (yield from s.drop_empty_block(_SEED, _SEED_END)):
            return
        if not (yield from s.skip(OPENER)):
            yield from read_block(s, _SEED_END)
            return
    more = True
    while more:
        yield from read_function(s)
        more = (yield from s.skip(_SEED_END, OPENER)) == OPENER


HERMES = ToolCallFamily(
    name="hermes",
    aliases=("qwen", "qwen2_5", "qwen3", "nemotron"),
    detect=any_of(*(in_template(tag, '"arguments"', without=(OPENER,)) for tag in (_START, *_ENDS))),
    openers=(_START, *_ENDS, OPENER),
    read=_read,
    bare=BARE,
    read_bare=read_bare,
    ends=(_END, "</function>"),
    markers=(_START, _END),
    call='<tool_call>\n{"name": $json_name, "arguments": $arguments}\n</tool_call>',
)
ERNIE45 = dataclasses.replace(
    HERMES,
    name="ernie45",
    aliases=("ernie_x1",),
    detect=is_ernie,
    openers=(_START,),
    ignored=RESPONSE,
    markers=(_START, _END, *RESPONSE),
)
QWEN3_CODER = dataclasses.replace(
    HERMES,
    name="qwen3_coder",
    aliases=("qwen3_coder_xml", "qwen3_xml", "qwen3_5", "nemotron_v3"),
    detect=in_template(OPENER, _START),
    openers=(_START, OPENER),
    call="",
)
STEP = dataclasses.replace(
    QWEN3_CODER,
    name="step",
    aliases=("step3", "step3p5", "step3_5"),
    detect=any_of(in_template(OPENER, "functions in JSONSchema format"), in_template("<steptml:")),
    openers=(_START, OPENER, _STEP.opener),
    read=_read_step,
    ignored=_STEP_IGNORED,
    markers=(_START, _END, *_STEP_IGNORED),
)
SEED_OSS = ToolCallFamily(
    name="seed_oss",
    aliases=("seed",),
    detect=is_shown(_SEED),
    openers=(_SEED, OPENER),
    read=_read_seed,
    bare=BARE,
    read_bare=read_bare,
    ends=(_SEED_END, "</function>"),
    markers=(_SEED, _SEED_END),
)
