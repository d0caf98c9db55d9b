"""Llama 3.1 to 4: `{"name": ..., "parameters": {...}}` as the answer, or behind `<|python_tag|>`.

Several objects stand one behind the other, also with semicolons. Behind the tag built-in tools are called as
Python (`brave_search.call(query="x")`); `<function=name>{...}</function>` is the form of the model card.
"""

from __future__ import annotations

from mlxrun.parsers.argument_writer import quoted
from mlxrun.parsers.delta_builder import SPACE
from mlxrun.parsers.families.pythonic import read_call, read_list
from mlxrun.parsers.families.xlam import read_naked
from mlxrun.parsers.family import ToolCallFamily
from mlxrun.parsers.readers.json_call import read_arguments, read_calls
from mlxrun.parsers.text_stream import Malformed, Step, StreamCut, TextStream

_TAGS = {"<|python_tag|>": "<|eom_id|>", "<|python_start|>": "<|python_end|>"}
_JSON = ("{", *SPACE)  # what a list of objects goes on with
_FUNCTION, _CLOSE = "<function=", "</function>"


def _start(s: TextStream, opener: str) -> Step[None]:
    yield from s.skip_space()
    seen = yield from s.peek(2)
    if seen.startswith("[") and not seen.endswith(_JSON):  # the small models of 3.2 write Python too
        yield from read_list(s)
    elif (yield from read_naked(s)):
        yield from _more(s)


def _more(s: TextStream) -> Step[None]:
    """Objects behind semicolons."""
    while True:
        yield from s.skip_space()
        if not (yield from s.take_literal(";")):
            return
        if (yield from s.skip_space()) != "{" or not (yield from read_calls(s)):
            return


def _read(s: TextStream, opener: str) -> Step[None]:
    if opener == _FUNCTION:
        yield from _function(s)
        return
    yield from s.skip_space()
    seen = yield from s.peek(2)
    if seen.startswith("{") or seen == "[{":
        if (yield from read_calls(s)):
            yield from _more(s)
    elif seen.startswith("["):
        yield from read_list(s)
    elif not (yield from read_call(s)):
        return
    yield from s.skip_space()
    yield from s.take_literal(_TAGS[opener])


def _function(s: TextStream) -> Step[None]:
    name, end = yield from s.read_name(">", "\n")
    if not end:
        raise StreamCut
    if end == "\n" or name.strip() not in s.tools:
        raise Malformed
    yield from read_arguments(s, s.begin_call(name.strip()))
    yield from s.skip_space()
    yield from s.take_literal(_CLOSE)


def _detect(template: str, tokens: frozenset[str]) -> bool:
    return "ipython" in template and '"parameters": ' in template and "<tool_call>" not in template


FAMILY = ToolCallFamily(
    name="llama",
    detect=_detect,
    openers=(*_TAGS, _FUNCTION),
    read=_read,
    read_start=_start,
    aliases=("llama3", "llama3_json", "llama4", "llama4_json"),
    markers=tuple(part for pair in _TAGS.items() for part in pair),
    prefix_suffix=lambda name: (f'{{"name": {quoted(name)}, "parameters": ', "}"),
)
