"""Transcripts of records: messages with tool calls, reasoning and results, and whatever else a file has."""

from __future__ import annotations

from typing import Any

import pytest

from mlxrun.evals.prompt_messages import PromptMessage
from mlxrun.evals.transcript import list_turns

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TRANSCRIPT = [
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": None, "reasoning_content": "I add.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
]


def test_calls_reasoning_and_results() -> None:
    user, called, result, last = list_turns(TRANSCRIPT)
    assert user.message == PromptMessage("user", "1 + 2?") and user.calls == [] and user.tool == ""
    assert (called.message.text, called.reasoning) == ("", "I add.")
    assert called.calls == [("add", '{"a": 1}')]
    assert (result.message.text, result.tool) == ("3", "add")
    assert last.message.text == "It is 3."


@pytest.mark.parametrize(
    ("found", "texts"),
    [
        (None, []),
        ("text", []),
        (["text", 1, None], ["text", "1", ""]),
        ([{"role": "assistant", "tool_calls": "no list"}], [""]),
        ([{"role": ["x"], "content": {"a": 1}}], ['{"a": 1}']),
        ([{"role": "user", "content": "a", "left": 3}], ["a\nleft: 3"]),
    ],
)
def test_what_is_no_transcript(found: Any, texts: list[str]) -> None:
    assert [turn.message.text for turn in list_turns(found)] == texts


@pytest.mark.parametrize("call", ["text", {"function": "text"}, {"function": {}}, None])
def test_a_call_of_another_form_is_shown_as_it_is(call: Any) -> None:
    (turn,) = list_turns([{"role": "assistant", "tool_calls": [call]}])
    assert turn.calls[0][0] == "" and len(turn.calls[0][1]) > 0
