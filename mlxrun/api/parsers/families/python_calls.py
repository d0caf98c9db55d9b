"""Families whose models write calls as Python, some of them as JSON too.

Pythonic: `[f(a=1, b="x"), g()]`, of Llama 3.2 and 4, and of LFM2 between special tokens. Without an opener a
list counts only where the answer begins, or a line with the name of an offered tool.

OLMo 3: `<function_calls>f(a=1)</function_calls>`, a call a line; values are JSON's or Python's.

Llama 3.1 to 4: `{"name": ..., "parameters": {...}}` as the answer, or behind `<|python_tag|>`. Several
objects follow each other, also with semicolons between them, and may stand behind prose. Behind the tag
built-in tools are called as Python (`brave_search.call(query="x")`). The model card shows
`<function=name>{...}</function>`.

UI-TARS: `Thought: ...`, a line feed and `Action: click(start_box='(1,2)')`, or several actions on lines. The
format is in the prompts that come with the model, but not in its chat template. So the config has to name it.
Each action is a call of the offered tool of its name.
"""

from __future__ import annotations

from mlxrun.api.parsers.delta import SPACE
from mlxrun.api.parsers.family import ToolCallFamily, any_of, in_template, in_tokens
from mlxrun.api.parsers.readers.json_call import (
    BARE,
    FENCE,
    read_arguments,
    read_bare,
    read_bare_calls,
    read_calls,
)
from mlxrun.api.parsers.readers.python_call import read_call, read_list
from mlxrun.api.parsers.readers.tagged_arguments import OPENER, is_followed, read_function
from mlxrun.api.parsers.text_stream import Malformed, Step, TextStream

_LISTS = {"<|tool_call_start|>": "<|tool_call_end|>", "<|python_start|>": "<|python_end|>"}
_OLMO, _OLMO_END = "<function_calls>", "</function_calls>"
_LLAMA = {"<|python_tag|>": "<|eom_id|>", "<|python_start|>": "<|python_end|>"}
_JSON = ("{", *SPACE)  # what may follow the bracket of a list of objects


def _read_list(s: TextStream, opener: str) -> Step[None]:
    yield from s.skip_all(opener)
    seen = yield from s.peek(2)
    if (yield from (read_calls(s) if "{" in seen else read_list(s))):
        yield from s.skip(_LISTS[opener])


def _read_list_start(s: TextStream, opener: str) -> Step[None]:
    if (yield from s.skip_space()) != "[":
        raise Malformed
    yield from read_list(s)


def _read_bare_list(s: TextStream, opener: str) -> Step[None]:
    """Read a list without a token that begins a line with the name of an offered tool, behind its bracket."""
    names = tuple(f"{name}(" for name in s.tools.names)
    if not s.out.at_line_start or not (yield from is_followed(s, names, certain=True)):
        raise Malformed
    yield from read_list(s, opened=True)


def _read_olmo(s: TextStream, opener: str) -> Step[None]:
    all_calls = True
    while not (yield from s.skip(_OLMO_END)):
        yield from s.skip(",", ";")
        is_list = (yield from s.skip_space()) == "["
        all_calls &= yield from (read_list(s) if is_list else read_call(s))
    if not all_calls:
        s.return_as_text()


def _read_llama(s: TextStream, opener: str) -> Step[None]:
    if opener == OPENER:
        yield from read_function(s)
        return
    yield from s.skip_space()
    seen = yield from s.peek(2)
    if seen.startswith("{") or seen == "[{":
        if (yield from read_calls(s)):
            yield from _read_more(s)
    elif seen.startswith("["):
        yield from read_list(s)
    elif not (yield from read_call(s)):
        return
    yield from s.skip(_LLAMA[opener])


def _read_llama_start(s: TextStream, opener: str) -> Step[None]:
    yield from s.skip_space()
    seen = yield from s.peek(2)
    if seen.startswith("[") and not seen.endswith(_JSON):  # the small models of 3.2 write Python too
        yield from read_list(s)
    elif (yield from read_bare_calls(s)):
        yield from _read_more(s)


def _read_bare_llama(s: TextStream, opener: str) -> Step[None]:
    if (yield from read_bare(s, opener, anywhere=opener != FENCE)):
        yield from _read_more(s)


def _read_more(s: TextStream) -> Step[None]:
    """Read further objects, each behind a semicolon."""
    while (yield from s.skip(";")) and (yield from s.skip_space()) == "{" and (yield from read_calls(s)):
        pass


def _read_actions(s: TextStream, opener: str) -> Step[None]:
    names = tuple(f"{name}(" for name in s.tools.names)
    if not opener and not (yield from is_followed(s, names)):
        raise Malformed
    more = True
    while more:
        yield from s.skip_space()
        more = (yield from _read_action(s)) and (yield from is_followed(s, names))
        s.commit()


def _read_action(s: TextStream) -> Step[bool]:
    """Read one action, whose arguments may be one object of JSON. False: the tool is not offered."""
    objects = tuple(f"{name}({{{first}" for name in s.tools.names for first in '"}')
    if not (yield from is_followed(s, objects)):
        return (yield from read_call(s))
    name, _ = yield from s.read_name("(")
    yield from read_arguments(s, s.begin_call(name))
    yield from s.skip(")")
    return True


PYTHONIC = ToolCallFamily(
    name="pythonic",
    aliases=("llama3_2_pythonic", "llama4_pythonic", "lfm2"),
    detect=any_of(
        in_template("<|tool_list_start|>"),
        in_template("<|tool_call_start|>"),
        in_tokens("<|tool_call_start|>"),
        in_template("[func_name1("),
    ),
    openers=tuple(_LISTS),
    read=_read_list,
    read_start=_read_list_start,
    bare=("[",),
    read_bare=_read_bare_list,
    ends=tuple(_LISTS.values()),
    markers=(*_LISTS, *_LISTS.values()),
)
OLMO3 = ToolCallFamily(
    name="olmo3",
    aliases=("olmo",),
    detect=in_template(_OLMO),
    openers=(_OLMO,),
    read=_read_olmo,
    ends=(_OLMO_END,),
    markers=(_OLMO, _OLMO_END),
)
LLAMA = ToolCallFamily(
    name="llama",
    aliases=("llama3", "llama3_json", "llama4", "llama4_json"),
    detect=in_template("ipython", '"parameters": ', without=("<tool_call>",)),
    openers=(*_LLAMA, OPENER),
    read=_read_llama,
    read_start=_read_llama_start,
    bare=BARE,
    read_bare=_read_bare_llama,
    ends=(*_LLAMA.values(), "</function>"),
    markers=(*_LLAMA, *_LLAMA.values()),
    call='{"name": $json_name, "parameters": $arguments}',
)
UI_TARS = ToolCallFamily(
    name="ui_tars",
    openers=("Action:",),
    read=_read_actions,
    read_start=_read_actions,  # behind the reasoning, which the opener closes
    call="Action: $name($arguments)",
)
