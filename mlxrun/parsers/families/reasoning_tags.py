"""Reasoning between two tags: the families that differ only in their tags.

A tag of plain characters opens reasoning only where text begins, as an answer may mention `<think>`. A tag
that is a special token opens it anywhere.
"""

from __future__ import annotations

from mlxrun.parsers.family import ReasoningFamily


def _tags(
    name: str,
    opener: str,
    closer: str,
    *aliases: str,
    anywhere: bool = False,
    detected_by: str = "",
    ignored: tuple[str, ...] = (),
) -> ReasoningFamily:
    """Make the family of one pair of tags. `detected_by`: what shows that a model has it, if not `opener`."""
    marker = detected_by or opener
    return ReasoningFamily(
        name=name,
        detect=lambda template, tokens: marker in tokens or marker in template,
        pairs=((opener, (closer,)),),
        anywhere=anywhere,
        ignored=ignored,
        aliases=aliases,
        markers=(opener, closer, *ignored),
        closing=f"\n{closer}\n\n" if closer.startswith("</") else closer,
    )


_GRANITE = ("Here is my response:", "Here's my response:")
_RESPONSE = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")

FAMILIES = (
    _tags("seed_oss", "<seed:think>", "</seed:think>", "seed"),
    _tags("gemma4", "<|channel>thought", "<channel|>", "gemma", anywhere=True, detected_by="<|channel>"),
    _tags("mistral", "[THINK]", "[/THINK]", "magistral", anywhere=True),
    _tags("cohere", "<|START_THINKING|>", "<|END_THINKING|>", anywhere=True, ignored=_RESPONSE),
    _tags("longcat", "<longcat_think>", "</longcat_think>"),
    _tags("kimi_vl", "◁think▷", "◁/think▷"),
    ReasoningFamily(
        name="granite",
        detect=lambda template, tokens: "Here is my thought process" in template,
        pairs=(("Here is my thought process:", _GRANITE), ("Here's my thought process:", _GRANITE)),
        closing=f"\n\n{_GRANITE[0]}\n",
    ),
    _tags(
        "granite3_3", "<think>", "</think>", detected_by="<response>", ignored=("<response>", "</response>")
    ),
    _tags(
        "think",
        "<think>",
        "</think>",
        *("qwen3", "deepseek_r1", "glm", "glm4_5", "step3_5", "minimax_m2", "nemotron", "kimi_k2"),
    ),
)
