"""Chat messages: roles and order, any JSON is normalised or refused, tool history."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxrun.api.text.media.media_kinds import PDF, MediaRef
from mlxrun.api.text.messages import MessageSupport, normalize_messages
from mlxrun.core.errors import RequestError
from tests.helpers.examples import count_examples

URL = "data:image/png;base64,AA=="


def user(content: Any = "hi", **extra: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **extra}


def image(url: str = URL) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def file(data: str = "a.pdf", **more: Any) -> dict[str, Any]:
    return {"type": "file", "file": {"file_data": data, **more}}


def spoken(**audio: Any) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": audio}


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
        MediaRef("a", "messages[0].content[0].image_url.url"),
        MediaRef("b", "messages[0].content[2].image_url.url"),
        MediaRef("c", "messages[1].content[0].image_url.url"),
    )
    assert [part["type"] for part in chat.messages[0]["content"]] == ["image", "text", "image"]


def test_audio_has_two_forms() -> None:
    """OpenAI's with the bytes, and a URL; both are the template's `audio`."""
    url = {"type": "audio_url", "audio_url": {"url": "a.wav"}}
    chat = normalize_messages([user([spoken(data="AAA=", format="mp3"), url, spoken(data=URL)])])
    assert [ref.url for ref in chat.images] == ["data:audio/wav;base64,AAA=", "a.wav", URL]
    assert [ref.param for ref in chat.images] == [
        "messages[0].content[0].input_audio.data",
        "messages[0].content[1].audio_url.url",
        "messages[0].content[2].input_audio.data",
    ]
    assert chat.messages[0]["content"] == [{"type": "audio"}] * 3


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
        ([user([{"type": "image_file"}])], "messages[0].content[0].type", "not supported"),
        ([user([{"type": "input_audio"}])], "messages[0].content[0].input_audio", "expected object"),
        ([user([spoken(format="wav")])], "messages[0].content[0].input_audio.data", "missing"),
        ([user([spoken(data=1)])], "messages[0].content[0].input_audio.data", "string"),
        ([user([spoken(data="/tmp/memo.wav")])], "messages[0].content[0].input_audio.data", "part audio_url"),
        ([user([spoken(data="https://a/b")])], "messages[0].content[0].input_audio.data", "part audio_url"),
        ([user([spoken(data="", format=1)])], "messages[0].content[0].input_audio.format", "string"),
        ([{"role": "system", "content": [spoken(data="")]}], "messages[0].content[0].type", "of tools only"),
        ([{"role": "tool", "content": "2", "name": "add"}], "messages[0].tool_call_id", "missing"),
        ([{"role": "tool", "content": "2", "tool_call_id": None}], "messages[0].tool_call_id", "missing"),
        ([user([{"type": "text", "text": None}])], "messages[0].content[0].text", "null"),
        ([user([{"type": "image_url", "image_url": URL}])], "messages[0].content[0].image_url", "string"),
        ([user([{"type": "image_url", "image_url": {}}])], "messages[0].content[0].image_url.url", "null"),
        ([user([{"type": "file"}])], "messages[0].content[0].file", "expected object"),
        ([user([{"type": "file", "file": {}}])], "messages[0].content[0].file.file_data", "missing"),
        ([user([file(file_id="f")])], "messages[0].content[0].file.file_id", "not read here"),
        ([{"role": "assistant", "content": [file()]}], "messages[0].content[0].type", "of tools only"),
        ([{"role": "system", "content": [image()]}], "messages[0].content[0].type", "of tools only"),
        ([{"role": "assistant", "content": [image()]}], "messages[0].content[0].type", "of tools only"),
        ([{"role": "assistant", "content": "x", "refusal": "no"}], "messages[0].refusal", "beside a content"),
        ([{"role": "assistant", "content": None, "refusal": 1}], "messages[0].refusal", "string"),
        ([{"role": "user", "content": "x", "refusal": "no"}], "messages[0].refusal", "not supported"),
        ([user([{"type": "refusal", "refusal": "no"}])], "messages[0].content[0].type", "not supported"),
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
        ({"function": {"name": "f", "arguments": [1]}}, ".function.arguments"),
        ({"function": {"name": "f", "arguments": 1}}, ".function.arguments"),
        ({"function": {"name": "f"}, "id": 1}, ".id"),
    ],
)
def test_bad_tool_calls_are_named(call: Any, where: str) -> None:
    error = refused([{"role": "assistant", "content": "x", "tool_calls": [call]}])
    assert error.param == f"messages[0].tool_calls[0]{where}"


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ANSWER = {"role": "assistant", "content": "x", "reasoning_content": "r", "tool_calls": [CALL]}


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        (user([{**text("x"), "cache_control": {"type": "ephemeral"}}]), "content[0].cache_control"),
        (user([{**text("x"), "prompt_cache_breakpoint": True}]), "content[0].prompt_cache_breakpoint"),
        (user(contnt="x"), "contnt"),
        ({"role": "system", "content": "x", "name": "n"}, "name"),
        *(
            (user([{"type": "image_url", "image_url": {"url": URL, name: value}}]),)
            + (f"content[0].image_url.{name}",)
            for name, value in (("detail", "low"), ("detail", 5), ("format", "image/png"))
        ),
        *(
            ({**ANSWER, name: value}, name)
            for name, value in {
                "annotations": [{"type": "url_citation"}],
                "images": [{"image_url": {"url": URL}}],
                "provider_specific_fields": {"a": 1},
                "reasoning_details": [{"type": "reasoning.text", "text": "r"}],
                "thinking_blocks": [{"type": "thinking", "thinking": "r", "signature": "s"}],
                "token_ids": [1],
            }.items()
        ),
        ({**ANSWER, "tool_calls": [{**CALL, "index": 0}]}, "tool_calls[0].index"),
        (
            {**ANSWER, "tool_calls": [{**CALL, "function": {**CALL["function"], "parsed_arguments": {}}}]},
            "tool_calls[0].function.parsed_arguments",
        ),
        ({"role": "tool", "content": "1", "tool_call_id": "c", "is_error": False}, "is_error"),
    ],
)
def test_what_clients_send_back_has_no_effect(sent: dict[str, Any], param: str) -> None:
    """Unknown fields of messages, parts and calls; refused by name only if fields are strict."""

    def without(value: Any, path: list[Any]) -> Any:
        if len(path) == 1:
            return {key: item for key, item in value.items() if key != path[0]}
        items = value.items() if isinstance(value, dict) else enumerate(value)
        changed = {key: without(item, path[1:]) if key == path[0] else item for key, item in items}
        return changed if isinstance(value, dict) else list(changed.values())

    path = [int(part) if part.isdigit() else part for part in re.findall(r"\w+", param)]
    assert normalize_messages([sent]) == normalize_messages([without(sent, path)])
    with pytest.raises(RequestError) as caught:
        normalize_messages([sent], strict=True)
    assert caught.value.param == f"messages[0].{param}"


def test_a_field_with_content_is_not_ignored() -> None:
    """The twin of the test above."""
    assert normalize_messages([ANSWER]) != normalize_messages([{**ANSWER, "reasoning_content": "s"}])


@pytest.mark.parametrize(
    "message",
    [
        {"content": None, "refusal": "I cannot"},
        {"content": "", "refusal": "I cannot"},
        {"content": [{"type": "refusal", "refusal": "I cannot"}]},
    ],
)
def test_a_refusal_is_text(message: dict[str, Any]) -> None:
    (turn,) = normalize_messages([{"role": "assistant", **message}]).messages
    assert turn == {"role": "assistant", "content": "I cannot"}
    with pytest.raises(RequestError, match="refusal|content"):
        normalize_messages([{"role": "assistant", **message}], strict=True)


BROKEN = ["{", "[1]", '{"a": NaN}', '"x"', "5", "[" * 5000, '{"city": "Praha"', "not json"]


@pytest.mark.parametrize("arguments", BROKEN)
def test_arguments_that_are_no_object_stay_text(arguments: str) -> None:
    """An agent goes on after its model wrote broken JSON: the text is in the prompt."""
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}

    def read(support: MessageSupport) -> Any:
        (turn,) = normalize_messages([{**ANSWER, "tool_calls": [call]}], support).messages
        return turn["tool_calls"][0]["function"]["arguments"]

    assert read(MessageSupport(text_arguments=True)) == arguments
    assert read(MessageSupport()) == {"arguments": arguments}


def test_arguments_for_templates_that_know_only_text() -> None:
    support = MessageSupport(object_arguments=False, text_arguments=True)
    sent = ['{"a":  1}', "", {"a": "č"}, "{"]
    calls = [{**CALL, "function": {"name": "f", "arguments": each}} for each in sent]
    (turn,) = normalize_messages([{**ANSWER, "tool_calls": calls}], support).messages
    read = [call["function"]["arguments"] for call in turn["tool_calls"]]
    assert read == ['{"a":  1}', "{}", '{"a": "č"}', "{"]


RESULT = {"role": "tool", "tool_call_id": "c"}
IMAGE = {"type": "image"}


def test_images_of_results_are_the_users_next() -> None:
    """All results of a turn stay together; the images begin the user's message, or make one."""
    sent = [
        user("look"),
        ANSWER,
        {**RESULT, "content": [text("one"), image("a"), text("two")]},
        {**RESULT, "content": [image("b")]},
        user("and?"),
        ANSWER,
        {**RESULT, "content": [image("c")]},
        {"role": "assistant", "content": "y"},
        {**RESULT, "content": [image("d")]},
    ]
    chat = normalize_messages(sent)
    assert [each["role"][0] for each in chat.messages] == list("uattuatuatu")
    assert [each["content"] for each in chat.messages if each["role"] == "tool"] == ["one\ntwo", "", "", ""]
    users = [each["content"] for each in chat.messages if each["role"] == "user"]
    assert users == ["look", [IMAGE, IMAGE, text("and?")], [IMAGE], [IMAGE]]
    assert [ref.url for ref in chat.images] == list("abcd")
    before_image = normalize_messages([*sent[:4], user([text("so"), image("e")])])
    assert before_image.messages[-1]["content"] == [IMAGE, IMAGE, text("so"), IMAGE]
    assert [ref.url for ref in before_image.images] == list("abe")


def test_images_of_results_stay_where_the_template_renders_them() -> None:
    sent = [ANSWER, {**RESULT, "content": [text("one"), image("a")]}, user("and?")]
    chat = normalize_messages(sent, MessageSupport(tool_images=True))
    assert [each["content"] for each in chat.messages] == ["x", [text("one"), IMAGE], "and?"]
    assert chat.images == (MediaRef("a", "messages[1].content[1].image_url.url"),)


def test_late_system_messages_stay_where_the_template_renders_them() -> None:
    sent = [
        {"role": "system", "content": "one"},
        {"role": "developer", "content": "two"},
        user("a"),
        {"role": "system", "content": "three"},
        user("b"),
    ]
    chat = normalize_messages(sent, MessageSupport(late_system=True))
    assert chat.messages == [
        {"role": "system", "content": "one\n\ntwo"},
        user("a"),
        {"role": "system", "content": "three"},
        user("b"),
    ]


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


@settings(max_examples=count_examples(300), deadline=None)
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


def test_files_take_the_place_of_images() -> None:
    """In order with images, in messages of tools too, which move as images do."""
    tool = {"role": "tool", "tool_call_id": "t", "content": [file("b.pdf"), text("x")]}
    found = normalize_messages([user([text("a"), file(filename="n"), image()]), tool])
    assert found.messages[0]["content"] == [text("a"), {"type": "image"}, {"type": "image"}]
    assert found.messages[2]["content"] == [{"type": "image"}]
    assert found.images == (
        MediaRef("a.pdf", "messages[0].content[1].file.file_data", PDF),
        MediaRef(URL, "messages[0].content[2].image_url.url"),
        MediaRef("b.pdf", "messages[1].content[0].file.file_data", PDF),
    )
    with pytest.raises(RequestError, match=r"messages\[0\].content\[0\].file.pages"):
        normalize_messages([user([file(pages=3)])], strict=True)
