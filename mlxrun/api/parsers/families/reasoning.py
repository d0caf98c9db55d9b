"""The formats of reasoning, in the order in which `auto` tries them.

An answer may mention `<think>`, so a tag of plain characters opens reasoning only where text begins. A tag
that is a special token opens it anywhere.
"""

from __future__ import annotations

import re
from typing import Any

from mlxrun.api.parsers.families import message_formats
from mlxrun.api.parsers.families.call_elements import KIMI_K3_CONTENT, KIMI_K3_MARKERS
from mlxrun.api.parsers.families.named_calls import PLAMO_TOKENS
from mlxrun.api.parsers.family import ReasoningFamily, any_of, in_template, in_tokens, is_shown

COHERE_CONTENT = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
RESPONSE = ("<response>", "</response>")
_ANSWER = ("<answer>", "</answer>")  # the tags around content in Hunyuan's answers
_CHANNEL = "<|channel>"
# What ends a channel of reasoning: its end tag, or a channel of content, whose label is left out anywhere.
_CHANNEL_ENDS = ("<channel|>", *(f"{_CHANNEL}{label}" for label in ("content", "response", "final")))
_GRANITE = ("Here is my response:", "Here's my response:")
_SUFFIXED = re.compile(r"<(?:tool_calls|think)(:[^\s<>]+)>")


def _make_family(name: str, opener: str, closer: str, *aliases: str, **fields: Any) -> ReasoningFamily:
    """Make the family of one pair of tags, whose opening tag shows it. `fields`: other fields of
    ReasoningFamily."""
    made = {
        "detect": is_shown(opener),
        "pairs": ((opener, (closer,)),),
        "markers": (opener, closer, *fields.get("ignored", ())),
        "closing": f"\n{closer}\n\n" if closer.startswith("</") else closer,
    }
    return ReasoningFamily(name=name, aliases=aliases, **{**made, **fields})


def find_suffix(tokens: frozenset[str]) -> str:
    """Find the suffix that the names of Hunyuan's tags have in one model; "" if there is none."""
    found = sorted(match[1] for match in map(_SUFFIXED.fullmatch, tokens) if match)
    return found[0] if found else ""


def _make_hunyuan(suffix: str = "") -> ReasoningFamily:
    opener, closer = f"<think{suffix}>", f"</think{suffix}>"
    return _make_family(
        *("hunyuan", opener, closer, "hunyuan_a13b", "hy_v3", "hy_v4"),
        detect=any_of(
            in_template("<think{}>"),
            in_template("<think>", _ANSWER[0]),
            in_template("<think>", "<|extra_0|>"),
            lambda template, tokens: bool(find_suffix(tokens)),
        ),
        ignored=() if suffix else _ANSWER,
        markers=(opener, closer),
        closing=f"\n{closer}\n",
        adapt=lambda tokens: _make_hunyuan(find_suffix(tokens)),
    )


def is_ernie(template: str, tokens: frozenset[str]) -> bool:
    """Tell whether ERNIE's tags occur. MiniMax also has `<response>`, for results of tools; Granite has no
    `<tool_call>`."""
    both = ("<tool_call>", RESPONSE[0])
    return "minimax" not in template and any_of(in_template(*both), in_tokens(*both))(template, tokens)


REASONING_FAMILIES: tuple[ReasoningFamily, ...] = (
    message_formats.HARMONY_REASONING,
    message_formats.MUSE_REASONING,
    ReasoningFamily(
        name="kimi_k3",
        detect=any_of(in_template("<|open|>", "<|sep|>"), in_tokens("<|open|>", "<|close|>", "<|sep|>")),
        # Structured output begins where content does: behind the tag that opens its channel.
        pairs=(("<|open|>think<|sep|>", ("<|open|>response<|sep|>", "<|close|>think<|sep|>")),),
        anywhere=True,
        ignored=KIMI_K3_CONTENT,
        markers=KIMI_K3_MARKERS,
        closing="<|close|>think<|sep|><|open|>response<|sep|>",
    ),
    _make_family(
        *("plamo3", "<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
        detect=any_of(in_template("<|plamo:begin_think:plamo|>"), in_tokens(PLAMO_TOKENS[0])),
        anywhere=True,
        ignored=("<|plamo:tag|>",),
        markers=PLAMO_TOKENS,
    ),
    _make_hunyuan(),
    _make_family("ernie45", "<think>", "</think>", "ernie_x1", detect=is_ernie, ignored=RESPONSE),
    _make_family("seed_oss", "<seed:think>", "</seed:think>", "seed"),
    ReasoningFamily(
        name="gemma4",
        aliases=("gemma",),
        detect=is_shown(_CHANNEL),
        pairs=((f"{_CHANNEL}thought", _CHANNEL_ENDS),),
        anywhere=True,
        variants=(_CHANNEL,),
        ignored=_CHANNEL_ENDS[1:],
        markers=(f"{_CHANNEL}thought", _CHANNEL, *_CHANNEL_ENDS),
        closing=_CHANNEL_ENDS[0],
    ),
    _make_family("mistral", "[THINK]", "[/THINK]", "magistral", anywhere=True),
    _make_family("cohere", "<|START_THINKING|>", "<|END_THINKING|>", anywhere=True, ignored=COHERE_CONTENT),
    _make_family("minimax_m3", "<mm:think>", "</mm:think>", anywhere=True),
    _make_family("apertus", "<|inner_prefix|>", "<|inner_suffix|>", anywhere=True),
    _make_family("longcat", "<longcat_think>", "</longcat_think>"),
    _make_family("kimi_vl", "◁think▷", "◁/think▷"),
    _make_family(
        "apriel",
        "Here are my reasoning steps:",
        "[BEGIN FINAL RESPONSE]",
        detect=is_shown("[BEGIN FINAL RESPONSE]"),
        ignored=("[END FINAL RESPONSE]",),
    ),
    ReasoningFamily(
        name="granite",
        detect=in_template("Here is my thought process"),
        pairs=(("Here is my thought process:", _GRANITE), ("Here's my thought process:", _GRANITE)),
        closing=f"\n\n{_GRANITE[0]}\n",
    ),
    _make_family(
        "granite3_3",
        "<think>",
        "</think>",
        detect=is_shown("<response>", "<|start_of_role|>"),
        ignored=RESPONSE,
    ),
    _make_family(
        "think",
        "<think>",
        "</think>",
        *("qwen3", "deepseek_r1", "glm", "glm4_5", "step3_5", "minimax_m2", "nemotron", "kimi_k2"),
        *("deepseek_v4", "deepseek_v41", "gigachat35", "ling3", "minicpm5", "olmo3"),
    ),
    ReasoningFamily(name="ui_tars", pairs=(("Thought:", ("Action:",)),), closing="\nAction:"),
)
