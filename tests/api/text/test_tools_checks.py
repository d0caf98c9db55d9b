"""Tools of the wrong shape are refused, and hints in them are left out of the prompt."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.openai_api import CHAT, HI, TOOL, chat, refused
from tests.helpers.tokenizers import TOOLS, FakeModelInfo


@pytest.mark.parametrize(
    ("tool", "where"),
    [
        ({"type": "function"}, "tools[0].function"),
        ({"type": "function", "function": None}, "tools[0].function"),
        ({"type": "function", "function": {}}, "tools[0].function.name"),
        ({}, "tools[0].type"),
    ],
)
def test_what_a_tool_lacks_is_missing(tool: dict[str, Any], where: str) -> None:
    """Not null where nothing was sent."""
    error = refused(CHAT, {"messages": HI, "tools": [tool]})
    assert (str(error), error.param, error.code) == (f"{where}: missing", where, "missing_field")
    assert "expected object, got string" in str(
        refused(CHAT, {"messages": HI, "tools": [{"type": "function", "function": "f"}]})
    )


def test_hints_of_other_services_are_not_in_the_prompt() -> None:
    """A tool is written to the prompt as it is, but for what only a service's cache would read."""
    model = FakeModelInfo(chat_template=TOOLS)
    plain = chat(model, tools=[TOOL]).prompts
    marked = {**TOOL, "cache_control": {"type": "ephemeral"}}
    inner = {**TOOL, "function": {**TOOL["function"], "cache_control": {"type": "ephemeral"}}}
    assert chat(model, tools=[marked]).prompts == chat(model, tools=[inner]).prompts == plain
    assert chat(model, tools=[{**TOOL, "own": 1}]).prompts != plain


def name_tools(*names: str) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in names
    ]


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_two_tools_of_one_name_are_refused(choice: str) -> None:
    """No answer could tell them apart."""
    error = refused(CHAT, {"messages": HI, "tools": name_tools("f", "g", "f"), "tool_choice": choice})
    assert (error.param, "there are two tools called 'f'" in str(error)) == ("tools[2].function.name", True)


@pytest.mark.parametrize(
    "name", ["a b", "a\n", "\ta", "a\x00", "a\u00a0b", "a\u200b", "a\x7f", "", "x" * 129]
)
def test_what_is_no_name_of_a_tool_is_refused(name: str) -> None:
    error = refused(CHAT, {"messages": HI, "tools": name_tools("f", name)})
    assert error.param == "tools[1].function.name"


@pytest.mark.parametrize("name", ["get_weather-2", "mcp.fs/read", "fs:read", "größe", "@a/b", "x" * 128])
def test_names_that_clients_use_with_mcp_servers(name: str) -> None:
    assert name in chat(FakeModelInfo(chat_template=TOOLS), tools=name_tools(name)).prompts[0]
