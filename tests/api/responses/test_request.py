"""Responses bodies in, chat bodies and typed events out: A49, A52, A59, A64. Nothing is ignored."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxrun.api.choice import Choice
from mlxrun.api.context import ApiContext
from mlxrun.api.opaque_reasoning import encode_reasoning
from mlxrun.api.openai.request import prepare_request
from mlxrun.api.prepared import PreparedRequest
from mlxrun.api.responses.fields import ABSENT_TOOLS, HARMLESS, HONOURED, LOGPROBS, REFUSED, REFUSED_TOOLS
from mlxrun.api.responses.request import (
    ResponseLookup,
    ResponseRequest,
    read_response_request,
)
from mlxrun.api.responses.response import build_response
from mlxrun.api.responses.stream import ResponseWriter
from mlxrun.api.responses.tools import warn_once
from mlxrun.config.settings import Config
from mlxrun.errors import EngineDead, Overloaded, PromptTooLong, RequestError
from mlxrun.parsers.delta import Delta, Parser
from mlxrun.parsers.model_formats import ModelFormats
from mlxrun.scheduler.request import FinishReason, TokenEvent, TokenLogprob
from mlxrun.text.images import MediaLoader
from tests.helpers.tokenizers import THINKING, TOOLS, FakeModelInfo, ids_of


@pytest.fixture(autouse=True)
def _warn_again() -> None:
    warn_once.cache_clear()


CHAT = "/v1/chat/completions"
HOST = FakeModelInfo()
TOOL_HOST = FakeModelInfo(chat_template=TOOLS)
ADD = {"type": "function", "name": "add", "description": "adds", "parameters": {"type": "object"}}
PNG = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1Pe"
    "AAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)


def asked(host: FakeModelInfo = HOST, memory: ResponseLookup | None = None, **body: Any) -> ResponseRequest:
    return read_response_request({"input": "hi", **body}, host, memory or ResponseLookup(), "t")


def chat(host: FakeModelInfo = HOST, **body: Any) -> dict[str, Any]:
    return asked(host, **body).chat


def messages(host: FakeModelInfo = HOST, **body: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = chat(host, **body)["messages"]
    return found


def run(body: Mapping[str, Any], host: FakeModelInfo = HOST) -> tuple[ResponseRequest, PreparedRequest]:
    """All the way to the prompt; errors name the sender's fields."""
    config = Config()
    what = read_response_request(body, host, ResponseLookup(), "t")

    async def go() -> PreparedRequest:
        side = ApiContext(host, config, MediaLoader(config.media, None), ModelFormats())
        return await prepare_request(CHAT, what.chat, side, stream=True)

    try:
        return what, asyncio.run(go())
    except RequestError as exc:
        what.rename_error(exc)
        raise


def refused(host: FakeModelInfo = HOST, **body: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        run({"input": "hi", **body}, host)
    told = str(caught.value)
    assert not re.search(r"messages\[|max_completion_tokens|response_format", told), "the sender's words"
    return caught.value


def user(*content: Any) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": list(content)}


def text(value: str, of: str = "input_text") -> dict[str, Any]:
    return {"type": of, "text": value}


# Input.


def test_a_string_is_a_user_message() -> None:
    assert messages() == [{"role": "user", "content": "hi"}]


def test_instructions_come_first_and_developers_are_kept_for_normalising() -> None:
    """A49: roles are made right by the one place that does so."""
    items = [{"role": "developer", "content": "d"}, {"role": "user", "content": "u"}]
    assert messages(instructions="i", input=items) == [
        {"role": "system", "content": "i"},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "u"},
    ]


def test_texts_are_joined_without_separators() -> None:
    """A64."""
    items = [user(text("a"), text("b")), {"role": "assistant", "content": [text("c"), text("d")]}]
    assert [m["content"] for m in messages(input=items)] == ["ab", "cd"]


def test_the_items_of_one_turn_become_one_message() -> None:
    """A59: thought, text and calls of a turn are one message, as a chat client would send it."""
    items = [
        user(text("q")),
        {"type": "reasoning", "summary": [], "content": [text("t", "reasoning_text")]},
        {"role": "assistant", "content": [text("I add.", "output_text")]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"type": "function_call_output", "call_id": "c2", "output": [text("3"), text("4")]},
        {"role": "assistant", "content": "done"},
        {"role": "assistant", "content": "really"},
    ]
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    assert messages(input=items)[1:] == [
        {
            "role": "assistant",
            "reasoning_content": "t",
            "content": "I add.",
            "tool_calls": [
                {"id": "c1", **call},
                {"id": "c2", **call, "function": {"name": "add", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "tool", "tool_call_id": "c2", "content": "34"},
        {"role": "assistant", "content": "done"},
        {"role": "assistant", "content": "really"},
    ]


def test_a_conversation_has_the_prompt_of_the_same_chat() -> None:
    """A49, A59: token by token."""
    items = [
        {"role": "user", "content": "q"},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
    ]
    _, ours = run({"input": items, "instructions": "s", "tools": [ADD]}, TOOL_HOST)
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
    side = ApiContext(TOOL_HOST, Config(), MediaLoader(Config().media, None))
    theirs = asyncio.run(prepare_request(CHAT, body, side))
    assert ours.requests[0].prompt == theirs.requests[0].prompt
    body["messages"][1]["content"] = "p"  # the twin: another prompt has other tokens
    assert ours.requests[0].prompt != asyncio.run(prepare_request(CHAT, body, side)).requests[0].prompt


@pytest.mark.parametrize(
    ("item", "thought"),
    [
        ({"summary": [text("s", "summary_text")], "content": [text("c", "reasoning_text")]}, "c"),
        ({"summary": [text("s", "summary_text")]}, "s"),
        ({"summary": [], "encrypted_content": encode_reasoning("d\u00e9j\u00e0")}, "d\u00e9j\u00e0"),
        ({"summary": [], "content": None, "encrypted_content": None}, None),
    ],
)
def test_thoughts_come_back(item: dict[str, Any], thought: str | None) -> None:
    items = ["", {"type": "reasoning", **item}, {"role": "assistant", "content": "a"}]
    items[0] = {"role": "user", "content": "q"}
    assert messages(input=items)[1].get("reasoning_content") == thought


def test_foreign_encrypted_thoughts_are_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A64: a fallback is said."""
    with caplog.at_level(logging.WARNING):
        found = messages(input=[{"type": "reasoning", "summary": [], "encrypted_content": "gAAAAA=="}])
    assert found == []
    assert "encrypted_content of another server" in caplog.text


def test_unknown_parts_with_a_text_are_text_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A64: unknown part types are warned of; without a text they are refused by name."""
    with caplog.at_level(logging.WARNING):
        assert (
            messages(input=[user({"type": "input_poem", "text": "p", "rhymes": True})])[0]["content"] == "p"
        )
    assert "input_poem" in caplog.text
    assert refused(input=[user({"type": "input_poem"})]).param == "input[0].content[0].type"


def test_images_go_to_the_chat_form() -> None:
    part = {"type": "input_image", "image_url": PNG, "detail": "auto"}
    content = messages(input=[user(text("a"), part)])[0]["content"]
    assert content == [text("a", "text"), {"type": "image_url", "image_url": {"url": PNG, "detail": "auto"}}]
    _, prepared = run({"input": [user(text("a"), part)]}, FakeModelInfo(vision=True))
    assert len(prepared.requests[0].image_spans) == 1


def test_references_and_history_come_from_the_store() -> None:
    stored = {"id": "msg_1", "type": "message", "role": "user", "content": [text("old")]}
    memory = ResponseLookup({"resp_1": (stored,)}.get, {"msg_1": stored}.get)
    what = asked(memory=memory, input=[{"type": "item_reference", "id": "msg_1"}])
    assert what.items == (stored,)
    assert what.items[0] is stored, "items are shared, not copied"
    what = asked(memory=memory, previous_response_id="resp_1")
    assert [m["content"] for m in what.chat["messages"]] == ["old", "hi"]
    assert what.history[0] is stored
    with pytest.raises(RequestError, match="no stored response 'resp_2'") as caught:
        asked(memory=memory, previous_response_id="resp_2")
    assert caught.value.code == "previous_response_not_found"
    with pytest.raises(RequestError, match=r"input\[0\].id: there is no stored item"):
        asked(memory=memory, input=[{"type": "item_reference", "id": "msg_2"}])


def test_items_get_one_form_with_ids() -> None:
    """What is stored and listed does not depend on how it was sent."""
    short = asked(input=[{"role": "user", "content": "hi"}]).items[0]
    long = asked(input=[{**user(text("hi")), "id": "msg_mine"}]).items[0]
    assert short == {**long, "id": "msg_tin00"}
    assert asked().items[0] == short


# Fields.


def test_every_field_is_known_once() -> None:
    assert not (HONOURED.keys() & HARMLESS.keys()) and not (HONOURED.keys() & REFUSED.keys())
    assert not (HARMLESS.keys() & REFUSED.keys())


@pytest.mark.parametrize("name", REFUSED)
def test_refused_fields_are_named(name: str) -> None:
    error = refused(**{name: {}})
    assert (error.param, error.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"stream_options": {"include_obfuscation": True}, "stream": True}, "stream_options"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"include": ["everything"]}, "include[0]"),
        ({"include": ["everything"] * 100_000}, "include"),
        ({"stop_token_ids": ["1"] * 100_000}, "stop_token_ids"),
        ({"metadata": {str(i): i for i in range(100_000)}}, "metadata"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"reasoning": {"effort": "enormous"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
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
        ({"input": [{"role": "user", "content": "x", "tone": "sad"}]}, "input[0].tone"),
        ({"input": [user({"type": "input_file", "file_id": "f"})]}, "input[0].content[0].type"),
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
    """A51: a 400 that names the sender's own field."""
    assert refused(**body).param == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{**ADD, "parameters": 3}]}, "tools[0].parameters"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{**ADD, "parameters": 3}]}]},
            "tools[0].tools[0].parameters",
        ),
        (
            {
                "input": [
                    {"role": "user", "content": "q"},
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "[1]"},
                ]
            },
            "input[1].arguments",
        ),
        ({"input": [user({"type": "input_image", "image_url": "data:image/png;base64,AAAA"})]},
         "input[0].content[0].image_url"),
        ({"input": [user({"type": "input_image", "image_url": PNG, "detail": "low"})]},
         "input[0].content[0].detail"),
    ],
)  # fmt: skip
def test_errors_of_the_chat_side_name_the_senders_field(body: dict[str, Any], param: str) -> None:
    assert refused(FakeModelInfo(chat_template=TOOLS, vision=True), **body).param == param


def test_a_prompt_that_is_too_long_is_told_so() -> None:
    """A33."""
    error = refused(input="x" * 5000)
    assert isinstance(error, PromptTooLong)
    assert error.code == "context_length_exceeded"


def test_a_body_without_anything() -> None:
    """A51: what is missing is called so; a response may go on without new input."""
    with pytest.raises(RequestError) as caught:
        read_response_request({}, HOST, ResponseLookup(), "t")
    error = caught.value
    assert (str(error), error.param, error.code) == ("input: missing", "input", "missing_field")
    assert read_response_request({"instructions": "x"}, HOST, ResponseLookup(), "t").chat["messages"]
    assert str(refused(tools=[{"type": "function"}])) == "tools[0].name: missing"
    assert str(refused(tools=[{}])) == "tools[0].type: missing"


def test_deep_nesting_is_refused() -> None:
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(RequestError, match="nested too deeply"):
        asked(tools=[{"type": "function", "name": "f", "parameters": {"x": deep}}])


def test_effort_goes_where_the_template_has_it(caplog: pytest.LogCaptureFixture) -> None:
    """A50: and is null in the response, with a warning, where there is no such thing."""
    thinking = FakeModelInfo(chat_template=THINKING)
    levels = FakeModelInfo(chat_template=HOST.chat_template + "{{ reasoning_effort }}")  # type: ignore[operator]
    assert chat(thinking, reasoning={"effort": "high"})["chat_template_kwargs"] == {"enable_thinking": True}
    assert chat(thinking, reasoning={"effort": "none"})["chat_template_kwargs"] == {"enable_thinking": False}
    other = FakeModelInfo(chat_template=THINKING.replace("enable_thinking", "thinking"))
    assert chat(other, reasoning={"effort": "none"})["chat_template_kwargs"] == {"thinking": False}
    assert chat(levels, reasoning={"effort": "high"})["reasoning_effort"] == "high"
    assert asked(levels, reasoning={"effort": "high"}).effort == "high"
    with caplog.at_level(logging.WARNING):
        assert asked(reasoning={"effort": "high"}).effort is None
    assert "reasoning.effort" in caplog.text


def test_formats_are_passed_on() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    inner = {"name": "n", "schema": {"type": "object"}, "strict": True}
    assert chat(text={"format": form})["response_format"] == {"type": "json_schema", "json_schema": inner}
    assert chat(text={"format": {"type": "text"}})["response_format"] == {"type": "text"}
    assert "response_format" not in chat(text={})


# Tools.


def test_tools_in_all_forms(caplog: pytest.LogCaptureFixture) -> None:
    patch = {"type": "custom", "name": "patch", "description": "p", "format": {"type": "text"}}
    space = {"type": "namespace", "name": "mcp__fs", "description": "files", "tools": [ADD]}
    with caplog.at_level(logging.WARNING):
        what = asked(tools=[ADD, {"type": "web_search"}, patch, space])
    names = [tool["function"]["name"] for tool in what.chat["tools"]]
    assert names == ["add", "patch", "mcp__fs__add"]
    assert what.chat["tools"][1]["function"]["parameters"]["required"] == ["input"]
    assert [tool["type"] for tool in what.tools.echo] == ["function", "custom", "namespace"]
    assert "mlxrun has no web_search tool" in caplog.text


@pytest.mark.parametrize("kind", ABSENT_TOOLS)
def test_tools_that_clients_add_by_default_are_left_out(kind: str) -> None:
    what = asked(tools=[{"type": kind, "anything": 1}])
    assert "tools" not in what.chat and what.tools.echo == []


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


# Events.


def pieces_of(*pairs: tuple[str, str]) -> list[Delta]:
    """`("content", "a")`, `("reasoning", "b")`, `("call:0:add", '{"a"')`."""
    found: list[Delta] = []
    for kind, value in pairs:
        name, _, rest = kind.partition(":")
        index, _, tool = rest.partition(":")
        found.append(Piece(name, value, int(index or 0), f"call_{index}" if tool else "", tool))
    return found


class Piece:
    def __init__(self, kind: Any, value: str, index: int, name: str, tool: str) -> None:
        self.kind, self.text, self.index, self.id, self.name = kind, value, index, name, tool


@dataclass(frozen=True)
class ScriptedFormats(ModelFormats):
    """Formats whose parser returns the same deltas whatever the model writes."""

    deltas: Sequence[Delta] = ()

    def make_parser(self, tools: Any, prompt: str, name: str) -> Parser:
        return ScriptedParser(self.deltas)


class ScriptedParser:
    markers: frozenset[str] = frozenset()

    def __init__(self, pieces: Sequence[Delta]) -> None:
        self.pieces = pieces

    def feed(self, text: str) -> Sequence[Delta]:
        return []

    def finish(self) -> Sequence[Delta]:
        return self.pieces


def assemble(
    pieces: Sequence[Delta], finish: FinishReason = FinishReason.STOP, **body: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All events of an answer of these pieces, each fed alone, and the response."""
    what = read_response_request({"input": "hi", **body}, TOOL_HOST, ResponseLookup(), "t")
    config = Config()
    side = ApiContext(TOOL_HOST, config, MediaLoader(config.media, None), ScriptedFormats(deltas=pieces))
    prepared = asyncio.run(prepare_request(CHAT, what.chat, side))
    choice = Choice(prepared, 0, TOOL_HOST)
    assembly = ResponseWriter(build_response("resp_t", 5, what, prepared), what, prepared)
    assembly.choice = choice
    events = assembly.start()
    for piece in choice.feed(TokenEvent("r", ids_of("ab"), finish=finish)):
        events += assembly.feed([piece])
    events += assembly.end(7)
    return events, assembly.response


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_probabilities_are_found_without_the_whole_answer(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token's is with the piece that has it, and no piece costs a look at all that was written."""
    what = read_response_request({"input": "hi", "include": [LOGPROBS]}, HOST, ResponseLookup(), "t")
    config = Config()
    prepared = asyncio.run(
        prepare_request(
            CHAT, what.chat, ApiContext(HOST, config, MediaLoader(config.media, None), ModelFormats())
        )
    )
    choice = Choice(prepared, 0, HOST)
    assembly = ResponseWriter(build_response("resp_t", 5, what, prepared), what, prepared)
    assembly.choice = choice
    monkeypatch.setattr(Choice, "text", property(lambda _: pytest.fail("the whole answer was joined")))
    ids = ids_of("abab" * 100)
    found: list[dict[str, Any]] = []
    for at in range(0, len(ids), size):
        part = ids[at : at + size]
        logged = tuple(TokenLogprob(-float(at + i)) for i in range(len(part)))
        for event in assembly.feed(choice.feed(TokenEvent("r", part, logged))):
            found += event.get("logprobs", [])
        assert len(assembly._unread) <= size
    assert "".join(each["token"] for each in found) == "abab" * 100
    assert [each["logprob"] for each in found] == [-float(i) for i in range(len(ids))]


def test_events_of_a_thought_a_text_and_a_call() -> None:
    """A64: the exact order, numbered, with the full text at the end."""
    pieces = pieces_of(
        ("reasoning", "h"), ("reasoning", "m"), ("content", "I "), ("content", "add"),
        ("call:0:add", ""), ("call:0:", '{"a"'), ("call:0:", ": 1}"), ("call:1:add", "{}"),
    )  # fmt: skip
    events, response = assemble(pieces, tools=[ADD])
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
    """A64: no cross-type fields."""
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
    pieces = pieces_of(("reasoning", "h"), ("content", "t"), ("call:0:add", "{}"), ("call:1:patch", "{}"))
    events, _ = assemble(pieces, tools=[ADD, custom])
    seen = set()
    for event in events:
        name = event["type"].removeprefix("response.")
        assert event.keys() == fields[name] | {"type", "sequence_number"}
        seen.add(name)
    assert seen == fields.keys()


def test_custom_and_namespaced_calls_have_their_own_names() -> None:
    space = {"type": "namespace", "name": "mcp__fs", "tools": [ADD]}
    pieces = pieces_of(("call:0:patch", '{"inp'), ("call:0:", 'ut": "*** é"}'), ("call:1:mcp__fs__add", "{}"))
    events, response = assemble(pieces, tools=[{"type": "custom", "name": "patch"}, space])
    custom, function = response["output"]
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "patch", "*** é")
    assert (function["name"], function["namespace"]) == ("add", "mcp__fs")
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert deltas == ["*** é"]
    # And back again: what was answered is what the model sees as its own call.
    back = messages(TOOL_HOST, input=[custom, function])
    names = [call["function"]["name"] for call in back[0]["tool_calls"]]
    assert names == ["patch", "mcp__fs__add"]
    assert json.loads(back[0]["tool_calls"][0]["function"]["arguments"]) == {"input": "*** é"}


def test_an_answer_that_was_cut_is_incomplete() -> None:
    events, response = assemble(pieces_of(("content", "a")), FinishReason.LENGTH)
    assert events[-1]["type"] == "response.incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"


def test_an_answer_that_the_engine_aborted_is_cancelled() -> None:
    events, response = assemble(pieces_of(("content", "a")), FinishReason.ABORT)
    assert (events[-1]["type"], response["status"]) == ("response.cancelled", "cancelled")


def test_an_empty_answer_is_an_empty_message() -> None:
    _, response = assemble([])
    assert response["output"][0]["content"][0]["text"] == ""


def test_a_failure_keeps_what_there_is() -> None:
    what, prepared = run({"input": "hi"})
    for error, code in ((EngineDead("e"), "server_error"), (Overloaded("e"), "rate_limit_exceeded")):
        choice = Choice(prepared, 0, HOST)
        assembly = ResponseWriter(build_response("resp_t", 5, what, prepared), what, prepared)
        assembly.choice = choice
        assembly.feed(choice.feed(TokenEvent("r", ids_of("half"))))
        last = assembly.fail(error)[-1]
        assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", code)
        assert last["response"]["output"][0]["content"][0]["text"] == "half"
        assert last["response"]["output"][0]["status"] == "incomplete"


def test_encrypted_thoughts_are_given_if_asked_for() -> None:
    pieces = pieces_of(("reasoning", "h"))
    _, plain = assemble(pieces)
    _, response = assemble(pieces, include=["reasoning.encrypted_content"])
    assert "encrypted_content" not in plain["output"][0]
    assert response["output"][0]["encrypted_content"] == encode_reasoning("h")


def test_the_response_has_what_was_used() -> None:
    _, response = assemble(
        pieces_of(("content", "a")), temperature=0.5, metadata={"a": "b"}, tools=[ADD], seed=7, user="u"
    )
    wanted = {"temperature": 0.5, "top_p": 1.0, "metadata": {"a": "b"}, "user": "u", "mlxrun": {"seed": 7}}
    assert response.items() >= wanted.items()
    assert response["tools"] == [{"strict": False, **ADD}]
    _, response = assemble([], tools=[{"type": "function", "name": "f"}])
    assert response["tools"][0] == {
        "type": "function", "name": "f", "description": None, "parameters": None, "strict": False,
    }  # fmt: skip
    assert response["usage"]["total_tokens"] == response["usage"]["input_tokens"] + 2
    assert response["reasoning"] == {"effort": None, "summary": None}


# Anything.

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.text(max_size=4)
    | st.sampled_from(["user", "auto"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
PART = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["input_text", "output_text", "input_image", "refusal", "x"]) | JSON,
        "text": st.text(max_size=5) | JSON,
        "image_url": st.just(PNG) | JSON,
    },
)
ITEM = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["message", "reasoning", "function_call", "function_call_output"]) | JSON,
        "role": st.sampled_from(["user", "assistant", "system", "developer"]) | JSON,
        "content": st.text(max_size=5) | st.lists(PART, max_size=3) | JSON,
        "call_id": st.text(max_size=3) | JSON,
        "name": st.text(max_size=3) | JSON,
        "arguments": st.sampled_from(["{}", '{"a": 1}', "[", "1"]) | JSON,
        "output": st.text(max_size=3) | st.lists(PART, max_size=2) | JSON,
        "summary": st.lists(PART, max_size=2) | JSON,
        "id": st.text(max_size=3) | JSON,
    },
)
TOOL = st.fixed_dictionaries(
    {"type": st.sampled_from(["function", "custom", "namespace", "web_search", "mcp"]) | JSON},
    optional={"name": st.text(max_size=3) | JSON, "parameters": JSON, "tools": JSON, "format": JSON},
)
BODIES = st.fixed_dictionaries(
    {"input": st.text(max_size=5) | st.lists(ITEM, max_size=4) | JSON},
    optional={name: JSON for name in (*HONOURED, *HARMLESS, "bogus") if name not in ("input", "tools")}
    | {"tools": st.lists(TOOL, max_size=3) | JSON},
)


@settings(max_examples=120)
@given(BODIES)
def test_any_body_is_answered_or_refused(body: dict[str, Any]) -> None:
    """A51: and what is refused says where, in the sender's words."""
    host = FakeModelInfo(chat_template=TOOLS, vision=True)
    try:
        what, prepared = run(body, host)
    except RequestError as exc:
        assert exc.param is None or not exc.param.startswith(("messages", "max_completion_tokens"))
        return
    choice = Choice(prepared, 0, host)
    assembly = ResponseWriter(build_response("resp_t", 5, what, prepared), what, prepared)
    assembly.choice = choice
    assembly.feed(choice.feed(TokenEvent("r", ids_of("answer"), finish=FinishReason.STOP)))
    assembly.end(7)
    json.dumps(assembly.response)
