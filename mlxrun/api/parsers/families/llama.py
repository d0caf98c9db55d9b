"""Llama 3.1 to 4: `{"name": ..., "parameters": {...}}` as the answer, or behind `<|python_tag|>`.

Several objects follow each other, also with semicolons between them, and may stand behind prose. Behind the
tag built-in tools are called as Python (`brave_search.call(query="x")`). The model card shows
`<function=name>{...}</function>`.
"""

from __future__ import annotations

from mlxrun.api.parsers.delta import SPACE
from mlxrun.api.parsers.families.pythonic import read_call, read_list
from mlxrun.api.parsers.family import ToolCallFamily
from mlxrun.api.parsers.readers.bare_call import BARE, FENCE, read_bare, read_bare_calls
from mlxrun.api.parsers.readers.json_call import make_prefix_suffix, read_calls
from mlxrun.api.parsers.readers.tagged_arguments import OPENER, read_function
from mlxrun.api.parsers.text_stream import Step, TextStream

_TAGS = {"<|python_tag|>": "<|eom_id|>", "<|python_start|>": "<|python_end|>"}
_JSON = ("{", *SPACE)  # what may follow the bracket of a list of objects


def _read_start(s: TextStream, opener: str) -> Step[None]:
    yield from s.skip_space()
    seen = yield from s.peek(2)
    if seen.startswith("[") and not seen.endswith(_JSON):  # the small models of 3.2 write Python too
        yield from read_list(s)
    elif (yield from read_bare_calls(s)):
        yield from _read_more(s)


def _read_more(s: TextStream) -> Step[None]:
    """Read further objects, each behind a semicolon."""
    while (yield from s.skip(";")) and (yield from s.skip_space()) == "{" and (yield from read_calls(s)):
        pass


def _read_bare(s: TextStream, opener: str) -> Step[None]:
    if (yield from read_bare(s, opener, anywhere=opener != FENCE)):
        yield from _read_more(s)


def _read(s: TextStream, opener: str) -> Step[None]:
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
    yield from s.skip(_TAGS[opener])


def _detect(template: str, tokens: frozenset[str]) -> bool:
    return "ipython" in template and '"parameters": ' in template and "<tool_call>" not in template


FAMILY = ToolCallFamily(
    name="llama",
    detect=_detect,
    openers=(*_TAGS, OPENER),
    read=_read,
    bare=BARE,
    read_bare=_read_bare,
    ends=(*_TAGS.values(), "</function>"),
    read_start=_read_start,
    aliases=("llama3", "llama3_json", "llama4", "llama4_json"),
    markers=tuple(tag for pair in _TAGS.items() for tag in pair),
    prefix_suffix=make_prefix_suffix(arguments="parameters"),
)
