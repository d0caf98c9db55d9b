"""Conversations: what their bodies may have, and the items that are added to them."""

from __future__ import annotations

from typing import Any

import pytest

from mlxrun.api.responses.input_items import (
    CREATE,
    ITEMS,
    UPDATE,
    build_conversation,
    read_new_items,
)
from mlxrun.core.errors import RequestError

USER = {"role": "user", "content": "a"}


def read(value: Any, known: Any = (), strict: bool = False) -> Any:
    return read_new_items(value, known, "t", {"old": {"id": "old", "type": "message"}}.get, strict)


def test_a_new_conversation() -> None:
    found = build_conversation("conv_1", 5, {"metadata": {"a": "b"}, "items": [USER]})
    assert found == {"id": "conv_1", "object": "conversation", "created_at": 5, "metadata": {"a": "b"}}
    assert build_conversation("conv_1", 5, {})["metadata"] == {}


@pytest.mark.parametrize(
    ("schema", "body", "param"),
    [
        (CREATE, {"metadata": {"a": 1}}, "metadata.a"),
        (CREATE, {"items": {}}, "items"),
        (CREATE, {"input": []}, "input"),
        (UPDATE, {"items": []}, "items"),
        (ITEMS, {"items": [], "include": ["x"]}, "include[0]"),
    ],
)
def test_bad_bodies(schema: Any, body: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        schema.check(body)
    assert caught.value.param == param


def test_items_are_read_as_those_of_a_response() -> None:
    """With ids of their own, in the one form in which items are stored."""
    first, second = read([USER, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}])
    assert first == {
        "id": "msg_tin00",
        "type": "message",
        "status": "completed",
        "role": "user",
        "content": [{"type": "input_text", "text": "a"}],
    }
    assert second["id"] == "fc_tin01" and second["arguments"] == "{}"
    (reference,) = read([{"type": "item_reference", "id": "old"}])
    assert reference["id"] == "old"
    assert read([]) == ()


@pytest.mark.parametrize(
    ("value", "known", "param"),
    [
        ([{**USER, "id": "m"}, {**USER, "id": "m"}], [], "items[1].id"),
        ([USER, {**USER, "id": "m"}], [{"id": "m"}], "items[1].id"),
        ([{"type": "item_reference", "id": "old"}], [{"id": "old"}], "items[0].id"),
        ([{"type": "item_reference", "id": "new"}], [], "items[0].id"),
        ([{"type": "poem"}], [], "items[0].type"),
        ([5], [], "items[0]"),
    ],
)
def test_bad_items_are_named(value: Any, known: Any, param: str) -> None:
    """An id names one item of a conversation."""
    with pytest.raises(RequestError) as caught:
        read(value, known)
    assert caught.value.param == param


def test_unknown_fields_of_items_are_refused_if_the_config_is_strict() -> None:
    assert "mood" not in read([{**USER, "mood": 1}])[0]
    with pytest.raises(RequestError) as caught:
        read([{**USER, "mood": 1}], strict=True)
    assert caught.value.param == "items[0].mood"
