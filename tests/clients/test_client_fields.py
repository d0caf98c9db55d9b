"""Fields that SDKs send by themselves: what mlxrun cannot honour and does not need stops no conversation."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic import Anthropic, BadRequestError
from openai import BadRequestError as OpenAIBadRequestError
from openai import OpenAI

from tests.helpers.served_model import make_image_part

SUM = "What is 12 + 30?"
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "fetch_weather",
        "description": "Get the weather in a city.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}


def test_a_thread_goes_on_without_the_server(anthropic_client: Anthropic) -> None:
    """The SDK sends `thread`, is told that it is not supported, and sends the whole conversation instead."""
    thread = anthropic_client.beta.messages.thread(
        model="claude-x", max_tokens=32, unsupported_request_behavior="continue_unthreaded"
    )
    thread.append({"role": "user", "content": SUM})
    first = thread.send()
    assert first.content and first.usage.input_tokens > 0
    thread.append({"role": "user", "content": "And 1 more?"})
    second = thread.send()
    whole = second.usage.input_tokens + (second.usage.cache_read_input_tokens or 0)
    assert whole > first.usage.input_tokens + (first.usage.cache_read_input_tokens or 0)


@pytest.mark.parametrize("kind", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
def test_a_thread_that_must_be_is_an_error(anthropic_client: Anthropic, kind: Any) -> None:
    with pytest.raises(BadRequestError) as caught:
        anthropic_client.beta.messages.create(
            model="claude-x", max_tokens=8, messages=[{"role": "user", "content": SUM}], thread=kind
        )
    body: Any = caught.value.body
    assert body["error"]["details"]["error_code"] == "thread_unsupported_request"
    assert "thread" in body["error"]["message"]


def test_typed_tools(anthropic_client: Anthropic) -> None:
    """They are in the prompt: the same request with them is longer."""
    messages: Any = [{"role": "user", "content": SUM}]
    tools: Any = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
    ]
    counted = [
        anthropic_client.beta.messages.count_tokens(model="m", messages=messages, **fields).input_tokens
        for fields in ({}, {"tools": tools[:1]}, {"tools": tools})
    ]
    assert counted[0] + 50 < counted[1] < counted[2] - 50
    assert anthropic_client.beta.messages.create(
        model="m", max_tokens=4, messages=messages, tools=tools
    ).content


def test_an_answer_is_sent_back_as_it_came(openai_client: OpenAI) -> None:
    """With all its fields, and those that wrappers add."""
    user: Any = {"role": "user", "content": "How is the weather in Dublin?"}
    first = openai_client.chat.completions.create(model="m", messages=[user], tools=[TOOL], temperature=0)
    message: Any = first.choices[0].message.model_dump()
    assert message["tool_calls"]
    for i, call in enumerate(message["tool_calls"]):
        call |= {"index": i, "provider_specific_fields": None}
    more = {"provider_specific_fields": {"a": 1}, "thinking_blocks": [], "images": [], "annotations": []}
    result: Any = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"}

    def ask(*turns: Any, **fields: Any) -> Any:
        made = openai_client.chat.completions.create(
            model="m", messages=[user, *turns], tools=[TOOL], temperature=0, max_tokens=16, **fields
        )
        return made.choices[0].message.content, made.usage.prompt_tokens

    sent: Any = {key: value for key, value in message.items() if value is not None}
    plain = ask(
        {
            "role": "assistant",
            "content": "",
            "tool_calls": first.choices[0].message.model_dump()["tool_calls"],
        },
        result,
    )
    assert ask({**sent, **more}, result) == plain
    hints: Any = {
        "service_tier": "flex",
        "verbosity": "low",
        "store": True,
        "prediction": {"type": "content", "content": "x"},
    }
    assert ask({**message, **more}, result, **hints, reasoning_effort="none") == plain
    broken = {
        **message,
        "tool_calls": [{**message["tool_calls"][0], "function": {"name": "f", "arguments": "{"}}],
    }
    assert ask(broken, {**result, "content": "Error: not JSON"})[0] is not None


@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_images_in_tool_results(api: str, openai_client: OpenAI, anthropic_client: Anthropic) -> None:
    """Another image is another prompt, and an image takes more tokens than a text."""
    part = make_image_part()
    data = part["image_url"]["url"].partition(",")[2]

    def count(image: bool) -> int:
        if api == "openai":
            result: Any = [{"type": "text", "text": "seen"}, *([part] if image else [])]
            call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
            messages: Any = [
                {"role": "user", "content": "What colour is it?"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": result},
            ]
            made = openai_client.chat.completions.create(model="m", messages=messages, max_tokens=4)
            assert made.usage is not None
            return made.usage.prompt_tokens
        source = {"type": "base64", "media_type": "image/png", "data": data}
        block: Any = {"type": "image", "source": source}
        seen: Any = [{"type": "text", "text": "seen"}, *([block] if image else [])]
        turns: Any = [
            {"role": "user", "content": "What colour is it?"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": seen}]},
        ]
        answer = anthropic_client.messages.create(model="m", max_tokens=4, messages=turns)
        return answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)

    assert count(image=True) > count(image=False) + 10


def test_what_changes_the_answer_is_still_refused(openai_client: OpenAI) -> None:
    for fields in (
        {"extra_body": {"use_beam_search": True}},
        {"extra_body": {"temprature": 1}},
        {"logit_bias": {"x": 1}},
    ):
        with pytest.raises(OpenAIBadRequestError):
            openai_client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": SUM}], **fields
            )
