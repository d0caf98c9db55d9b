"""Stored objects: described for a file, and made again of that."""

from __future__ import annotations

import json
from typing import Any

from mlxrun.server.responses.stored_object import StoredObject

ITEMS: list[dict[str, Any]] = [{"id": f"i{at}", "text": "x" * at} for at in range(4)]


def restore(stored: StoredObject) -> StoredObject:
    numbers = [7 + at for at in range(len(stored.items))]
    document = json.loads(json.dumps(stored.describe(numbers)))
    items, sizes = (
        dict(zip(numbers, stored.items, strict=True)),
        dict(zip(numbers, stored.item_bytes, strict=True)),
    )
    return StoredObject.restore(document, items, sizes)


def test_a_response_is_the_same_again() -> None:
    """Its output is the end of its items, in its place of the body, and the rest is its context."""
    for num_outputs in (0, 1, 3):
        output = ITEMS[len(ITEMS) - num_outputs :]
        body = {"id": "resp_1", "output": output, "status": "completed"}
        stored = StoredObject.measure("ann", body, ITEMS, [("response.created", "{}")])
        again = restore(stored)
        assert again == stored and list(again.body) == list(body)
        assert again.context == tuple(ITEMS[: len(ITEMS) - num_outputs])
        assert all(one is other for one, other in zip(again.body["output"], output, strict=True))


def test_a_conversation_has_no_output() -> None:
    stored = StoredObject.measure("", {"id": "conv_1", "metadata": {}}, ITEMS[:2])
    assert restore(stored) == stored and "output" not in restore(stored).body


def test_bytes_grow_with_texts_items_and_events() -> None:
    def measure(text: str, num_items: int, *events: tuple[str, str]) -> int:
        body = {"id": "resp_1", "instructions": text, "output": []}
        stored = StoredObject.measure("", body, ITEMS[:num_items], events)
        assert len(stored.item_bytes) == num_items
        return stored.base_bytes

    assert measure("a" * 1000, 0) - measure("", 0) == 1000
    assert measure("", 3) > measure("", 0)
    assert measure("", 0, ("e", "x" * 500)) > measure("", 0) + 500
