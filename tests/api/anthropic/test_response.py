"""Anthropic's errors and list of models."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest

from mlxrun.api.anthropic.request import PreparedMessage
from mlxrun.api.anthropic.response import (
    MessageWriter,
    build_error,
    build_models_page,
    format_time,
    get_error_status,
)
from mlxrun.api.choice import Choice
from mlxrun.api.opaque_reasoning import decode_reasoning
from mlxrun.api.parsers.registry import choose_formats
from mlxrun.core.errors import (
    BodyTooLarge,
    Draining,
    EngineDead,
    Forbidden,
    NotFound,
    Overloaded,
    PromptTooLong,
    RequestError,
    Unauthorized,
)
from mlxrun.core.request import FinishReason, TokenEvent
from tests.helpers.anthropic_api import (
    ADD,
    MODEL_INFO,
    TOOL_MODEL_INFO,
    USER,
    Json,
    body,
    count,
    make,
    refused,
)
from tests.helpers.tokenizers import FakeModelInfo, ids_of


def test_names_of_the_model() -> None:
    model_info = FakeModelInfo(name="m", names=("claude-x",))
    assert make(body(model="claude-x"), model_info).prepared.model == "m"
    error = refused(body(model="gpt"), model_info)
    assert error.param == "model" and get_error_status(error) == 404
    with pytest.raises(NotFound, match="'gpt' is not served here"):
        count({"model": "gpt", "messages": [USER]}, model_info)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestError("x"), 400, "invalid_request_error"),
        (Unauthorized("x"), 401, "authentication_error"),
        (Forbidden("x"), 403, "permission_error"),
        (NotFound("x"), 404, "not_found_error"),
        (BodyTooLarge("x"), 413, "request_too_large"),
        (Overloaded("x"), 429, "rate_limit_error"),
        (Draining("x"), 529, "overloaded_error"),
        (EngineDead("x"), 503, "api_error"),
        (KeyError("secret"), 500, "api_error"),
    ],
)
def test_errors(error: BaseException, status: int, kind: str) -> None:
    made = build_error(error, "req_7")
    assert get_error_status(error) == status
    assert made == {
        "type": "error",
        "error": {"type": kind, "message": made["error"]["message"]},
        "request_id": "req_7",
    }
    assert "secret" not in made["error"]["message"]


def test_agents_recognise_a_prompt_that_is_too_long() -> None:
    """They look for these words to shorten the conversation."""
    error = refused(body([{"role": "user", "content": "x" * 99}]), FakeModelInfo(context_length=64))
    assert isinstance(error, PromptTooLong)
    assert build_error(error, "r")["error"]["message"].startswith("prompt is too long: the prompt has")


def test_models() -> None:
    page = build_models_page(["a", "b"])
    assert [model["id"] for model in page["data"]] == ["a", "b"]
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("a", "b", False)
    assert build_models_page([])["first_id"] is None


def test_times() -> None:
    assert format_time(0) == "1970-01-01T00:00:00Z" and format_time(None) is None


FORMATS = choose_formats(None, [], "hermes", "think")


def prepare(**fields: Any) -> PreparedMessage:
    message = make(body(**{"max_tokens": 500, **fields}), TOOL_MODEL_INFO)
    prepared = dataclasses.replace(message.prepared, formats=FORMATS)
    return dataclasses.replace(message, prepared=prepared)


def write(
    *texts: str, finish: FinishReason = FinishReason.STOP, **fields: Any
) -> tuple[list[tuple[str, Json]], Json]:
    """The events of an answer that comes in these texts, and its message."""
    message = prepare(**fields)
    writer, choice = MessageWriter(message, "msg_1"), Choice(message.prepared, 0, MODEL_INFO)
    events = []
    for text in texts:
        events += writer.feed(choice, choice.feed(TokenEvent("r", ids_of(text))))
    if not choice.ended:  # a stop string may have ended it
        events += writer.feed(choice, choice.feed(TokenEvent("r", (), finish=finish)))
    return events, writer.build_message(choice)


def test_events_are_in_order_and_make_the_message() -> None:
    events, message = write("Hel", "lo")
    assert [name for name, _ in itertools.groupby(name for name, _ in events)] == [
        *("message_start", "content_block_start", "ping", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    assert all(data["type"] == name for name, data in events)
    assert message["content"] == [{"type": "text", "text": "Hello"}]
    assert (message["id"], message["stop_reason"]) == ("msg_1", "end_turn")
    assert events[0][1]["message"]["content"] == []


def test_an_empty_answer_has_no_block() -> None:
    events, message = write()
    assert [name for name, _ in events] == ["message_start", "message_delta", "message_stop"]
    assert message["content"] == []


def test_calls() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    events, message = write("see ", call, call, tools=[ADD])
    kinds = [data["content_block"]["type"] for name, data in events if name == "content_block_start"]
    assert kinds == ["text", "tool_use", "tool_use"] == [block["type"] for block in message["content"]]
    assert [block["input"] for block in message["content"][1:]] == [{"a": 1}] * 2
    assert all(block["id"].startswith("toolu_") for block in message["content"][1:])
    parts = [data["delta"] for name, data in events if name == "content_block_delta" and data["index"] == 1]
    assert json.loads("".join(part["partial_json"] for part in parts)) == {"a": 1}
    assert message["stop_reason"] == "tool_use"


@pytest.mark.parametrize("hidden", [False, True])
def test_reasoning_is_shown_or_only_sent_back(hidden: bool) -> None:
    thinking = {"type": "adaptive", "display": "omitted" if hidden else "summarized"}
    events, message = write("<think>", "hm", "</think>", "yo", thinking=thinking)
    block = message["content"][0]
    shown = "".join(data["delta"].get("thinking", "") for _, data in events if "delta" in data)
    assert (shown, block["thinking"]) == (("", "") if hidden else ("hm", "hm"))
    assert decode_reasoning(block["signature"]) == ("hm" if hidden else "")


@pytest.mark.parametrize(
    ("fields", "texts", "finish", "reason", "sequence"),
    [
        ({}, ("a",), FinishReason.LENGTH, "max_tokens", None),
        ({"max_tokens": 10**6}, ("a",), FinishReason.LENGTH, "model_context_window_exceeded", None),
        ({"stop_sequences": ["b"]}, ("ab",), FinishReason.STOP, "stop_sequence", "b"),
    ],
)
def test_why_it_ended(
    fields: Json, texts: tuple[str, ...], finish: FinishReason, reason: str, sequence: str | None
) -> None:
    events, message = write(*texts, finish=finish, **fields)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)
    (delta,) = [data["delta"] for name, data in events if name == "message_delta"]
    assert delta == {"stop_reason": reason, "stop_sequence": sequence}


def test_a_ping_may_be_the_first_event() -> None:
    writer = MessageWriter(prepare(), "msg_1")
    assert [writer.write_ping(3)[0] for _ in range(2)] == ["message_start", "ping"]


def test_counts_add_up_to_the_prompt() -> None:
    _, message = write("a")
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == prepare().prepared.prompt_tokens
    assert usage["output_tokens"] == 1
