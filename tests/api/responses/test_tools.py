"""Tools and tool choices of Responses bodies."""

from __future__ import annotations

import logging

import pytest

from mlxrun.api.responses.fields import ABSENT_TOOLS, REFUSED_TOOLS
from mlxrun.api.responses.tools import read_tools
from mlxrun.core.errors import RequestError
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


@pytest.mark.parametrize("kind", ABSENT_TOOLS)
def test_they_are_refused_with_strict_fields_and_in_a_namespace(kind: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_tools({"tools": [ADD, {"type": kind}]}, strict=True)
    assert (caught.value.param, caught.value.code) == ("tools[1].type", "unsupported_parameter")
    space = {"type": "namespace", "name": "fs", "description": "d", "tools": [{"type": kind}]}
    assert refused(tools=[space]).param == "tools[0].tools[0].type"


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


@pytest.mark.parametrize("name", ["a b", "a\n", "", "x" * 129])
def test_what_is_no_name_of_a_tool_is_refused(name: str) -> None:
    """Neither of a tool, nor of a namespace, nor as the model would see it."""
    bad, space = {**ADD, "name": name}, {"type": "namespace", "name": "fs", "description": "d"}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}
    assert refused(tools=[ADD, bad], tool_choice=choice).param == "tools[1].name"
    assert refused(tools=[ADD, {**space, "name": name, "tools": [ADD]}]).param == "tools[1].name"
    assert refused(tools=[ADD, {**space, "tools": [ADD, bad]}]).param == "tools[1].tools[1].name"
    (made,) = chat(tools=[{**ADD, "name": "fs.a/b:c"}])["tools"]
    assert made["function"]["name"] == "fs.a/b:c"


def test_two_tools_of_one_name_are_refused() -> None:
    assert refused(tools=[ADD, ADD]).param == "tools[1].name"
