"""All families, and how a model's are found: by name, or from its chat template and added tokens.

`auto` takes the first family, in the order below, that recognises the template, so special formats stand
before general ones. A new family is one module in `families/` and one line here.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from mlxrun.api.parsers.families import (
    apertus,
    cohere,
    deepseek,
    deepseek_v4,
    ernie45,
    functionary,
    gemma,
    gigachat3,
    glm,
    granite,
    harmony,
    hermes,
    hunyuan,
    internlm2,
    jamba,
    kimi,
    kimi_k3,
    llama,
    longcat,
    minicpm5,
    minimax,
    minimax_m3,
    mistral,
    muse,
    olmo3,
    phi,
    plain_json,
    plamo3,
    pythonic,
    qwen3_coder,
    reasoning_tags,
    seed_oss,
    step,
    ui_tars,
    xlam,
)
from mlxrun.api.parsers.family import ReasoningFamily, ToolCallFamily
from mlxrun.api.parsers.model_formats import ModelFormats
from mlxrun.config.settings import ParserSettings
from mlxrun.core.errors import ConfigError

AUTO, NONE = "auto", "none"

TOOL_CALL_FAMILIES: tuple[ToolCallFamily, ...] = (
    harmony.FAMILY,
    muse.FAMILY,
    *gemma.FAMILIES,
    *deepseek_v4.FAMILIES,
    *deepseek.FAMILIES,
    kimi_k3.FAMILY,
    kimi.FAMILY,
    minimax_m3.FAMILY,
    minimax.FAMILY,
    *gigachat3.FAMILIES,
    plamo3.FAMILY,
    apertus.FAMILY,
    internlm2.FAMILY,
    *cohere.FAMILIES,
    *functionary.FAMILIES,
    longcat.FAMILY,
    *hunyuan.FAMILIES,
    jamba.FAMILY,
    *glm.FAMILIES,
    *mistral.FAMILIES,
    granite.FAMILY,
    phi.FAMILY,
    xlam.FAMILY,
    step.FAMILY,
    minicpm5.FAMILY,
    olmo3.FAMILY,
    pythonic.FAMILY,
    llama.FAMILY,
    seed_oss.FAMILY,
    qwen3_coder.FAMILY,
    ernie45.FAMILY,
    hermes.FAMILY,
    # These recognise no template. `auto` takes the last where no other family matches.
    ui_tars.FAMILY,
    plain_json.FAMILY,
)
REASONING_FAMILIES: tuple[ReasoningFamily, ...] = (
    harmony.REASONING,
    muse.REASONING,
    kimi_k3.REASONING,
    plamo3.REASONING,
    hunyuan.REASONING,
    ernie45.REASONING,
    *reasoning_tags.FAMILIES,
    ui_tars.REASONING,
)

F = TypeVar("F", bound=ToolCallFamily | ReasoningFamily)


def detect_formats(template: str | None, tokenizer: Any, settings: ParserSettings) -> ModelFormats:
    """Find the formats of a model, as the config says. Raises ConfigError for an unknown name."""
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
    return choose_formats(template, [token.content for token in added], settings.tools, settings.reasoning)


def choose_formats(
    template: str | None, tokens: Iterable[str], tools: str = AUTO, reasoning: str = AUTO
) -> ModelFormats:
    """Choose the families: "auto", "none" or a name each. Raises ConfigError for an unknown name.

    `tokens`: the texts of the tokenizer's added tokens. Where no family recognises the template, tool calls
    are read as plain JSON, and reasoning is not separated.
    """
    known = frozenset(tokens)
    calls = _choose(tools, TOOL_CALL_FAMILIES, "tool parser", template or "", known)
    if tools == AUTO and calls is None:
        calls = plain_json.FAMILY
    thinking = _choose(reasoning, REASONING_FAMILIES, "reasoning parser", template or "", known)
    return ModelFormats(
        calls.adapt(calls, known) if calls and calls.adapt else calls,
        thinking.adapt(thinking, known) if thinking and thinking.adapt else thinking,
    )


def _choose(name: str, families: Sequence[F], what: str, template: str, tokens: frozenset[str]) -> F | None:
    if name == NONE:
        return None
    if name != AUTO:
        return _find_family(name, families, what)
    return next((family for family in families if family.detect(template, tokens)), None)


def _find_family(name: str, families: Sequence[F], what: str) -> F:
    by_name = {known: family for family in families for known in (family.name, *family.aliases)}
    if name not in by_name:
        listed = sorted({*by_name, AUTO, NONE})
        close = difflib.get_close_matches(name, listed, 3)
        hint = f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""
        raise ConfigError(f"{name!r} is not the name of a {what}{hint}; docs/tools.md lists the names")
    return by_name[name]


def find_tool_call_family(name: str) -> ToolCallFamily:
    """Find a format of tool calls by its name or an alias. Raises ConfigError for an unknown name."""
    return _find_family(name, TOOL_CALL_FAMILIES, "tool parser")


def find_reasoning_family(name: str) -> ReasoningFamily:
    """Find a format of reasoning by its name or an alias. Raises ConfigError for an unknown name."""
    return _find_family(name, REASONING_FAMILIES, "reasoning parser")
