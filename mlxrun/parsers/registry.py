"""All families, and how one is chosen: by name, or from the chat template and the tokenizer's added tokens.

`auto` takes the first family, in the order below, that knows the template; special formats stand before
general ones. A new family is one file and one line here.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable
from dataclasses import dataclass

from mlxrun.errors import ConfigError
from mlxrun.parsers.family import ReasoningFamily, ToolCallFamily

AUTO, NONE = "auto", "none"


@functools.lru_cache(maxsize=1)
def families() -> tuple[ToolCallFamily, ...]:
    """Formats of calls, in the order in which `auto` asks them."""
    from mlxrun.parsers.families import (
        deepseek,
        gemma,
        glm,
        granite,
        harmony,
        hermes,
        kimi,
        llama,
        longcat,
        minimax,
        mistral,
        phi,
        plain_json,
        pythonic,
        qwen3_coder,
        seed_oss,
        step,
        xlam,
    )

    return (
        harmony.FAMILY,
        *gemma.FAMILIES,
        *deepseek.FAMILIES,
        kimi.FAMILY,
        minimax.FAMILY,
        longcat.FAMILY,
        glm.FAMILY,
        *mistral.FAMILIES,
        granite.FAMILY,
        phi.FAMILY,
        xlam.FAMILY,
        step.FAMILY,
        pythonic.FAMILY,
        llama.FAMILY,
        seed_oss.FAMILY,
        qwen3_coder.FAMILY,
        hermes.FAMILY,
        plain_json.FAMILY,  # knows no template: the last resort
    )


@functools.lru_cache(maxsize=1)
def thinkings() -> tuple[ReasoningFamily, ...]:
    """Formats of thoughts, in the order in which `auto` asks them."""
    from mlxrun.parsers.families import harmony, reasoning_tags

    return (
        harmony.THINKING,
        *reasoning_tags.FAMILIES,
    )


@dataclass(frozen=True, slots=True)
class ChosenFamilies:
    """The formats that a model's answers are read by."""

    tools: ToolCallFamily | None
    reasoning: ReasoningFamily | None

    @property
    def markers(self) -> tuple[str, ...]:
        """Special tokens whose text the parsers must see."""
        both = (
            *(self.tools.markers if self.tools else ()),
            *(self.reasoning.markers if self.reasoning else ()),
        )
        return tuple(dict.fromkeys(both))


def choose(
    template: str | None, tokens: Iterable[str], tools: str = AUTO, reasoning: str = AUTO
) -> ChosenFamilies:
    """The families for a model: "auto", "none" or a name each. Raises ConfigError for an unknown name.

    `tokens`: the texts of the tokenizer's added tokens. Where nothing knows the template, calls are looked
    for by the last resort, and thoughts not at all.
    """
    known = frozenset(tokens)
    text = template or ""
    family: ToolCallFamily | None = None
    thinking: ReasoningFamily | None = None
    if tools == AUTO:
        family = next((f for f in families() if f.detect(text, known)), families()[-1])
    elif tools != NONE:
        family = tool_family(tools)
    if reasoning == AUTO:
        thinking = next((f for f in thinkings() if f.detect(text, known)), None)
    elif reasoning != NONE:
        thinking = thinking_family(reasoning)
    return ChosenFamilies(family, thinking)


def tool_family(name: str) -> ToolCallFamily:
    """The format of calls of this name or alias."""
    by_name = {n: f for f in families() for n in (f.name, *f.aliases)}
    if name not in by_name:
        raise _unknown("tool parser", name, by_name)
    return by_name[name]


def thinking_family(name: str) -> ReasoningFamily:
    """The format of thoughts of this name or alias."""
    by_name = {n: f for f in thinkings() for n in (f.name, *f.aliases)}
    if name not in by_name:
        raise _unknown("reasoning parser", name, by_name)
    return by_name[name]


def names() -> dict[str, tuple[str, ...]]:
    """The names that a config may give, aliases left out, by what they choose."""
    return {
        "tools": (AUTO, NONE, *(f.name for f in families())),
        "reasoning": (AUTO, NONE, *(f.name for f in thinkings())),
    }


def _unknown(what: str, name: str, options: Iterable[str]) -> ConfigError:
    listed = sorted({*options, AUTO, NONE})
    close = difflib.get_close_matches(name, listed, 1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return ConfigError(f"{name!r} is no {what}{hint}; there are {', '.join(listed)}")
