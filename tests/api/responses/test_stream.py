"""The events of a response."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from mlxrun.api.choice import Choice
from mlxrun.api.opaque_reasoning import encode_reasoning
from mlxrun.api.openai.request import prepare_request
from mlxrun.api.parsers.answer_parser import ModelFormats
from mlxrun.api.prepared import ApiContext
from mlxrun.api.responses.fields import LOGPROBS
from mlxrun.api.responses.request import ResponseLookup, read_response_request
from mlxrun.api.responses.stream import ResponseWriter, build_response
from mlxrun.api.text.media.images import MediaLoader
from mlxrun.config.settings import Config
from mlxrun.core.errors import EngineDead, Overloaded
from mlxrun.core.request import FinishReason, TokenEvent, TokenLogprob
from tests.helpers.responses_api import (
    ADD,
    CHAT,
    MODEL_INFO,
    TOOL_MODEL_INFO,
    make_deltas,
    messages,
    run,
    write_events,
)
from tests.helpers.tokenizers import ids_of


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_logprobs_are_found_without_searching_the_whole_answer(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token's is with the delta that has it, and no delta costs a look at all that was written."""
    what = read_response_request({"input": "hi", "include": [LOGPROBS]}, MODEL_INFO, ResponseLookup(), "t")
    config = Config()
    prepared = asyncio.run(
        prepare_request(
            CHAT, what.chat, ApiContext(MODEL_INFO, config, MediaLoader(config.media, None), ModelFormats())
        )
    )
    choice = Choice(prepared, 0, MODEL_INFO)
    writer = ResponseWriter(build_response("resp_t", 5, what, prepared), what, prepared)
    writer.choice = choice
    monkeypatch.setattr(Choice, "text", property(lambda _: pytest.fail("the whole answer was join")))
    ids = ids_of("abab" * 100)
    found: list[dict[str, Any]] = []
    for at in range(0, len(ids), size):
        part = ids[at : at + size]
        logged = tuple(TokenLogprob(-float(at + i)) for i in range(len(part)))
        for event in writer.feed(choice.feed(TokenEvent("r", part, logged))):
            found += event.get("logprobs", [])
        assert len(writer._unread) <= size
    assert "".join(each["token"] for each in found) == "abab" * 100
    assert [each["logprob"] for each in found] == [-float(i) for i in range(len(ids))]


def test_events_of_reasoning_content_and_a_call() -> None:
    """The exact order, numbered, with the full text at the end."""
    deltas = make_deltas(
        ("reasoning", "h"), ("reasoning", "m"), ("content", "I "), ("content", "add"),
        ("call:0:add", ""), ("call:0:", '{"a"'), ("call:0:", ": 1}"), ("call:1:add", "{}"),
    )  # fmt: skip
    events, response = write_events(deltas, tools=[ADD])
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"] is response
    assert [item["type"] for item in response["output"]] == [
        "reasoning", "message", "function_call", "function_call",
    ]  # fmt: skip
    assert response["output"][1]["content"][0]["text"] == "I add"
    assert response["output"][2]["arguments"] == '{"a": 1}'
    assert response["output"][2]["call_id"] == "call_0"
    assert (response["status"], response["completed_at"]) == ("completed", 7)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == response["output"]


def test_events_have_the_fields_of_their_type_alone() -> None:
    """No cross-type fields."""
    fields = {
        "output_text.delta": {"item_id", "output_index", "content_index", "delta", "logprobs"},
        "output_text.done": {"item_id", "output_index", "content_index", "text", "logprobs"},
        "reasoning_text.delta": {"item_id", "output_index", "content_index", "delta"},
        "reasoning_text.done": {"item_id", "output_index", "content_index", "text"},
        "function_call_arguments.delta": {"item_id", "output_index", "delta"},
        "function_call_arguments.done": {"item_id", "output_index", "arguments"},
        "custom_tool_call_input.delta": {"item_id", "output_index", "delta"},
        "custom_tool_call_input.done": {"item_id", "output_index", "input"},
        "output_item.added": {"output_index", "item"},
        "output_item.done": {"output_index", "item"},
        "content_part.added": {"item_id", "output_index", "content_index", "part"},
        "content_part.done": {"item_id", "output_index", "content_index", "part"},
        "created": {"response"},
        "in_progress": {"response"},
        "completed": {"response"},
    }
    custom = {"type": "custom", "name": "patch"}
    deltas = make_deltas(("reasoning", "h"), ("content", "t"), ("call:0:add", "{}"), ("call:1:patch", "{}"))
    events, _ = write_events(deltas, tools=[ADD, custom])
    seen = set()
    for event in events:
        name = event["type"].removeprefix("response.")
        assert event.keys() == fields[name] | {"type", "sequence_number"}
        seen.add(name)
    assert seen == fields.keys()


def test_custom_and_namespaced_calls_have_their_own_names() -> None:
    space = {"type": "namespace", "name": "mcp__fs", "tools": [ADD]}
    deltas = make_deltas(
        ("call:0:patch", '{"inp'), ("call:0:", 'ut": "*** é"}'), ("call:1:mcp__fs__add", "{}")
    )
    events, response = write_events(deltas, tools=[{"type": "custom", "name": "patch"}, space])
    custom, function = response["output"]
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "patch", "*** é")
    assert (function["name"], function["namespace"]) == ("add", "mcp__fs")
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert deltas == ["*** é"]
    # And back again: what was answered is what the model sees as its own call.
    back = messages(TOOL_MODEL_INFO, input=[custom, function])
    names = [call["function"]["name"] for call in back[0]["tool_calls"]]
    assert names == ["patch", "mcp__fs__add"]
    assert json.loads(back[0]["tool_calls"][0]["function"]["arguments"]) == {"input": "*** é"}


def test_an_answer_at_its_length_limit_is_incomplete() -> None:
    events, response = write_events(make_deltas(("content", "a")), FinishReason.LENGTH)
    assert events[-1]["type"] == "response.incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"


def test_an_answer_that_the_engine_aborted_is_cancelled() -> None:
    events, response = write_events(make_deltas(("content", "a")), FinishReason.ABORT)
    assert (events[-1]["type"], response["status"]) == ("response.cancelled", "cancelled")


def test_an_empty_answer_is_an_empty_message() -> None:
    _, response = write_events([])
    assert response["output"][0]["content"][0]["text"] == ""


def test_a_failure_keeps_what_there_is() -> None:
    what, prepared = run({"input": "hi"})
    for error, code in ((EngineDead("e"), "server_error"), (Overloaded("e"), "rate_limit_exceeded")):
        choice = Choice(prepared, 0, MODEL_INFO)
        writer = ResponseWriter(build_response("resp_t", 5, what, prepared), what, prepared)
        writer.choice = choice
        writer.feed(choice.feed(TokenEvent("r", ids_of("half"))))
        last = writer.fail(error)[-1]
        assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", code)
        assert last["response"]["output"][0]["content"][0]["text"] == "half"
        assert last["response"]["output"][0]["status"] == "incomplete"


def test_encrypted_reasoning_is_included_on_request() -> None:
    deltas = make_deltas(("reasoning", "h"))
    _, plain = write_events(deltas)
    _, response = write_events(deltas, include=["reasoning.encrypted_content"])
    assert "encrypted_content" not in plain["output"][0]
    assert response["output"][0]["encrypted_content"] == encode_reasoning("h")
