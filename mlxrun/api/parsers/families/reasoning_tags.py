"""Reasoning between two tags: the families that differ only in their tags.

A tag of plain characters opens reasoning only where text begins, as an answer may mention `<think>`. A tag
that is a special token opens it anywhere.
"""

from __future__ import annotations

from mlxrun.api.parsers.families.cohere import CONTENT_TAGS
from mlxrun.api.parsers.family import ReasoningFamily


def _tags(
    name: str,
    opener: str,
    closer: str,
    *aliases: str,
    anywhere: bool = False,
    detected_by: tuple[str, ...] = (),
    ignored: tuple[str, ...] = (),
) -> ReasoningFamily:
    """Make the family of one pair of tags. `detected_by`: all that has to show for it, if not `opener`."""
    shown = detected_by or (opener,)
    return ReasoningFamily(
        name=name,
        detect=lambda template, tokens: all(text in tokens or text in template for text in shown),
        pairs=((opener, (closer,)),),
        anywhere=anywhere,
        ignored=ignored,
        aliases=aliases,
        markers=(opener, closer, *ignored),
        closing=f"\n{closer}\n\n" if closer.startswith("</") else closer,
    )


_CHANNEL = "<|channel>"
# What ends a channel of reasoning: its end tag, or a channel of content, whose label is left out anywhere.
_CHANNEL_ENDS = ("<channel|>", *(f"{_CHANNEL}{label}" for label in ("content", "response", "final")))
_GRANITE = ("Here is my response:", "Here's my response:")

FAMILIES = (
    _tags("seed_oss", "<seed:think>", "</seed:think>", "seed"),
    ReasoningFamily(
        name="gemma4",
        detect=lambda template, tokens: _CHANNEL in tokens or _CHANNEL in template,
        pairs=((f"{_CHANNEL}thought", _CHANNEL_ENDS),),
        anywhere=True,
        variants=(_CHANNEL,),
        ignored=_CHANNEL_ENDS[1:],
        aliases=("gemma",),
        markers=(f"{_CHANNEL}thought", _CHANNEL, *_CHANNEL_ENDS),
        closing=_CHANNEL_ENDS[0],
    ),
    _tags("mistral", "[THINK]", "[/THINK]", "magistral", anywhere=True),
    _tags("cohere", "<|START_THINKING|>", "<|END_THINKING|>", anywhere=True, ignored=CONTENT_TAGS),
    _tags("minimax_m3", "<mm:think>", "</mm:think>", anywhere=True),
    _tags("apertus", "<|inner_prefix|>", "<|inner_suffix|>", anywhere=True),
    _tags("longcat", "<longcat_think>", "</longcat_think>"),
    _tags("kimi_vl", "◁think▷", "◁/think▷"),
    _tags(
        "apriel",
        "Here are my reasoning steps:",
        "[BEGIN FINAL RESPONSE]",
        detected_by=("[BEGIN FINAL RESPONSE]",),
        ignored=("[END FINAL RESPONSE]",),
    ),
    ReasoningFamily(
        name="granite",
        detect=lambda template, tokens: "Here is my thought process" in template,
        pairs=(("Here is my thought process:", _GRANITE), ("Here's my thought process:", _GRANITE)),
        closing=f"\n\n{_GRANITE[0]}\n",
    ),
    _tags(
        "granite3_3",
        "<think>",
        "</think>",
        detected_by=("<response>", "<|start_of_role|>"),
        ignored=("<response>", "</response>"),
    ),
    _tags(
        "think",
        "<think>",
        "</think>",
        *("qwen3", "deepseek_r1", "glm", "glm4_5", "step3_5", "minimax_m2", "nemotron", "kimi_k2"),
        *("deepseek_v4", "deepseek_v41", "gigachat35", "ling3", "minicpm5", "olmo3"),
    ),
)
