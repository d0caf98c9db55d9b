"""Anthropic's typed tools are functions in the prompt, with the names and fields of its documentation."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest
from jsonschema import Draft202012Validator

from mlxrun.api.anthropic.request import read_message
from mlxrun.api.anthropic.typed_tools import TYPED_TOOLS
from tests.helpers.anthropic_api import (
    TOOL_MODEL_INFO,
    USER,
    Json,
    body,
    context,
    make,
    refused,
)

NAMES = {
    "bash_20241022": "bash",
    "bash_20250124": "bash",
    "text_editor_20241022": "str_replace_editor",
    "text_editor_20250124": "str_replace_editor",
    "text_editor_20250429": "str_replace_based_edit_tool",
    "text_editor_20250728": "str_replace_based_edit_tool",
    "memory_20250818": "memory",
}


def read(tool: Json, **fields: Any) -> Json:
    chat = read_message(body(tools=[tool], **fields), context(TOOL_MODEL_INFO)).chat
    return chat["tools"][0]


@pytest.mark.parametrize("kind", list(NAMES))
def test_a_typed_tool_is_a_function(kind: str) -> None:
    tool = read({"type": kind, "name": NAMES[kind]})
    assert tool["type"] == "function" and tool["function"]["name"] == NAMES[kind]
    assert len(tool["function"]["description"]) > 40
    Draft202012Validator.check_schema(tool["function"]["parameters"])
    prompt = make(body(tools=[{"type": kind, "name": NAMES[kind]}]), TOOL_MODEL_INFO).prepared.prompts[0]
    assert f'"name": "{NAMES[kind]}"' in prompt
    wrong = refused(body(tools=[{"type": kind, "name": "sh"}]), TOOL_MODEL_INFO)
    assert wrong.param == "tools.0.name"


def test_they_are_those_that_the_sdk_lets_the_client_run() -> None:
    """Each type of a shell, an editor or a memory in the SDK is known, under the name that it has there."""
    from anthropic.types.beta import beta_tool_union_param

    found = {}
    for param in get_args(beta_tool_union_param.BetaToolUnionParam):
        hints = get_type_hints(param)
        kinds = [text for text in _find_literals(hints.get("type")) if text.split("_")[0] in KINDS]
        found.update({kind: _find_literals(hints["name"])[0] for kind in kinds})
    assert found == NAMES and TYPED_TOOLS.keys() == NAMES.keys()


KINDS = ("bash", "text", "memory")


def _find_literals(hint: Any) -> list[str]:
    return (
        [hint]
        if isinstance(hint, str)
        else [text for part in get_args(hint) for text in _find_literals(part)]
    )


INPUTS: list[tuple[str, Json]] = [
    ("bash_20250124", {"command": "ls -la"}),
    ("bash_20250124", {"restart": True}),
    ("text_editor_20250124", {"command": "view", "path": "/a.py", "view_range": [1, -1]}),
    ("text_editor_20250124", {"command": "insert", "path": "/a.py", "insert_line": 0, "new_str": "x"}),
    ("text_editor_20250124", {"command": "undo_edit", "path": "/a.py"}),
    ("text_editor_20250728", {"command": "create", "path": "/a.py", "file_text": "x"}),
    ("text_editor_20250728", {"command": "str_replace", "path": "/a.py", "old_str": "x", "new_str": "y"}),
    ("text_editor_20250728", {"command": "insert", "path": "/a.py", "insert_line": 2, "insert_text": "x"}),
    ("memory_20250818", {"command": "rename", "old_path": "/memories/a", "new_path": "/memories/b"}),
    ("memory_20250818", {"command": "delete", "path": "/memories/a"}),
]


@pytest.mark.parametrize(("kind", "given"), INPUTS)
def test_the_schemas_take_the_documented_inputs(kind: str, given: Json) -> None:
    parameters = TYPED_TOOLS[kind]["parameters"]
    assert Draft202012Validator(parameters).is_valid(given)
    assert given.keys() <= parameters["properties"].keys()


def test_the_schemas_refuse_other_commands() -> None:
    for kind, command in (("text_editor_20250728", "undo_edit"), ("text_editor_20250124", "delete")):
        given = {"command": command, "path": "/a.py"}
        assert not Draft202012Validator(TYPED_TOOLS[kind]["parameters"]).is_valid(given)


def test_options() -> None:
    tool = {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"}
    assert "at most 9 characters" in read({**tool, "max_characters": 9.0})["function"]["description"]
    error = refused(
        body(tools=[{**tool, "type": "text_editor_20250429", "max_characters": 9}]), TOOL_MODEL_INFO
    )
    assert error.param == "tools.0.max_characters"
    examples = [{"command": "view", "path": "/x"}]
    assert '"path": "/x"' in read({**tool, "input_examples": examples})["function"]["description"]
    choice = {"type": "tool", "name": "bash", "disable_parallel_tool_use": True}
    chat = read_message(
        body(tools=[{"type": "bash_20250124", "name": "bash"}], tool_choice=choice), context(TOOL_MODEL_INFO)
    ).chat
    assert chat["tool_choice"]["function"]["name"] == "bash"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("computer_20250124", "there is no screen"),
        ("browser_toolset_20260801", "there is no browser"),
        ("web_search_20250305", "there are no server tools"),
        ("code_execution_20250825", "there are no server tools"),
        ("mcp_toolset", "MCP"),
        ("bash_29990101", "there are no server tools"),
    ],
)
def test_others_are_refused(kind: str, words: str) -> None:
    error = refused(body([USER], tools=[{"type": kind, "name": "x"}]), TOOL_MODEL_INFO)
    assert error.param == "tools.0.type" and words in str(error)
