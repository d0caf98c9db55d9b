"""Input items become chat messages."""

from __future__ import annotations

from typing import Any

import pytest

from mlxrun.api.opaque_reasoning import encode_reasoning
from tests.helpers.pdf_files import RGB, make_pdf, pdf_url
from tests.helpers.responses_api import PNG, messages, run, text, user
from tests.helpers.tokenizers import FakeModelInfo


def test_a_string_is_a_user_message() -> None:
    assert messages() == [{"role": "user", "content": "hi"}]


def test_instructions_come_first_and_developers_stay_for_normalizing() -> None:
    """Roles are made right by the one place that does so."""
    items = [{"role": "developer", "content": "d"}, {"role": "user", "content": "u"}]
    assert messages(instructions="i", input=items) == [
        {"role": "system", "content": "i"},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "u"},
    ]


def test_texts_are_joined_without_separators() -> None:
    items = [user(text("a"), text("b")), {"role": "assistant", "content": [text("c"), text("d")]}]
    assert [m["content"] for m in messages(input=items)] == ["ab", "cd"]


def test_the_items_of_one_turn_become_one_message() -> None:
    """Reasoning, text and calls of a turn are one message, as a chat client would send it."""
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


@pytest.mark.parametrize(
    ("item", "reasoning"),
    [
        ({"summary": [text("s", "summary_text")], "content": [text("c", "reasoning_text")]}, "c"),
        ({"summary": [text("s", "summary_text")]}, "s"),
        ({"summary": [], "encrypted_content": encode_reasoning("d\u00e9j\u00e0")}, "d\u00e9j\u00e0"),
        ({"summary": [], "content": None, "encrypted_content": None}, None),
    ],
)
def test_reasoning_comes_back(item: dict[str, Any], reasoning: str | None) -> None:
    items = ["", {"type": "reasoning", **item}, {"role": "assistant", "content": "a"}]
    items[0] = {"role": "user", "content": "q"}
    assert messages(input=items)[1].get("reasoning_content") == reasoning


def test_images_go_to_the_chat_form() -> None:
    part = {"type": "input_image", "image_url": PNG, "detail": "auto"}
    content = messages(input=[user(text("a"), part)])[0]["content"]
    assert content == [text("a", "text"), {"type": "image_url", "image_url": {"url": PNG, "detail": "auto"}}]
    _, prepared = run({"input": [user(text("a"), part)]}, FakeModelInfo(vision=True))
    assert len(prepared.requests[0].image_spans) == 1


def test_files_go_to_the_chat_form() -> None:
    """By their data or their URL; in outputs of tools too."""
    url = pdf_url(make_pdf("green", "blue"))
    part = {"type": "input_file", "file_data": url, "filename": "a.pdf"}
    linked = {"type": "input_file", "file_url": url}
    content = messages(input=[user(text("a"), part, linked)])[0]["content"]
    assert content == [text("a", "text"), *[{"type": "file", "file": {"file_data": url}}] * 2]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": [linked]}
    for items in ([user(text("a"), part)], [user(text("a")), call, output]):
        _, prepared = run({"input": items}, FakeModelInfo(vision=True))
        assert prepared.requests[0].media == (RGB["green"], RGB["blue"])


def test_audio_goes_to_the_chat_form() -> None:
    part = {"type": "input_audio", "input_audio": {"data": "AAA=", "format": "wav"}}
    assert messages(input=[user(text("a"), part)])[0]["content"] == [text("a", "text"), part]
