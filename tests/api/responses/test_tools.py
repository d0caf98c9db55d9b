"""Tools and tool choices of Responses bodies."""

from __future__ import annotations

import logging

import pytest

from mlxrun.api.responses.fields import ABSENT_TOOLS, REFUSED_TOOLS
from tests.helpers.responses_api import ADD, chat, read, refused


def test_tools_in_all_forms(caplog: pytest.LogCaptureFixture) -> None:
    patch = {"type": "custom", "name": "patch", "description": "p", "format": {"type": "text"}}
    space = {"type": "namespace", "name": "mcp__fs", "description": "files", "tools": [ADD]}
    with caplog.at_level(logging.WARNING):
        what = read(tools=[ADD, {"type": "web_search"}, patch, space])
    names = [tool["function"]["name"] for tool in what.chat["tools"]]
    assert names == ["add", "patch", "mcp__fs__add"]
    assert what.chat["tools"][1]["function"]["parameters"]["required"] == ["input"]
    assert [tool["type"] for tool in what.tools.echo] == ["function", "custom", "namespace"]
    assert "mlxrun has no web_search tool" in caplog.text


@pytest.mark.parametrize("kind", ABSENT_TOOLS)
def test_tools_that_clients_add_by_default_are_left_out(kind: str) -> None:
    what = read(tools=[{"type": kind, "anything": 1}])
    assert "tools" not in what.chat and what.tools.echo == []


@pytest.mark.parametrize("kind", REFUSED_TOOLS)
def test_other_tools_of_the_original_are_refused(kind: str) -> None:
    error = refused(tools=[{"type": kind}])
    assert (error.param, error.code) == ("tools[0].type", "unsupported_parameter")


def test_tool_choice() -> None:
    sub = {**ADD, "name": "sub"}
    function = {"type": "function", "function": {"name": "sub"}}
    assert chat(tools=[ADD, sub], tool_choice={"type": "function", "name": "sub"})["tool_choice"] == function
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "sub"}]}
    body = chat(tools=[ADD, sub], tool_choice=allowed)
    assert [tool["function"]["name"] for tool in body["tools"]] == ["sub"]
    assert body["tool_choice"] == "auto"
    assert "tool_choice" not in chat(tools=[ADD])
