"""Chat messages: roles and order, any JSON is normalised or refused, tool history."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxrun.errors import RequestError
from mlxrun.text.messages import ImageRef, normalize_messages

URL = "data:image/png;base64,AA=="


def user(content: Any = "hi", **extra: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **extra}


def image(url: str = URL) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def refused(messages: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        normalize_messages(messages)
    assert str(caught.value).startswith(f"{caught.value.param}: ")
    return caught.value


def test_system_messages_become_one_in_front() -> None:
    """Developer is system; several, also late ones, become one in front; their neighbours merge."""
    chat = normalize_messages(
        [
            {"role": "system", "content": "one"},
            user("a"),
            {"role": "developer", "content": [text("two"), text("three")]},
            user("b"),
        ]
    )
    assert chat.messages == [
        {"role": "system", "content": "one\n\ntwo\nthree"},
        {"role": "user", "content": "a\n\nb"},
    ]


def test_only_plain_strings_of_one_role_merge() -> None:
    """Multimodal lists, tool results, and assistant messages with calls stay what they are."""
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    chat = normalize_messages(
        [
            user("a"),
            user([text("b"), image()]),
            user("c", name="bob"),
            user("d"),
            {"role": "assistant", "content": "x"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "1", "tool_call_id": "t1"},
            {"role": "tool", "content": [text("2")], "tool_call_id": "t2"},
            {"role": "assistant", "content": "y"},
            {"role": "assistant", "content": "z"},
        ]
    )
    assert [m["role"][0] for m in chat.messages] == list("uuuuaatta")
    assert chat.messages[1]["content"] == [text("b"), {"type": "image"}]
    assert chat.messages[7] == {"role": "tool", "content": "2", "tool_call_id": "t2"}
    assert chat.messages[8]["content"] == "y\n\nz"


def test_images_keep_the_senders_order() -> None:
    chat = normalize_messages([user([image("a"), text("x"), image("b")]), user([image("c")])])
    assert chat.images == (
        ImageRef("a", "messages[0].content[0].image_url.url"),
        ImageRef("b", "messages[0].content[2].image_url.url"),
        ImageRef("c", "messages[1].content[0].image_url.url"),
    )
    assert [part["type"] for part in chat.messages[0]["content"]] == ["image", "text", "image"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": [1, 2.0]}', {"a": [1, 2.0]}), ("", {}), (None, {}), ({"a": 1}, {"a": 1})],
)
def test_tool_arguments_become_objects(arguments: Any, expected: Any) -> None:
    """Templates iterate over arguments; the API sends them as text."""
    message = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [{"id": "t", "type": "function", "function": {"name": "f", "arguments": arguments}}],
    }
    (turn,) = normalize_messages([message]).messages
    assert turn == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "t", "type": "function", "function": {"name": "f", "arguments": expected}}],
    }


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        (None, "messages", "null"),
        ([], "messages", "empty"),
        ({}, "messages", "object"),
        ([user(), "x"], "messages[1]", "expected object, got string"),
        ([{"content": "x"}], "messages[0].role", "missing"),
        ([{"role": 1, "content": "x"}], "messages[0].role", "integer"),
        ([{"role": "asistant", "content": "x"}], "messages[0].role", "did you mean 'assistant'"),
        ([{"role": "function", "content": "x"}], "messages[0].role", "deprecated"),
        ([{"role": "user"}], "messages[0].content", "missing"),
        ([{"role": "assistant", "content": None}], "messages[0].content", "missing"),
        ([user(3)], "messages[0].content", "integer"),
        ([user([])], "messages[0].content", "empty"),
        ([user(["x"])], "messages[0].content[0]", "expected object"),
        ([user([{"text": "x"}])], "messages[0].content[0].type", "missing"),
        ([user([text("x"), {"type": "txt"}])], "messages[0].content[1].type", "did you mean 'text'"),
        ([user([{"type": "input_audio"}])], "messages[0].content[0].type", "not supported"),
        ([{"role": "tool", "content": "2", "name": "add"}], "messages[0].tool_call_id", "missing"),
        ([{"role": "tool", "content": "2", "tool_call_id": None}], "messages[0].tool_call_id", "missing"),
        ([user([{"type": "text", "text": None}])], "messages[0].content[0].text", "null"),
        ([user([{**text("x"), "cache_control": {}}])], "messages[0].content[0].cache_control", "unknown"),
        ([user([{"type": "image_url", "image_url": URL}])], "messages[0].content[0].image_url", "string"),
        ([user([{"type": "image_url", "image_url": {}}])], "messages[0].content[0].image_url.url", "null"),
        ([{"role": "system", "content": [image()]}], "messages[0].content[0].type", "user messages only"),
        ([{"role": "system", "content": "x", "name": "n"}], "messages[0].name", "not supported"),
        ([user(contnt="x")], "messages[0].contnt", "did you mean 'content'"),
        ([user(name=1)], "messages[0].name", "integer"),
        ([{"role": "assistant", "content": "x", "audio": {"id": "1"}}], "messages[0].audio", "not supported"),
    ],
)
def test_bad_messages_are_named(messages: Any, param: str, words: str) -> None:
    """What and where, never a crash and never silently skipped."""
    error = refused(messages)
    assert error.param == param
    assert words in str(error)


@pytest.mark.parametrize(
    ("call", "where"),
    [
        ("x", ""),
        ({"type": "custom"}, ".type"),
        ({"function": None}, ".function"),
        ({"function": {"name": None}}, ".function.name"),
        ({"function": {"name": "f", "arguments": "{"}}, ".function.arguments"),
        ({"function": {"name": "f", "arguments": "[1]"}}, ".function.arguments"),
        ({"function": {"name": "f", "arguments": '{"a": NaN}'}}, ".function.arguments"),
        ({"function": {"name": "f", "arguments": "[" * 5000}}, ".function.arguments"),
        ({"function": {"name": "f"}, "id": 1}, ".id"),
    ],
)
def test_bad_tool_calls_are_named(call: Any, where: str) -> None:
    error = refused([{"role": "assistant", "content": "x", "tool_calls": [call]}])
    assert error.param == f"messages[0].tool_calls[0]{where}"


def test_low_detail_is_refused() -> None:
    """Nothing accepted is ignored: fewer pixels cannot be had."""
    part = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
    assert refused([user([part])]).param == "messages[0].content[0].image_url.detail"


KEYS = st.sampled_from(
    [
        "role",
        "content",
        "type",
        "text",
        "image_url",
        "url",
        "tool_calls",
        "function",
        "name",
        "arguments",
        "id",
    ]
)
WORDS = st.sampled_from(
    ["user", "system", "assistant", "tool", "developer", "text", "image_url", "function", "{}"]
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | WORDS
ANY = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS | st.text(max_size=3), inner),
    max_leaves=12,
)
LIKELY = st.fixed_dictionaries({"role": WORDS, "content": ANY}, optional={"tool_calls": ANY, "name": ANY})


@settings(max_examples=300, deadline=None)
@given(ANY | st.lists(LIKELY | ANY, max_size=4))
def test_any_json_is_normalised_or_refused(messages: Any) -> None:
    """Fuzzed: the result is what templates can take, or a RequestError with a path."""
    try:
        chat = normalize_messages(messages)
    except RequestError as error:
        assert error.param is not None and error.param.startswith("messages")
        return
    json.dumps(chat.messages)
    roles = [message["role"] for message in chat.messages]
    assert "system" not in roles[1:] and "developer" not in roles
    for message in chat.messages:
        assert isinstance(message["content"], str | list)
        for call in message.get("tool_calls", []):
            assert isinstance(call["function"]["arguments"], dict)
