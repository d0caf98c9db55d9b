"""Chat bodies of Inspect's requests."""

from __future__ import annotations

import pytest

from mlxrun.core.errors import RequestError
from mlxrun.evals.harnesses.inspect_bodies import build_chat_body

MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}


def test_settings_become_fields() -> None:
    config = {"stop_seqs": ["x"], "num_choices": 2, "seed": 0, "reasoning_tokens": 9, "logit_bias": {5: 1.0}}
    assert build_chat_body(MESSAGES, [], "auto", config) == {
        "messages": MESSAGES,
        "stop": ["x"],
        "n": 2,
        "seed": 0,
        "thinking_budget": 9,
        "logit_bias": {"5": 1.0},
    }


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", "auto"),
        ("none", "none"),
        ("any", "required"),
        ({"name": "look"}, {"type": "function", "function": {"name": "look"}}),
    ],
)
def test_tools(choice: object, expected: object) -> None:
    body = build_chat_body(MESSAGES, [TOOL], choice, {"parallel_tool_calls": False})
    assert body["tools"] == [{"type": "function", "function": TOOL | {"strict": True}}]
    assert (body["tool_choice"], body["parallel_tool_calls"]) == (expected, False)


def test_without_tools_there_is_no_choice_of_them() -> None:
    assert build_chat_body(MESSAGES, [], "none", {"parallel_tool_calls": True}) == {"messages": MESSAGES}


def test_a_response_schema() -> None:
    schema = {"name": "sky", "json_schema": {"type": "object"}, "strict": True}
    body = build_chat_body(MESSAGES, [], "auto", {"response_schema": schema})
    named = {"name": "sky", "schema": {"type": "object"}, "strict": True}
    assert body["response_format"] == {"type": "json_schema", "json_schema": named}
    assert schema["json_schema"], "the setting itself is unchanged"


def test_extra_fields_come_last() -> None:
    config = {"temperature": 1.0, "extra_body": {"temperature": 0.5, "min_p": 0.1}}
    body = build_chat_body(MESSAGES, [], "auto", config)
    assert (body["temperature"], body["min_p"]) == (0.5, 0.1)


def test_what_is_for_inspect_itself_is_left_out() -> None:
    config = {"max_connections": 9, "cache": True, "verbosity": "low", "timeout": 5}
    assert build_chat_body(MESSAGES, [], "auto", config) == {"messages": MESSAGES}


@pytest.mark.parametrize("name", ["effort", "modalities", "fallback_models", "a_new_setting"])
def test_what_cannot_be_honoured_is_refused_by_name(name: str) -> None:
    with pytest.raises(RequestError, match=f"^{name}: not supported") as raised:
        build_chat_body(MESSAGES, [], "auto", {name: "x"})
    assert raised.value.param == name
