"""Formats of tool calls and of reasoning: what a model writes, split into text, thought and calls.

`choose` finds the formats of a model; `AnswerParser` reads one answer by them. `tool_parser` and
`reasoning_parser` are one format alone. All are `delta.Parser`s: `feed` text in any pieces, then `finish`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlxrun.parsers.answer_parser import AnswerParser, opened_by
from mlxrun.parsers.delta import Delta, Parser
from mlxrun.parsers.delta_builder import new_call_id
from mlxrun.parsers.registry import ChosenFamilies, choose, names, thinking_family, tool_family
from mlxrun.parsers.state_machine import AnswerStateMachine
from mlxrun.parsers.tool_schemas import ToolSchemas

__all__ = [
    "AnswerParser",
    "ChosenFamilies",
    "Delta",
    "Parser",
    "choose",
    "names",
    "opened_by",
    "reasoning_parser",
    "tool_parser",
]


def tool_parser(
    name: str, tools: Sequence[Mapping[str, Any]] | None, *, new_id: Callable[[], str] = new_call_id
) -> Parser:
    """A parser of calls alone. `tools`: the request's, in OpenAI form; without any, all is text.

    Raises ConfigError for an unknown name.
    """
    family, offered = tool_family(name), ToolSchemas(tools)
    return AnswerStateMachine(family if offered else None, None, offered, new_id=new_id)


def reasoning_parser(name: str, *, opened: bool = False) -> Parser:
    """A parser of thoughts alone. `opened`: the prompt ends within one.

    Raises ConfigError for an unknown name.
    """
    return AnswerStateMachine(None, thinking_family(name), ToolSchemas(None), opened=opened)
