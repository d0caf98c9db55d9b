"""Hunyuan A13B: `<tool_calls><tool_call>f`, a fence of JSON and both end tags; Hy3: keys and values in tags.

A13B also writes Jamba's array in the outer tags, as other templates of it show. Hy3 and Hy4 write GLM's
tags, Hy3 with `<tool_sep>` behind the name, in a block whose tags are ignored wherever they stand. The
names of their tags may end in a suffix that each model has for itself (`<tool_call:opensource>`), which its
tokens show.
"""

from __future__ import annotations

import dataclasses
import re

from mlxrun.api.parsers.families import jamba
from mlxrun.api.parsers.family import ReasoningFamily, ToolCallFamily
from mlxrun.api.parsers.readers.json_call import read_arguments, read_calls
from mlxrun.api.parsers.readers.tagged_arguments import PairTags
from mlxrun.api.parsers.text_stream import Malformed, Step, TextStream

_CALL, _END, _FENCE = "<tool_call>", "</tool_call>", "```"
_ANSWER = ("<answer>", "</answer>")  # the tags around content that follows reasoning
_SUFFIXED = re.compile(r"<(?:tool_calls|think)(:[^\s<>]+)>")


def _read_a13b(s: TextStream, opener: str) -> Step[None]:
    """Read a block of calls, or one call without its block."""
    if opener == jamba.START:
        if (yield from s.skip_space()) in ("[", "{"):
            yield from jamba.read_array(s, opener)
            return
        if not (yield from s.take_literal(_CALL)):
            raise Malformed
    more = True
    while more:
        yield from _read_fenced(s)
        s.commit()
        more = (yield from s.skip(_CALL, jamba.END)) == _CALL


def _read_fenced(s: TextStream) -> Step[None]:
    """Read a call behind its opening tag, with its end tag."""
    if (yield from s.skip_space()) == "{":
        yield from read_calls(s)
        yield from s.skip(_END)
        return
    name, end = yield from s.read_name("\n", _FENCE, _END)
    call = s.begin_call(name)
    if end == _END:
        call.close()
        return
    yield from s.skip(_FENCE)
    yield from s.take_literal("json")
    yield from read_arguments(s, call)
    yield from s.skip(_FENCE)
    yield from s.skip(_END)


def _detect_a13b(template: str, tokens: frozenset[str]) -> bool:
    return all(text in template for text in (jamba.START, _CALL, _FENCE)) and "<arg_key>" not in template


def _detect_v3(template: str, tokens: frozenset[str]) -> bool:
    in_template = "<tool_calls" in template and "<arg_key" in template
    return in_template or all(any(t.startswith(tag) for t in tokens) for tag in ("<tool_calls", "<arg_key"))


def _detect_reasoning(template: str, tokens: frozenset[str]) -> bool:
    """Whether a template is Hunyuan's, which writes the tags with a suffix or among its own tokens."""
    a13b = "<think>" in template and (_ANSWER[0] in template or "<|extra_0|>" in template)
    return "<think{}>" in template or a13b or bool(_find_suffix(tokens))


def _find_suffix(tokens: frozenset[str]) -> str:
    """Find the suffix of the tags' names, "" if there is none."""
    found = sorted(match[1] for match in map(_SUFFIXED.fullmatch, tokens) if match)
    return found[0] if found else ""


def _adapt_v3(family: ToolCallFamily, tokens: frozenset[str]) -> ToolCallFamily:
    """The family with the suffix that a model's tokens have."""
    suffix = _find_suffix(tokens)
    tags = PairTags(suffix=suffix, separators=(f"<tool_sep{suffix}>",))
    block = (f"<tool_calls{suffix}>", f"</tool_calls{suffix}>")
    return dataclasses.replace(
        family,
        openers=(tags.opener,),
        read=tags.read,
        ignored=block,
        ends=(tags.close,),
        markers=(*tags.markers, f"<tool_sep{suffix}>", *block),
    )


def _adapt_thinking(family: ReasoningFamily, tokens: frozenset[str]) -> ReasoningFamily:
    suffix = _find_suffix(tokens)
    opener, closer = f"<think{suffix}>", f"</think{suffix}>"
    return dataclasses.replace(
        family,
        pairs=((opener, (closer,)),),
        ignored=() if suffix else _ANSWER,
        markers=(opener, closer),
        closing=f"\n{closer}\n",
    )


A13B = ToolCallFamily(
    name="hunyuan_a13b",
    detect=_detect_a13b,
    openers=(jamba.START, _CALL),
    read=_read_a13b,
    ignored=_ANSWER,
    ends=(_END, jamba.END),
    markers=(jamba.START, jamba.END, _CALL, _END),
    prefix_suffix=lambda name: (
        f"{jamba.START}{_CALL}{name}\n{_FENCE}json\n",
        f"\n{_FENCE}{_END}{jamba.END}",
    ),
)
V3 = _adapt_v3(
    ToolCallFamily(
        name="hunyuan_v3",
        detect=_detect_v3,
        ends_reasoning=True,
        aliases=("hunyuan", "hy_v3", "hy_v4"),
        adapt=_adapt_v3,
    ),
    frozenset(),
)
FAMILIES = (V3, A13B)
REASONING = _adapt_thinking(
    ReasoningFamily(
        name="hunyuan",
        detect=_detect_reasoning,
        pairs=(),
        aliases=("hunyuan_a13b", "hy_v3", "hy_v4"),
        adapt=_adapt_thinking,
    ),
    frozenset(),
)
