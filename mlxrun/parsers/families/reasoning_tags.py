"""Thoughts between two tags, in the tags of each family.

A tag of plain characters opens a thought only where text begins: an answer may speak of `<think>`. A tag
that is a special token does so anywhere.
"""

from __future__ import annotations

from collections.abc import Callable

from mlxrun.parsers.delta_builder import SPACE
from mlxrun.parsers.family import ReasoningFamily


def left_open(opener: str) -> Callable[[str], bool]:
    """Whether a prompt ends with the opening tag, and white space."""
    return lambda prompt: prompt.rstrip(SPACE).endswith(opener)


def _tags(
    name: str,
    opener: str,
    end: str,
    *aliases: str,
    anywhere: bool = False,
    token: str = "",
    drops: tuple[str, ...] = (),
) -> ReasoningFamily:
    """A family of one pair of tags. `token`: what tells it, if not the opening tag."""
    mark = token or opener
    return ReasoningFamily(
        name=name,
        detect=lambda template, tokens: mark in tokens or mark in template,
        pairs=((opener, (end,)),),
        anywhere=anywhere,
        opened=left_open(opener),
        drops=drops,
        aliases=aliases,
        markers=(opener, end, *drops),
        closing=f"\n{end}\n\n" if end.startswith("</") else end,
    )


_GRANITE = ("Here is my response:", "Here's my response:")
_RESPONSE = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")

FAMILIES = (
    _tags("seed_oss", "<seed:think>", "</seed:think>", "seed"),
    _tags("gemma4", "<|channel>thought", "<channel|>", "gemma", anywhere=True, token="<|channel>"),
    _tags("mistral", "[THINK]", "[/THINK]", "magistral", anywhere=True),
    _tags("cohere", "<|START_THINKING|>", "<|END_THINKING|>", anywhere=True, drops=_RESPONSE),
    _tags("longcat", "<longcat_think>", "</longcat_think>"),
    _tags("kimi_vl", "◁think▷", "◁/think▷"),
    ReasoningFamily(
        name="granite",
        detect=lambda template, tokens: "Here is my thought process" in template,
        pairs=(("Here is my thought process:", _GRANITE), ("Here's my thought process:", _GRANITE)),
        closing=f"\n\n{_GRANITE[0]}\n",
    ),
    _tags("granite3_3", "<think>", "</think>", token="<response>", drops=("<response>", "</response>")),
    _tags(
        "think",
        "<think>",
        "</think>",
        *("qwen3", "deepseek_r1", "glm", "glm4_5", "step3_5", "minimax_m2", "nemotron", "kimi_k2"),
    ),
)
