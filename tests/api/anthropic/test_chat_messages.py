"""Anthropic's messages become chat messages."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from mlxrun.api.anthropic import chat_messages
from mlxrun.api.opaque_reasoning import encode_reasoning
from mlxrun.config.settings import Config, ServerSettings
from tests.helpers.anthropic_api import (
    CALL,
    REASONING,
    RESULT,
    TOOL_MODEL_INFO,
    USER,
    Json,
    body,
    prompt,
    text,
)
from tests.helpers.anthropic_bodies import BILLING
from tests.helpers.tokenizers import FakeModelInfo


def test_a_failed_call_says_so() -> None:
    """Templates have no mark for it: the text says it, once."""

    def result(**fields: Any) -> str:
        turns = [
            USER,
            {"role": "assistant", "content": [CALL]},
            {"role": "user", "content": [RESULT | fields]},
        ]
        return prompt(body(turns), TOOL_MODEL_INFO).split("<|im_start|>tool\n")[1].split("<|im_end|>")[0]

    assert result(is_error=True, content="no such file") == "Error: no such file"
    assert result(is_error=True, content=[text("<tool_use_error>no</tool_use_error>")]).startswith(
        "<tool_use"
    )
    assert result(is_error=True, content=None) == "Error"
    assert result(is_error=False, content="no such file") == "no such file"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("toolu_own_functions_2eadd_3a0", "functions.add:0"),
        ("toolu_0123456789abcdef01234567", "call_0123456789abcdef01234567"),
        ("toolu_1", "toolu_1"),
    ],
)
def test_ids_of_calls_are_those_that_the_model_wrote(given: str, wanted: str) -> None:
    """In calls and results. Ids of other servers stay."""
    builder = chat_messages.ChatMessagesBuilder({}, complete=True)
    call, result = {**CALL, "id": given}, {**RESULT, "tool_use_id": given}
    turns = [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    builder.add_messages(turns)
    assert builder.messages[1]["tool_calls"][0]["id"] == wanted
    assert builder.messages[2]["tool_call_id"] == wanted


def test_a_reminder_is_shown_for_one_turn() -> None:
    late = {"role": "system", "content": "reminder", "clear_at": "next_user_message"}
    answer = {"role": "assistant", "content": "yo"}
    assert "reminder" in prompt(body([USER, late]))
    assert "reminder" not in prompt(body([USER, late, answer, USER]))
    assert "reminder" in prompt(body([USER, {**late, "clear_at": "never"}, answer, USER]))


def test_the_billing_line_of_a_leading_system_block_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """Requests that differ in it only have one prompt; said once; anywhere else it stays."""
    chat_messages._log_stripped.cache_clear()
    caplog.set_level(logging.INFO)
    plain = prompt(body(system="You are"))
    shapes: list[Any] = [
        BILLING + "\nYou are",
        [text(BILLING), text("You are")],
        [text(BILLING + "\n\nYou are")],
    ]
    for shape in shapes:
        for cch in ("fa690", "00000"):
            assert prompt(body(system=json.loads(json.dumps(shape).replace("{}", cch)))) == plain
        assert prompt(body([{"role": "system", "content": shape}, USER])) == plain
    assert len([r for r in caplog.records if "x-anthropic-billing-header" in r.message]) == 1
    assert "cch" not in caplog.text
    assert prompt(body(system=BILLING)) == prompt(body())
    for other in (
        body(system=[text("You are"), text(BILLING)]),
        body(system=f"You are\n{BILLING}"),
        body([{"role": "user", "content": BILLING}]),
        body([{"role": "user", "content": [text(BILLING), text("hi")]}]),
        body([USER, {"role": "system", "content": BILLING}], system="You are"),
    ):
        assert "x-anthropic-billing-header" in prompt(other)
    unstripped = Config(server=ServerSettings(strip_billing_header=False))
    assert "cch=" in prompt(body(system=BILLING), config=unstripped)


def test_hidden_reasoning_comes_back() -> None:
    """thinking.display omitted: the client sees nothing of it, the next turn has it."""
    model_info = FakeModelInfo(chat_template=REASONING)

    def turn(block: Json) -> str:
        return prompt(body([USER, {"role": "assistant", "content": [block, text("yo")]}, USER]), model_info)

    shown = {"type": "thinking", "thinking": "čau 🙂", "signature": encode_reasoning("")}
    hidden = {"type": "thinking", "thinking": "", "signature": encode_reasoning("čau 🙂")}
    assert turn(shown) == turn(hidden) and "čau 🙂" in turn(shown)
