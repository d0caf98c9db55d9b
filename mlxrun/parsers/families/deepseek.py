"""DeepSeek V3, R1 and V3.1: `<｜tool▁call▁begin｜>...<｜tool▁sep｜>...<｜tool▁call▁end｜>`; V3.2: tags.

V3 and R1 write `function`, the separator, the name and the arguments in a fence of JSON; V3.1 the name, the
separator and bare arguments; V3.2 MiniMax's tags by other names, which say of each value whether it is a
string. The markers around all calls are dropped wherever they stand.
"""

from __future__ import annotations

from mlxrun.parsers.families.minimax import InvokeTags, read_invoke
from mlxrun.parsers.family import Reader, ToolCallFamily
from mlxrun.parsers.readers.json_call import read_arguments
from mlxrun.parsers.text_stream import Malformed, Step, StreamCut, TextStream

_BEGIN, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_TYPE = "function"
_FENCE = "```"


def _reader(fenced: bool) -> Reader:
    """The reader of V3's form (`fenced`) or V3.1's; each reads the other's where it cannot mean its own."""

    def read(s: TextStream, opener: str) -> Step[None]:
        head, mark = yield from s.read_name(_SEP, _BEGIN, _END, *_SECTION)
        if not mark:
            raise StreamCut
        name = head.strip()
        if name == _TYPE and (fenced or name not in s.tools):
            name, mark = yield from s.read_name("\n", _FENCE, "{", _BEGIN, _END, *_SECTION)
            name = name.strip()
            if not mark:
                raise StreamCut
            if mark not in ("\n", _FENCE):
                raise Malformed
        elif mark != _SEP:
            raise Malformed
        if name not in s.tools:
            raise Malformed
        yield from s.skip_space()
        yield from s.take_literal(_FENCE)
        yield from s.take_literal("json")
        yield from read_arguments(s, s.begin_call(name))
        yield from s.skip_space()
        yield from s.take_literal(_FENCE)
        yield from s.skip_space()
        yield from s.take_literal(_END)

    return read


V3 = ToolCallFamily(
    name="deepseek_v3",
    detect=lambda template, tokens: _BEGIN in template and _FENCE + "json" in template,
    openers=(_BEGIN,),
    read=_reader(fenced=True),
    aliases=("deepseek_r1", "deepseek"),
    markers=(_BEGIN, _SEP, _END, *_SECTION),
    ignored=_SECTION,
    ends_reasoning=True,
    prefix_suffix=lambda name: (
        f"{_SECTION[0]}{_BEGIN}{_TYPE}{_SEP}{name}\n{_FENCE}json\n",
        f"\n{_FENCE}{_END}{_SECTION[1]}",
    ),
)
V31 = ToolCallFamily(
    name="deepseek_v31",
    detect=lambda template, tokens: _BEGIN in template and _FENCE + "json" not in template,
    openers=(_BEGIN,),
    read=_reader(fenced=False),
    aliases=("deepseek_v3_1",),
    markers=(_BEGIN, _SEP, _END, *_SECTION),
    ignored=_SECTION,
    ends_reasoning=True,
    prefix_suffix=lambda name: (f"{_SECTION[0]}{_BEGIN}{name}{_SEP}", f"{_END}{_SECTION[1]}"),
)
_TAGS = InvokeTags("｜DSML｜")
_BLOCK = ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")


def _read_tags(s: TextStream, opener: str) -> Step[None]:
    yield from read_invoke(s, _TAGS)


V32 = ToolCallFamily(
    name="deepseek_v32",
    detect=lambda template, tokens: _TAGS.prefix in template or _TAGS.prefix in tokens,
    openers=(_TAGS.invoke,),
    read=_read_tags,
    ignored=_BLOCK,
    ends_reasoning=True,
    aliases=("deepseek_v3_2",),
    markers=(_TAGS.prefix, *_BLOCK),
)
FAMILIES = (V32, V3, V31)
