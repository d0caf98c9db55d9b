"""Finds a model's families by name, or by its chat template and added tokens.

`auto` takes the first family in `families/tool_calls.py` or `families/reasoning.py` that recognizes them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from mlxrun.api.parsers.answer_parser import ModelFormats
from mlxrun.api.parsers.families.json_objects import PLAIN_JSON
from mlxrun.api.parsers.families.reasoning import REASONING_FAMILIES
from mlxrun.api.parsers.families.tool_calls import TOOL_CALL_FAMILIES
from mlxrun.api.parsers.family import ReasoningFamily, ToolCallFamily
from mlxrun.config.settings import ParserSettings
from mlxrun.core.errors import ConfigError

__all__ = ["REASONING_FAMILIES", "TOOL_CALL_FAMILIES", "choose_formats", "detect_formats"]
__all__ += ["find_reasoning_family", "find_tool_call_family"]

AUTO, NONE = "auto", "none"

F = TypeVar("F", bound=ToolCallFamily | ReasoningFamily)


def detect_formats(template: str | None, tokenizer: Any, settings: ParserSettings) -> ModelFormats:
    """Find the formats of a model with the config's settings. ConfigError for an unknown name."""
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
    return choose_formats(template, [token.content for token in added], settings.tools, settings.reasoning)


def choose_formats(
    template: str | None, tokens: Iterable[str], tools: str = AUTO, reasoning: str = AUTO
) -> ModelFormats:
    """Choose the families. `tools` and `reasoning`: "auto", "none" or a name; ConfigError for an unknown one.

    `tokens`: the texts of the tokenizer's added tokens. If no family recognizes the template, tool calls are
    read as plain JSON, and reasoning is not separated.
    """
    known = frozenset(tokens)
    calls = _choose(tools, TOOL_CALL_FAMILIES, "tool parser", template or "", known)
    if tools == AUTO and calls is None:
        calls = PLAIN_JSON
    thinking = _choose(reasoning, REASONING_FAMILIES, "reasoning parser", template or "", known)
    return ModelFormats(
        calls.adapt(known) if calls and calls.adapt else calls,
        thinking.adapt(known) if thinking and thinking.adapt else thinking,
    )


def _choose(name: str, families: Sequence[F], what: str, template: str, tokens: frozenset[str]) -> F | None:
    if name == NONE:
        return None
    if name != AUTO:
        return _find_family(name, families, what)
    return next((family for family in families if family.detect(template, tokens)), None)


def _find_family(name: str, families: Sequence[F], what: str) -> F:
    found = next((family for family in families if name in (family.name, *family.aliases)), None)
    if found is None:
        names = (known for family in families for known in (family.name, *family.aliases))
        listed = sorted({*names, AUTO, NONE})
        close = difflib.get_close_matches(name, listed, 3)
        hint = f" (did you mean {' or '.join(map(repr, close))}?)" if close else ""
        raise ConfigError(f"{name!r} is not the name of a {what}{hint}; docs/tools.md lists the names")
    return found


def find_tool_call_family(name: str) -> ToolCallFamily:
    """Find a format of tool calls by its name or an alias. ConfigError for an unknown name."""
    return _find_family(name, TOOL_CALL_FAMILIES, "tool parser")


def find_reasoning_family(name: str) -> ReasoningFamily:
    """Find a format of reasoning by its name or an alias. ConfigError for an unknown name."""
    return _find_family(name, REASONING_FAMILIES, "reasoning parser")
