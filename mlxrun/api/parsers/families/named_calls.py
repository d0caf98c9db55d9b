"""Families whose calls are a name and JSON arguments, with markers between them.

DeepSeek V3, R1 and V3.1: `<｜tool▁call▁begin｜>...<｜tool▁sep｜>...<｜tool▁call▁end｜>`. V3 and R1 write
`function`, the separator, the name, and the arguments in a code fence of JSON. V3.1 writes the name, the
separator and bare arguments. The markers around all calls are ignored wherever they stand.

Kimi K2: `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`. The calls
stand in a section; its markers are ignored wherever they stand. The text that names a call is its id too,
since the template shows ids to the model in the form that it has learned.

PLaMo 3: `<|plamo:begin_tool_name:plamo|>f<|plamo:end_tool_name:plamo|>` and the same with `tool_arguments`,
in an element `tool_request`. The tags around all requests are ignored wherever they stand.

Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, since v11 `[TOOL_CALLS]name[ARGS]{...}`. The new
format has one marker a call, and in v13 `[CALL_ID]` and an id behind the name. One reader reads both, also if
`[ARGS]` was dropped as a special token, or there are no arguments. The two families differ in the format that
their templates show. Templates accept only ids of nine letters and digits.

Hunyuan A13B: `<tool_calls><tool_call>f`, a fence of JSON and both end tags. It also writes Jamba's array in
the outer tags, since other templates of it show that.

Functionary v2.5 writes a token of its own, the name and a line feed, v3.1 `<function=f>{...}</function>`.
"""

from __future__ import annotations

import dataclasses
import re

from mlxrun.api.parsers.family import Reader, ToolCallFamily, any_of, in_template, in_tokens, is_shown
from mlxrun.api.parsers.readers.json_call import (
    FENCE,
    read_arguments,
    read_block,
    read_calls,
    read_ended_arguments,
    read_fenced_arguments,
)
from mlxrun.api.parsers.text_stream import Malformed, Step, StreamCut, TextStream
from mlxrun.api.parsers.tool_schemas import ToolSchemas

# -- DeepSeek ---------------------------------------------------------------------------------------

_BEGIN, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")


def _make_deepseek_reader(fenced: bool) -> Reader:
    """Make the reader of V3 (`fenced`) or V3.1; each reads the other's calls where they cannot be its own."""

    def read(s: TextStream, opener: str) -> Step[None]:
        name, marker = yield from s.read_name(_SEP, _BEGIN, _END, *_SECTION)
        if name == "function" and (fenced or name not in s.tools):
            name, marker = yield from s.read_name("\n", FENCE, "{", _BEGIN, _END, *_SECTION)
            if marker not in ("\n", FENCE):
                raise Malformed
        elif marker != _SEP:
            raise Malformed
        yield from read_fenced_arguments(s, s.begin_call(name), _END)

    return read


DEEPSEEK_V3 = ToolCallFamily(
    name="deepseek_v3",
    aliases=("deepseek_r1", "deepseek"),
    detect=in_template(_BEGIN, "```json"),
    openers=(_BEGIN,),
    read=_make_deepseek_reader(fenced=True),
    ignored=_SECTION,
    ends=(_END,),
    ends_reasoning=True,
    markers=(_BEGIN, _SEP, _END, *_SECTION),
    call=f"{_SECTION[0]}{_BEGIN}function{_SEP}$name\n```json\n$arguments\n```{_END}{_SECTION[1]}",
)
DEEPSEEK_V31 = dataclasses.replace(
    DEEPSEEK_V3,
    name="deepseek_v31",
    aliases=("deepseek_v3_1",),
    detect=in_template(_BEGIN, without=("```json",)),
    read=_make_deepseek_reader(fenced=False),
    call=f"{_SECTION[0]}{_BEGIN}$name{_SEP}$arguments{_END}{_SECTION[1]}",
)

# -- Kimi K2 ----------------------------------------------------------------------------------------

_CALL, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_SECTIONS = tuple(
    f"<|tool_{calls}_section_{end}|>" for calls in ("calls", "call") for end in ("begin", "end")
)
_KIMI_ID = re.compile(r"(?:functions[.]?)?(.+?)(?::?\d+)?")


def _read_kimi(s: TextStream, opener: str) -> Step[None]:
    id, marker = yield from s.read_name(_ARGUMENTS, _CALL, _CALL_END, *_SECTIONS)
    if marker != _ARGUMENTS:
        raise Malformed
    yield from read_ended_arguments(s, s.begin_call(_find_name(id, s.tools), id), _CALL_END)


def _find_name(id: str, tools: ToolSchemas) -> str:
    """Find the tool that an id names, also where its point or colon is missing; "" if none is offered."""
    plain = id.removeprefix("functions.")
    match = _KIMI_ID.fullmatch(id)
    names = (plain.rpartition(":")[0], plain, match[1] if match else "")
    return next((name for name in names if name in tools), "")


KIMI_K2 = ToolCallFamily(
    name="kimi_k2",
    aliases=("kimi",),
    detect=is_shown(_SECTIONS[0]),
    openers=(_CALL,),
    read=_read_kimi,
    ignored=_SECTIONS,
    ends=(_CALL_END,),
    ends_reasoning=True,
    markers=(_CALL, _ARGUMENTS, _CALL_END, *_SECTIONS),
    call=f"{_SECTIONS[0]}{_CALL}functions.$name:0{_ARGUMENTS}$arguments{_CALL_END}{_SECTIONS[1]}",
)

# -- PLaMo 3 ----------------------------------------------------------------------------------------

PLAMO_TOKENS = (
    "<|plamo:begin_",
    "<|plamo:end_",
    ":plamo|>",
    "<|plamo:constrain|>",
    "<|plamo:msg|>",
    "<|plamo:tag|>",
)
_CONSTRAIN, _MESSAGE, _TURN_END = PLAMO_TOKENS[3:]
_PARTS = ("tool_requests", "tool_request", "tool_name", "tool_arguments")
_REQUESTS, _REQUEST, _NAME, _ARGS = (f"<|plamo:begin_{part}:plamo|>" for part in _PARTS)
_REQUESTS_END, _REQUEST_END, _NAME_END, _ARGS_END = (f"<|plamo:end_{part}:plamo|>" for part in _PARTS)


def _read_plamo(s: TextStream, opener: str) -> Step[None]:
    if not (yield from s.skip(_NAME)):
        raise Malformed
    name, end = yield from s.read_name(_NAME_END, _REQUEST_END, _REQUEST)
    if end != _NAME_END or not (yield from s.skip(_ARGS)):
        raise Malformed
    if (yield from s.skip(_CONSTRAIN)):
        yield from s.skip("json")
    yield from s.skip(_MESSAGE)
    yield from read_ended_arguments(s, s.begin_call(name), _ARGS_END)
    yield from s.skip(_REQUEST_END)


PLAMO3 = ToolCallFamily(
    name="plamo3",
    detect=is_shown(PLAMO_TOKENS[0]),
    openers=(_REQUEST,),
    read=_read_plamo,
    ignored=(_REQUESTS, _REQUESTS_END, _TURN_END),
    ends=(_REQUEST_END,),
    ends_reasoning=True,
    markers=PLAMO_TOKENS,
    call=f"{_REQUESTS}{_REQUEST}{_NAME}$name{_NAME_END}{_ARGS}{_CONSTRAIN}json{_MESSAGE}$arguments"
    f"{_ARGS_END}{_REQUEST_END}{_REQUESTS_END}",
)

# -- Mistral ----------------------------------------------------------------------------------------

_CALLS, _ID, _ARGS_MARK = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_MISTRAL_IDS = re.compile(r"[A-Za-z0-9]{9}")


def _read_mistral(s: TextStream, opener: str) -> Step[None]:
    yield from s.skip_all(opener)
    if (yield from s.skip_space()) in ("[", "{"):
        yield from read_calls(s, _MISTRAL_IDS)
        return
    head = yield from s.peek_while(lambda char: char not in "[{\n", required=False)
    name, id = s.take(len(head)).strip(), ""
    if name not in s.tools:
        raise Malformed
    marker = yield from s.take_literal(_ID, _ARGS_MARK)
    if marker == _ID:
        id, marker = yield from s.read_name(_ARGS_MARK)
    call = s.begin_call(name, id)
    following = yield from s.skip_space()
    if following == "{" or (marker and following == '"'):
        yield from read_arguments(s, call)
    elif (yield from s.peek(len(opener))) == opener or not (following or call.schema.keys):
        call.close()  # without arguments
    else:
        raise Malformed if following else StreamCut


MISTRAL_V3 = ToolCallFamily(
    name="mistral_v3",
    aliases=("mistral_old", "mixtral"),
    detect=in_template(_CALLS, without=(_ARGS_MARK,)),
    openers=(_CALLS,),
    read=_read_mistral,
    ends_reasoning=True,
    convert_id=lambda id: id[-9:],
    markers=(_CALLS, _ID, _ARGS_MARK),
    call='[TOOL_CALLS][{"name": $json_name, "arguments": $arguments}]',
)
MISTRAL = dataclasses.replace(
    MISTRAL_V3,
    name="mistral",
    aliases=("mistral_v11", "magistral", "devstral"),
    detect=any_of(in_template(_CALLS, _ARGS_MARK), in_tokens(_CALLS, _ARGS_MARK)),
    call="[TOOL_CALLS]$name[ARGS]$arguments",
)

# -- Hunyuan A13B -----------------------------------------------------------------------------------

_BLOCK, _BLOCK_END, _TAG, _TAG_END = "<tool_calls>", "</tool_calls>", "<tool_call>", "</tool_call>"


def _read_a13b(s: TextStream, opener: str) -> Step[None]:
    """Read a block of calls, or one call without its block."""
    if opener == _BLOCK:
        if (yield from s.skip_space()) in ("[", "{"):
            yield from read_block(s, _BLOCK_END)
            return
        if not (yield from s.take_literal(_TAG)):
            raise Malformed
    more = True
    while more:
        yield from _read_fenced_call(s)
        s.commit()
        more = (yield from s.skip(_TAG, _BLOCK_END)) == _TAG


def _read_fenced_call(s: TextStream) -> Step[None]:
    """Read a call behind its opening tag, with its end tag."""
    if (yield from s.skip_space()) == "{":
        yield from read_calls(s)
        yield from s.skip(_TAG_END)
        return
    name, end = yield from s.read_name("\n", FENCE, _TAG_END)
    call = s.begin_call(name)
    if end == _TAG_END:
        call.close()
    else:
        yield from read_fenced_arguments(s, call, _TAG_END)


HUNYUAN_A13B = ToolCallFamily(
    name="hunyuan_a13b",
    detect=in_template(_BLOCK, _TAG, FENCE, without=("<arg_key>",)),
    openers=(_BLOCK, _TAG),
    read=_read_a13b,
    ignored=("<answer>", "</answer>"),
    ends=(_TAG_END, _BLOCK_END),
    markers=(_BLOCK, _BLOCK_END, _TAG, _TAG_END),
    call="<tool_calls><tool_call>$name\n```json\n$arguments\n```</tool_call></tool_calls>",
)

# -- Functionary ------------------------------------------------------------------------------------

_TOKEN = "<|reserved_special_token_249|>"


def _read_functionary(s: TextStream, opener: str) -> Step[None]:
    is_tag = opener != _TOKEN
    name, end = yield from s.read_name("\n", *((">",) if is_tag else ()))
    if is_tag and end == "\n":
        raise Malformed
    yield from read_arguments(s, s.begin_call(name))
    if is_tag:
        yield from s.skip("</function>")


FUNCTIONARY_V25 = ToolCallFamily(
    name="functionary_v25",
    aliases=("functionary_v2_llama3",),
    detect=in_template(_TOKEN),
    openers=(_TOKEN,),
    read=_read_functionary,
    markers=(_TOKEN,),
    call=f"{_TOKEN}$name\n$arguments",
)
FUNCTIONARY_V31 = ToolCallFamily(
    name="functionary_v31",
    aliases=("functionary_v3_llama31",),
    detect=in_template("<function=example_function_name>{", without=("<tool_call>",)),
    openers=("<function=",),
    read=_read_functionary,
    ends=("</function>",),
    call="<function=$name>$arguments</function>",
)
