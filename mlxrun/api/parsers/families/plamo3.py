"""PLaMo 3: elements for the name and for the arguments of a call, which are JSON.

`<|plamo:begin_tool_name:plamo|>f<|plamo:end_tool_name:plamo|>` and the same with `tool_arguments`, in an
element `tool_request`. The tags around all requests are ignored wherever they stand.
"""

from __future__ import annotations

from mlxrun.api.parsers.family import ReasoningFamily, ToolCallFamily
from mlxrun.api.parsers.readers.json_call import read_arguments
from mlxrun.api.parsers.text_stream import Malformed, Step, TextStream

_TOKENS = (
    "<|plamo:begin_",
    "<|plamo:end_",
    ":plamo|>",
    "<|plamo:constrain|>",
    "<|plamo:msg|>",
    "<|plamo:tag|>",
)
_CONSTRAIN, _MESSAGE, _TURN_END = _TOKENS[3:]


def _make_tags(name: str) -> tuple[str, str]:
    begin, end, close, *_ = _TOKENS
    return f"{begin}{name}{close}", f"{end}{name}{close}"


_REQUESTS, _REQUESTS_END = _make_tags("tool_requests")
_REQUEST, _REQUEST_END = _make_tags("tool_request")
_NAME, _NAME_END = _make_tags("tool_name")
_ARGUMENTS, _ARGUMENTS_END = _make_tags("tool_arguments")
_THINK, _THINK_END = _make_tags("think")


def _read(s: TextStream, opener: str) -> Step[None]:
    if not (yield from s.skip(_NAME)):
        raise Malformed
    name, end = yield from s.read_name(_NAME_END, _REQUEST_END, _REQUEST)
    if end != _NAME_END or not (yield from s.skip(_ARGUMENTS)):
        raise Malformed
    if (yield from s.skip(_CONSTRAIN)):
        yield from s.skip("json")
    yield from s.skip(_MESSAGE)
    call = s.begin_call(name)
    if (yield from s.skip(_ARGUMENTS_END)):
        call.close()
    else:
        yield from read_arguments(s, call)
        yield from s.skip(_ARGUMENTS_END)
    yield from s.skip(_REQUEST_END)


FAMILY = ToolCallFamily(
    name="plamo3",
    detect=lambda template, tokens: _TOKENS[0] in template or _TOKENS[0] in tokens,
    openers=(_REQUEST,),
    read=_read,
    ends=(_REQUEST_END,),
    ignored=(_REQUESTS, _REQUESTS_END, _TURN_END),
    ends_reasoning=True,
    markers=_TOKENS,
    prefix_suffix=lambda name: (
        f"{_REQUESTS}{_REQUEST}{_NAME}{name}{_NAME_END}{_ARGUMENTS}{_CONSTRAIN}json{_MESSAGE}",
        f"{_ARGUMENTS_END}{_REQUEST_END}{_REQUESTS_END}",
    ),
)
REASONING = ReasoningFamily(
    name="plamo3",
    detect=lambda template, tokens: _THINK in template or _TOKENS[0] in tokens,
    pairs=((_THINK, (_THINK_END,)),),
    anywhere=True,
    ignored=(_TURN_END,),
    markers=_TOKENS,
    closing=_THINK_END,
)
