"""Functionary: messages to a recipient, which is a tool or `all`: `>>>f`, a line feed and `{...}`.

The prompt ends with what begins a message, so that an answer begins with its recipient. In v2 a message is
`<|from|>assistant`, `<|recipient|>f` and `<|content|>{...}`, a line each. v2.5 writes calls only so, behind
a token of its own, and v3.1 writes `<function=f>{...}</function>`.
"""

from __future__ import annotations

from collections.abc import Callable

from mlxrun.api.parsers.family import ToolCallFamily
from mlxrun.api.parsers.marker_scanner import get_scanner
from mlxrun.api.parsers.readers.json_call import read_arguments
from mlxrun.api.parsers.text_stream import Malformed, Step, StreamCut, TextStream

_EVERYBODY = "all"
_V2 = "<|from|>assistant\n<|recipient|>"
_CONTENT, _STOP = "\n<|content|>", "<|stop|>"
_V25 = "<|reserved_special_token_249|>"
_FUNCTION, _CLOSE = "<function=", "</function>"


def _make_read_answer(
    starts: tuple[str, ...], behind: str, stops: tuple[str, ...] = ()
) -> Callable[[TextStream], Step[None]]:
    """Make the reader of an answer whose messages begin with one of `starts`, the recipient and `behind`."""
    scanner = get_scanner(*starts, *stops)

    def read_answer(s: TextStream) -> Step[None]:
        start = ""  # that of the first message is the prompt's end
        while True:
            known = start in stops or (yield from _read_message(s, start, behind))
            following = yield from s.pass_text("content", scanner)
            if not following:
                return
            if start and not known and following in stops:  # a message that is content as it was written
                s.out.add("content", following)
            start = following

    return read_answer


def _read_message(s: TextStream, start: str, behind: str) -> Step[bool]:
    """Read a message's beginning: a call, or the recipient of content. False: neither, and it is text."""
    s.begin_attempt(start)
    try:
        head = yield from s.skip(*(name + behind for name in (_EVERYBODY, *s.tools.names)))
        if not head:
            raise Malformed
        if head == _EVERYBODY + behind:
            s.drop()
        else:
            yield from read_arguments(s, s.begin_call(head.removesuffix(behind)))
            yield from s.skip_space()
            s.commit()
    except (Malformed, StreamCut) as error:
        s.abandon_attempt(isinstance(error, StreamCut))
    return s.end_attempt()


def _read_v25(s: TextStream, opener: str) -> Step[None]:
    name, _ = yield from s.read_name("\n")
    yield from read_arguments(s, s.begin_call(name))


def _read_v31(s: TextStream, opener: str) -> Step[None]:
    name, end = yield from s.read_name(">", "\n")
    if end == "\n":
        raise Malformed
    yield from read_arguments(s, s.begin_call(name))
    yield from s.skip(_CLOSE)


V2 = ToolCallFamily(
    name="functionary_v2",
    detect=lambda template, tokens: "<|recipient|>" in template and "<|content|>" in template,
    read_answer=_make_read_answer((_V2,), _CONTENT, (_STOP,)),
    markers=("<|from|>", "<|recipient|>", "<|content|>", _STOP),
    prefix_suffix=lambda name: (f"{name}{_CONTENT}", ""),
)
V25 = ToolCallFamily(
    name="functionary_v25",
    detect=lambda template, tokens: _V25 in template,
    openers=(_V25,),
    read=_read_v25,
    aliases=("functionary_v2_llama3",),
    markers=(_V25,),
    prefix_suffix=lambda name: (f"{_V25}{name}\n", ""),
)
V3 = ToolCallFamily(
    name="functionary",
    detect=lambda template, tokens: ">>>all" in template,
    read_answer=_make_read_answer((">>>",), "\n"),
    aliases=("functionary_v3", "functionary_v32", "meetkai"),
    prefix_suffix=lambda name: (f"{name}\n", ""),
)
V31 = ToolCallFamily(
    name="functionary_v31",
    detect=lambda template, tokens: (
        f"{_FUNCTION}example_function_name>{{" in template and "<tool_call>" not in template
    ),
    openers=(_FUNCTION,),
    read=_read_v31,
    ends=(_CLOSE,),
    aliases=("functionary_v3_llama31",),
    prefix_suffix=lambda name: (f"{_FUNCTION}{name}>", _CLOSE),
)
FAMILIES = (V2, V25, V3, V31)
