"""Responses bodies become chat bodies, and no field is ignored."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from mlxrun.api.choice import Choice
from mlxrun.api.openai.request import prepare_request
from mlxrun.api.prepared import ApiContext
from mlxrun.api.responses.fields import HARMLESS, HONOURED, IGNORED, REFUSED
from mlxrun.api.responses.request import (
    ResponseLookup,
    read_response_request,
)
from mlxrun.api.responses.stream import ResponseWriter, build_response
from mlxrun.api.text.media.images import MediaLoader
from mlxrun.config.settings import Config, ServerSettings
from mlxrun.core.errors import PromptTooLong, RequestError
from mlxrun.core.request import FinishReason, TokenEvent
from tests.helpers.examples import count_examples
from tests.helpers.responses_api import (
    ADD,
    BODIES,
    CHAT,
    MODEL_INFO,
    PNG,
    TOOL_MODEL_INFO,
    chat,
    messages,
    read,
    refused,
    run,
    text,
    user,
)
from tests.helpers.tokenizers import THINKING, TOOLS, FakeModelInfo, ids_of


def test_a_conversation_has_the_prompt_of_the_same_chat() -> None:
    """Token by token."""
    items = [
        {"role": "user", "content": "q"},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
    ]
    _, ours = run({"input": items, "instructions": "s", "tools": [ADD]}, TOOL_MODEL_INFO)
    function = {"name": "add", "arguments": '{"a": 1}'}
    body = {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "q"},
            {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ],
        "tools": [
            {"type": "function", "function": {k: ADD[k] for k in ("name", "description", "parameters")}}
        ],
    }
    context = ApiContext(TOOL_MODEL_INFO, Config(), MediaLoader(Config().media, None))
    theirs = asyncio.run(prepare_request(CHAT, body, context))
    assert ours.requests[0].prompt == theirs.requests[0].prompt
    body["messages"][1]["content"] = "p"  # the twin: another prompt has other tokens
    assert ours.requests[0].prompt != asyncio.run(prepare_request(CHAT, body, context)).requests[0].prompt


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"background": "yes"}, "background"),
        ({"background": True, "store": False}, "background"),
        ({"truncation": "middle"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"conversation": {"id": 1}}, "conversation.id"),
        ({"conversation": {"id": "conv_1", "name": "x"}}, "conversation.name"),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "conversation"),
        ({"reasoning": {"context": "current_turn"}}, "reasoning.context"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"include": ["everything"]}, "include[0]"),
        ({"include": ["everything"] * 100_000}, "include"),
        ({"stop_token_ids": ["1"] * 100_000}, "stop_token_ids"),
        ({"metadata": {str(i): i for i in range(100_000)}}, "metadata"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"reasoning": {"effort": "enormous"}}, "reasoning.effort"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"messages": []}, "messages"),
        ({"inptu": "x"}, "inptu"),
        ({"input": 3}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{}]}, "input[0].type"),
        ({"input": [{"type": "poem"}]}, "input[0].type"),
        ({"input": [{"type": "web_search_call", "id": "ws"}]}, "input[0].type"),
        ({"input": [{"role": "poet", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [user({"type": "input_file", "file_id": "f"})]}, "input[0].content[0].file_id"),
        ({"input": [user({"type": "input_file"})]}, "input[0].content[0].file_url"),
        ({"input": [user({"type": "input_file", "file_data": "a", "file_url": "b"})]},
         "input[0].content[0].file_url"),
        ({"input": [user({"type": "input_file", "file_data": "a", "filename": 3})]},
         "input[0].content[0].filename"),
        ({"input": [{"role": "assistant", "content": [{"type": "input_file", "file_data": "a"}]}]},
         "input[0].content[0].type"),
        ({"input": [user({"type": "input_image", "file_id": "f"})]}, "input[0].content[0].file_id"),
        ({"input": [user(text("a"), {"type": "input_text", "text": 1})]}, "input[0].content[1].text"),
        ({"input": [{"role": "assistant", "content": [{"type": "input_image", "image_url": PNG}]}]},
         "input[0].content[0].type"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": 3}]}, "input[0].output"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"role": "user", "content": "a"}, {"role": "user", "content": "\ud800"}]},
         "input[1].content"),
        ({"instructions": "\ud800"}, "instructions"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [ADD, ADD]}, "tools[1].name"),
        ({"tools": [{"type": "poem"}]}, "tools[0].type"),
        ({"tools": [{**ADD, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [{"type": "custom", "name": "c", "format": {"type": "regex"}}]}, "tools[0].format"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "function", "name": "add"}}, "tool_choice.name"),
    ],
)  # fmt: skip
def test_bad_bodies_say_where(body: dict[str, Any], param: str) -> None:
    """A 400 that names the sender's own field."""
    assert refused(**body).param == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"service_tier": "flex"}, "service_tier"),
        ({"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
        ({"prompt_cache_options": {"mode": "explicit"}}, "prompt_cache_options"),
        ({"context_management": []}, "context_management"),
        ({"stream_options": {"include_obfuscation": True}, "stream": True}, "stream_options"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"reasoning": {"generate_summary": "concise"}}, "reasoning.generate_summary"),
        ({"reasoning": {"context": "all_turns"}}, "reasoning.context"),
        ({"input": [{"role": "user", "content": "x", "tone": "sad"}]}, "input[0].tone"),
        ({"input": [user({**text("x"), "mood": 1})]}, "input[0].content[0].mood"),
        (
            {"input": [user({"type": "input_image", "image_url": PNG, "format": "png"})]},
            "input[0].content[0].format",
        ),
    ],
)
def test_hints_and_echoed_fields_do_not_change_the_prompt(body: dict[str, Any], param: str) -> None:
    """They are accepted, unless the config is strict."""
    model_info = FakeModelInfo(vision=True)
    plain = {"input": "x", "stream": body.get("stream", False)}
    if isinstance(body.get("input"), list):
        message = body["input"][0]
        parts = message["content"] if isinstance(message["content"], list) else [text(message["content"])]
        plain["input"] = [
            user(*({k: v for k, v in part.items() if k not in ("mood", "format")} for part in parts))
        ]
    what, prepared = run({"input": "x", **body}, model_info)
    _, expected = run(plain, model_info)
    assert prepared.requests[0].prompt == expected.requests[0].prompt
    assert build_response("resp_t", 5, what, prepared)["reasoning"] == {"effort": None, "summary": None}
    strict = replace(Config(), server=ServerSettings(strict_fields=True))
    with pytest.raises(RequestError) as caught:
        run({"input": "x", **body}, model_info, strict)
    assert (caught.value.param or "").startswith(param)


def test_every_field_of_the_client_library_is_known() -> None:
    """Each is honoured, accepted without effect, or refused by its own name and not as unknown."""
    names = {*ResponseCreateParamsBase.__annotations__, "stream"}
    known = HONOURED.keys() | HARMLESS.keys() | IGNORED.keys() | REFUSED.keys()
    assert names - known == set()


def test_images_in_outputs_of_tools_are_shown_to_the_model() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "shoot", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c"}
    image = {"type": "input_image", "image_url": PNG}
    sent = messages(input=[user(text("q")), call, {**output, "output": [text("see:"), image]}])
    assert sent[-1]["content"] == [
        {"type": "text", "text": "see:"},
        {"type": "image_url", "image_url": {"url": PNG, "detail": "auto"}},
    ]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{**ADD, "parameters": 3}]}, "tools[0].parameters"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{**ADD, "parameters": 3}]}]},
            "tools[0].tools[0].parameters",
        ),
        ({"input": [user({"type": "input_file", "file_data": "data:application/pdf;base64,AAAA"})]},
         "input[0].content[0].file_data"),
        ({"input": [user({"type": "input_file", "file_url": "https://x.org/a.pdf"})]},
         "input[0].content[0].file_url"),
        ({"input": [user({"type": "input_image", "image_url": "data:image/png;base64,AAAA"})]},
         "input[0].content[0].image_url"),
    ],
)  # fmt: skip
def test_errors_about_the_chat_body_name_the_clients_field(body: dict[str, Any], param: str) -> None:
    assert refused(FakeModelInfo(chat_template=TOOLS, vision=True), **body).param == param


def test_a_prompt_that_is_too_long_is_refused() -> None:
    error = refused(input="x" * 5000)
    assert isinstance(error, PromptTooLong)
    assert error.code == "context_length_exceeded"


def test_a_body_without_anything() -> None:
    """What is missing is called so; a response may go on without new input."""
    with pytest.raises(RequestError) as caught:
        read_response_request({}, MODEL_INFO, ResponseLookup(), "t")
    error = caught.value
    assert (str(error), error.param, error.code) == ("input: missing", "input", "missing_field")
    assert read_response_request({"instructions": "x"}, MODEL_INFO, ResponseLookup(), "t").chat["messages"]
    assert str(refused(tools=[{"type": "function"}])) == "tools[0].name: missing"
    assert str(refused(tools=[{}])) == "tools[0].type: missing"


def test_effort_goes_where_the_template_has_it(caplog: pytest.LogCaptureFixture) -> None:
    """And is null in the response, with a warning, where there is no such thing."""
    thinking = FakeModelInfo(chat_template=THINKING)
    levels = FakeModelInfo(chat_template=MODEL_INFO.chat_template + "{{ reasoning_effort }}")  # type: ignore[operator]
    assert chat(thinking, reasoning={"effort": "high"})["chat_template_kwargs"] == {"enable_thinking": True}
    assert chat(thinking, reasoning={"effort": "none"})["chat_template_kwargs"] == {"enable_thinking": False}
    other = FakeModelInfo(chat_template=THINKING.replace("enable_thinking", "thinking"))
    assert chat(other, reasoning={"effort": "none"})["chat_template_kwargs"] == {"thinking": False}
    assert chat(levels, reasoning={"effort": "high"})["chat_template_kwargs"] == {"reasoning_effort": "high"}
    assert read(levels, reasoning={"effort": "high"}).effort == "high"
    with caplog.at_level(logging.WARNING):
        assert read(reasoning={"effort": "high"}).effort is None
    assert "reasoning.effort" in caplog.text


def test_formats_are_passed_on() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    inner = {"name": "n", "schema": {"type": "object"}, "strict": True}
    assert chat(text={"format": form})["response_format"] == {"type": "json_schema", "json_schema": inner}
    assert chat(text={"format": {"type": "text"}})["response_format"] == {"type": "text"}
    assert "response_format" not in chat(text={})


@settings(max_examples=count_examples(120))
@given(BODIES)
def test_any_body_is_answered_or_refused(body: dict[str, Any]) -> None:
    """And what is refused says where, in the sender's words."""
    model_info = FakeModelInfo(chat_template=TOOLS, vision=True)
    try:
        what, prepared = run(body, model_info)
    except RequestError as exc:
        assert exc.param is None or not exc.param.startswith(("messages", "max_completion_tokens"))
        return
    choice = Choice(prepared, 0, model_info)
    writer = ResponseWriter(build_response("resp_t", 5, what, prepared), what, prepared)
    writer.choice = choice
    writer.feed(choice.feed(TokenEvent("r", ids_of("answer"), finish=FinishReason.STOP)))
    writer.end(7)
    json.dumps(writer.response)
