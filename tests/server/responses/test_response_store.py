"""The limits of stored responses, and items that responses share."""

from __future__ import annotations

from typing import Any

from mlxrun.server.responses.response_store import ResponseStore, StoredObject


def _response(name: str, *outputs: dict[str, Any]) -> dict[str, Any]:
    return {"id": name, "status": "completed", "output": list(outputs)}


def _item(name: str, size: int = 10) -> dict[str, Any]:
    return {"id": name, "text": "x" * size}


def _put(store: ResponseStore, response: dict[str, Any], context: list[dict[str, Any]]) -> bool:
    return store.add(StoredObject.measure("", response, [*context, *response["output"]]))


def test_the_store_is_bounded_by_count() -> None:
    kept = ResponseStore(2, 10**6)
    for name in "abc":
        _put(kept, _response(name), [])
        kept.get("", "a")
    assert [kept.get("", name) is not None for name in "abc"] == [True, False, True], "the oldest use goes"


def test_the_store_is_bounded_by_bytes() -> None:
    kept = ResponseStore(100, 50_000)
    for i in range(20):
        assert _put(kept, _response(f"r{i}", _item(f"o{i}", 9000)), [_item(f"i{i}")])
        assert kept.bytes <= 50_000
    assert 3 <= len(kept) <= 5
    assert kept.get_item("", "o19") is not None and kept.get_item("", "o0") is None
    there, size = len(kept), kept.bytes
    assert not _put(kept, _response("huge", _item("h", 60_000)), [])
    assert (len(kept), kept.bytes) == (there, size), "what never fits makes nobody go"
    for i in range(20):
        kept.delete("", f"r{i}")
    assert len(kept) == 0 and kept.bytes == 0


def test_items_that_responses_share_count_once() -> None:
    kept = ResponseStore(1000, 10**9)
    items = [_item("i0", 100_000)]
    for turn in range(30):
        answer = _item(f"o{turn}", 100)
        _put(kept, _response(f"r{turn}", answer), items)
        items = [*items, answer, _item(f"i{turn + 1}")]
    assert kept.bytes < 250_000
    for turn in range(29):
        kept.delete("", f"r{turn}")
    assert kept.get_item("", "i0") is items[0], "the last one holds it still"
    assert kept.bytes > 100_000
    kept.delete("", "r29")
    assert kept.bytes == 0 and kept.get_item("", "i0") is None
