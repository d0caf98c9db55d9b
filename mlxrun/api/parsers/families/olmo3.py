"""OLMo 3: `<function_calls>f(a=1)</function_calls>`, a call a line; values are JSON's or Python's."""

from __future__ import annotations

from mlxrun.api.parsers.families.pythonic import read_call, read_list
from mlxrun.api.parsers.family import ToolCallFamily
from mlxrun.api.parsers.text_stream import Step, TextStream

_START, _END = "<function_calls>", "</function_calls>"


def _read(s: TextStream, opener: str) -> Step[None]:
    all_calls = True
    while not (yield from s.skip(_END)):
        yield from s.skip(",", ";")
        is_list = (yield from s.skip_space()) == "["
        all_calls &= yield from (read_list(s) if is_list else read_call(s))
    if not all_calls:
        s.return_as_text()


FAMILY = ToolCallFamily(
    name="olmo3",
    detect=lambda template, tokens: _START in template,
    openers=(_START,),
    read=_read,
    ends=(_END,),
    aliases=("olmo",),
    markers=(_START, _END),
)
