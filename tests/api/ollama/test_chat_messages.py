"""Ollama's messages become those of a chat body: images, and results without the ids of their calls."""

from __future__ import annotations

from typing import Any

import pytest

from mlxrun.api.ollama.chat_messages import OllamaMessages
from mlxrun.core.errors import RequestError


def translate(*messages: Any) -> OllamaMessages:
    found = OllamaMessages()
    for i, message in enumerate(messages):
        found.add(message, f"messages[{i}]")
    return found


def call(name: str, **fields: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": {"a": 1}}, **fields}


def result(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "content": content, **fields}


def list_ids(*messages: Any) -> list[str]:
    """The ids that the results got."""
    made = translate(*messages).messages
    return [message["tool_call_id"] for message in made if message["role"] == "tool"]


def test_images_go_before_the_text() -> None:
    found = translate({"role": "USER", "content": "what?", "images": ["AAAA", "BB\r\nBB"]})
    urls = [f"data:image/png;base64,{data}" for data in ("AAAA", "BBBB")]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    parts.append({"type": "text", "text": "what?"})
    assert found.messages == [{"role": "user", "content": parts}]
    assert found.sources["messages[0].content[1].image_url.url"] == "messages[0].images[1]"
    assert found.sources["messages[0].content[2].text"] == "messages[0].content"


def test_content_may_be_missing() -> None:
    assert translate({"role": "user", "images": []}).messages == [{"role": "user", "content": ""}]


def test_results_find_their_calls() -> None:
    """By name first, in the order of the calls else; a call has one result."""
    calls = {"role": "assistant", "content": "", "tool_calls": [call("f"), call("g"), call("f")]}
    named = (result("1", tool_name="g"), result("2", tool_name="f"), result("3", tool_name="f"))
    assert list_ids(calls, *named) == ["call00002", "call00001", "call00003"]
    assert list_ids(calls, result("1"), result("2"), result("3")) == ["call00001", "call00002", "call00003"]


def test_ids_that_are_given_are_kept() -> None:
    calls = {"role": "assistant", "tool_calls": [call("f", id="mine"), call("f")]}
    assert list_ids(calls, result("1"), result("2")) == ["mine", "call00002"]
    assert list_ids(calls, result("1", tool_call_id="mine"), result("2")) == ["mine", "call00002"]


def test_a_result_without_a_call_has_an_id() -> None:
    assert list_ids(result("1")) == ["call00000"]


def test_the_name_of_the_tool_and_the_calls_index() -> None:
    calls = {"role": "assistant", "tool_calls": [{"function": {"index": 3, "name": "f", "arguments": {}}}]}
    made = translate(calls, result("1", tool_name="f")).messages
    assert made[0]["tool_calls"] == [{"id": "call00001", "function": {"name": "f", "arguments": {}}}]
    assert made[1] == {"role": "tool", "name": "f", "tool_call_id": "call00001", "content": "1"}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (7, "messages[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content"),
        ({"role": "user", "images": "AAAA"}, "messages[0].images"),
        ({"role": "user", "images": ["AAAA", 5]}, "messages[0].images[1]"),
        ({"role": "tool", "content": "1", "tool_name": 5}, "messages[0].tool_name"),
    ],
)
def test_a_wrong_type_is_named(message: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        translate(message)
    assert caught.value.param == param
