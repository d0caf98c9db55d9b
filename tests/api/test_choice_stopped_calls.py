"""A stop string within a tool call ends the answer, and the call is content, on each surface."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlxrun.api.anthropic.response import MessageWriter
from mlxrun.api.choice import Choice
from mlxrun.api.openai.response import build_response
from mlxrun.api.parsers.answer_parser import ModelFormats
from mlxrun.api.parsers.delta import Delta
from mlxrun.api.parsers.registry import find_tool_call_family
from mlxrun.api.prepared import PreparedRequest
from mlxrun.api.responses.stream import ResponseWriter
from mlxrun.api.responses.stream import build_response as build_first_response
from mlxrun.core.request import FinishReason, TokenEvent
from tests.helpers import anthropic_api, responses_api
from tests.helpers.openai_api import MODEL_INFO, TOOL, chat
from tests.helpers.tokenizers import ids_of

HERMES = ModelFormats(find_tool_call_family("hermes"))
WHOLE = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
HALF = '<tool_call>\n{"name": "add", "arguments": {"a": "rm -r /tmp/'
CUT = f'{HALF}END"}}}}\n</tool_call>'


def feed(choice: Choice, text: str) -> list[Delta]:
    return [delta for token in ids_of(text) for delta in choice.feed(TokenEvent("r", (token,)))]


def prepare(**fields: Any) -> PreparedRequest:
    return replace(chat(tools=[TOOL], **{"stop": "END", **fields}), formats=HERMES)


def test_a_chat_completion_has_no_half_call() -> None:
    """Neither has its stream. Calls that were complete before are kept, and are why it ended, as in vLLM."""
    for before, calls, reason in (("", [], "stop"), (WHOLE, ['{"a": 1}'], "tool_calls")):
        choice = Choice(prepare(), 0, MODEL_INFO)
        deltas = feed(choice, before + CUT)
        answer = build_response(prepare(), [choice], "x", 0)["choices"][0]
        assert (answer["finish_reason"], answer["message"]["content"], choice.stop) == (reason, HALF, "END")
        found = [call["function"]["arguments"] for call in answer["message"].get("tool_calls", ())]
        assert found == calls == [delta.text for delta in deltas if delta.kind == "call"]


@pytest.mark.parametrize("stop", ["</tool_call>", "\nEND"])
def test_a_call_that_is_complete_before_the_stop_string_is_a_call(stop: str) -> None:
    choice = Choice(prepare(stop=stop), 0, MODEL_INFO)
    feed(choice, f"{WHOLE}\nEND")
    assert (choice.finish_reason, choice.content, choice.stop) == ("tool_calls", "", stop)
    assert [call.arguments for call in choice.calls] == ['{"a": 1}']


def test_without_a_stop_string_a_call_is_closed_where_the_answer_ends() -> None:
    """Whether its text is held or not."""
    for fields in ({}, {"stop": None}):
        choice = Choice(prepare(**fields), 0, MODEL_INFO)
        deltas = feed(choice, HALF)
        assert not choice.ended and bool(deltas) == bool(fields), "as they come, if no stop string may come"
        choice.feed(TokenEvent("r", finish=FinishReason.LENGTH))
        assert [call.arguments for call in choice.calls] == ['{"a": "rm -r /tmp/"}']
        assert (choice.finish_reason, choice.content) == ("length", "")


def test_a_second_call_still_ends_an_answer_that_may_have_one() -> None:
    """With its first argument."""
    choice = Choice(prepare(parallel_tool_calls=False), 0, MODEL_INFO)
    feed(choice, WHOLE + CUT)
    assert (choice.finish_reason, choice.content, choice.stop) == ("tool_calls", "", None)
    assert choice.completion_tokens < len(ids_of(WHOLE + HALF))


def test_a_response_has_no_half_call() -> None:
    tool = {"type": "function", **TOOL["function"]}
    what, prepared = responses_api.run(
        {"input": "hi", "tools": [tool], "stop": "END"}, responses_api.TOOL_MODEL_INFO
    )
    prepared = replace(prepared, formats=HERMES)
    choice = Choice(prepared, 0, MODEL_INFO)
    writer = ResponseWriter(build_first_response("resp_t", 5, what, prepared), what, prepared)
    writer.choice = choice
    events = [*writer.feed(feed(choice, CUT)), *writer.end(7)]
    assert [(item["type"], item["status"]) for item in writer.response["output"]] == [
        ("message", "completed")
    ]
    assert writer.response["output"][0]["content"][0]["text"] == HALF
    assert writer.response["status"] == "completed"
    assert not any("function_call" in event["type"] for event in events)


def test_a_message_has_no_half_call() -> None:
    body = anthropic_api.body(tools=[anthropic_api.ADD], stop_sequences=["END"])
    request = anthropic_api.make(body, anthropic_api.TOOL_MODEL_INFO)
    prepared = replace(request.prepared, formats=HERMES)
    choice = Choice(prepared, 0, MODEL_INFO)
    writer = MessageWriter(replace(request, prepared=prepared), "msg_1")
    events = writer.feed(choice, feed(choice, CUT))
    message = writer.build_message(choice)
    assert message["content"] == [{"type": "text", "text": HALF}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")
    starts = [data["content_block"]["type"] for name, data in events if name == "content_block_start"]
    assert starts == ["text"]
