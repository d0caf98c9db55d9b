"""The limits of stored responses, items that responses share, and what a restart keeps of them."""

from __future__ import annotations

import json
import logging
import random
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mlxrun.server.responses.response_file import FILE_NAME, Changes, ResponseFile
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


def test_keys_of_schemas_count() -> None:
    kept = ResponseStore(100, 50_000)
    for i in range(9):
        properties = {f"{i}{'k' * 9000}": {"type": "string"}}
        tools = [{"name": name, "parameters": {"properties": properties}} for name in ("f", "g")]
        assert _put(kept, {**_response(f"r{i}"), "tools": tools}, [])
        assert 9000 * len(kept) < kept.bytes <= 50_000
    assert len(kept) in (4, 5), "a key that two tools have counts once"
    assert not _put(kept, {**_response("huge"), "text": {"format": {"k" * 60_000: 1}}}, [])


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


def test_an_item_is_found_as_long_as_an_object_has_one_of_its_id() -> None:
    """Clients send copies of items back. The newest one that is left is found."""
    kept = ResponseStore(1000, 10**9)
    first, copy, last = (_item("i", size) for size in (10, 20, 30))
    for number, item in enumerate((first, copy, last)):
        _put(kept, _response(f"r{number}"), [item])
    assert kept.get_item("", "i") is last
    kept.delete("", "r2")
    assert kept.get_item("", "i") is copy
    kept.delete("", "r0")
    assert kept.get_item("", "i") is copy
    kept.delete("", "r1")
    assert kept.get_item("", "i") is None and kept.bytes == 0 and not kept._index


# The file.

DAY = 86_400.0


@asynccontextmanager
async def open_store(
    path: Path, most: int = 1000, most_bytes: int = 10**9, **given: Any
) -> AsyncIterator[ResponseStore]:
    store = ResponseStore(most, most_bytes, file=ResponseFile(path), **given)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


def _describe(store: ResponseStore) -> Any:
    """All that a store has, but the order of use."""
    stored = {each.id: each for each in store._stored.values()}
    references = Counter(store._references[id(item)] for each in stored.values() for item in each.items)
    return stored, store.bytes, references


def _find_connection(store: ResponseStore) -> sqlite3.Connection:
    assert store._file is not None and store._file._connection is not None
    return store._file._connection


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / FILE_NAME


async def test_a_restart_keeps_what_was_flushed(path: Path) -> None:
    """Without a close, as after a kill: what shares items shares them again, and the sizes are the same."""
    first = ResponseStore(1000, 10**9, file=ResponseFile(path))
    await first.open()
    items = [_item("i0", 100_000)]
    for turn in range(30):
        answer = _item(f"o{turn}", 100)
        _put(first, _response(f"r{turn}", answer), items)
        items = [*items, answer, _item(f"i{turn + 1}")]
    first.delete("", "r3")
    await first.flush()
    _find_connection(first).close()
    async with open_store(path) as again:
        assert _describe(again) == _describe(first) and len(again) == 29
        found = again.get("", "r29")
        assert found is not None and found.body["output"][0] is found.items[-1]
        assert found.items[0] is again.get_item("", "i0")
    assert path.stat().st_size < 400_000


async def test_random_changes_survive_restarts(path: Path) -> None:
    """Objects that come, change, share items, go and are evicted: the file has the same, and no item more."""
    rng, pool = random.Random(0), [_item(f"i{at}", 100 * at) for at in range(40)]
    for _ in range(40):
        async with open_store(path, 20, 60_000) as store:
            for _ in range(rng.randrange(30)):
                name = f"r{rng.randrange(30)}"
                if rng.random() < 0.2:
                    store.delete("", name)
                items = rng.choices(pool, k=rng.randrange(5))
                if found := store.get("", f"r{rng.randrange(30)}"):
                    items = [*found.items, *items]
                _put(store, _response(name, *items[:1]), items[1:])
                if rng.random() < 0.5:
                    await store.flush()
            wanted = _describe(store)
        async with open_store(path, 20, 60_000) as again:
            assert _describe(again) == wanted
            assert again._changes == Changes() and len(again._numbers) == len(again._references)
        connection = sqlite3.connect(path)
        counts = [
            connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in ("objects", "items")
        ]
        connection.close()
        assert counts == [len(wanted[0]), len(again._references)]


async def test_an_item_that_the_file_keeps_would_be_seen(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: what is deleted in memory stays in the file."""
    write = ResponseFile.write

    def keep(file: ResponseFile, changes: Changes) -> None:
        write(file, Changes({name: each for name, each in changes.objects.items() if each}, changes.items))

    monkeypatch.setattr(ResponseFile, "write", keep)
    with pytest.raises(AssertionError):
        await test_random_changes_survive_restarts(path)


async def test_a_conversation_is_not_written_again_for_each_item(path: Path) -> None:
    async with open_store(path) as store:
        items = [_item(f"i{at}") for at in range(5)]
        conversation = {"id": "conv_1"}
        store.add(StoredObject.measure("", conversation, items))
        await store.flush()
        store.add(StoredObject.measure("", conversation, [*items[1:], _item("new")]))
        (added, removed) = store._changes.items.values()
        assert added is not None and added["item"]["id"] == "new" and removed is None


async def test_a_restart_counts_the_order_of_changes(path: Path) -> None:
    """With smaller limits the oldest ones go, and they go from the file too."""
    async with open_store(path) as store:
        for name in "abcd":
            _put(store, _response(name), [])
        _put(store, _response("a", _item("x")), [])
    async with open_store(path, most=2) as store:
        assert [name for name in "abcd" if store.get("", name)] == ["a", "d"]
    async with open_store(path) as store:
        assert len(store) == 2


async def test_objects_expire(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After their last change, while the server runs and over a restart; None: never."""
    now = [time.time()]
    async with open_store(path, lifetime=DAY, now=lambda: now[0]) as store:
        _put(store, _response("old", _item("o")), [])
        now[0] += DAY - 60
        assert store.get("", "old") is not None
        now[0] += 120
        assert store.get("", "old") is None and len(store) == 1
        caplog.set_level(logging.INFO)
        await store.tidy()
        assert (len(store), store.bytes) == (0, 0) and "1 stored responses" in caplog.text
        now[0] = time.time()
        _put(store, _response("new"), [])
    async with open_store(path, now=lambda: time.time() + 1000 * DAY) as store:
        assert store.get("", "new") is not None
    async with open_store(path, lifetime=2 * DAY, now=lambda: time.time() + DAY) as store:
        assert store.get("", "new") is not None
    async with open_store(path, lifetime=DAY, now=lambda: time.time() + DAY) as store:
        assert len(store) == 0


async def test_what_cannot_be_written_is_written_later(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A full disk is said once, memory has everything meanwhile, and so has the file afterwards."""
    caplog.set_level(logging.INFO)
    async with open_store(path) as store:
        for name in "ab":
            _put(store, _response(name, _item(name)), [])
        await store.flush()
        connection = _find_connection(store)
        connection.execute("PRAGMA max_page_count = 1")  # as many as there are now: SQLite finds no room
        _put(store, _response("c", _item("c", 20_000)), [])
        await store.flush()
        store.delete("", "a")
        _put(store, _response("c", _item("d", 20_000)), [])
        await store.flush()
        assert store.get("", "c") is not None and store.get("", "a") is None
        (record,) = caplog.records
        said = f"{path}: cannot be written: database or disk is full; new responses are in memory only"
        assert record.levelname == "ERROR" and record.getMessage().startswith(said)
        wanted = _describe(store)
        connection.execute("PRAGMA max_page_count = 1000000")
        await store.flush()
        assert caplog.records[-1].getMessage() == f"{path}: can be written again, and has all responses"
    async with open_store(path) as store:
        assert _describe(store) == wanted and set(wanted[0]) == {"b", "c"}


async def test_what_was_never_written_is_said_at_the_end(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(file: ResponseFile, changes: Changes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ResponseFile, "write", fail)
    async with open_store(path) as store:
        _put(store, _response("a"), [])
    assert f"{path}: the last changes were not written and are lost" in caplog.text


async def test_without_a_usable_file_there_is_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    async with open_store(tmp_path / "file" / FILE_NAME) as store:
        assert not store.is_durable and "end with the server" in caplog.text
        _put(store, _response("a"), [])
        await store.flush()
        assert store.get("", "a") is not None and store._changes == Changes()


async def test_what_is_read_of_a_damaged_file_is_written_anew(path: Path) -> None:
    async with open_store(path) as store:
        shared = _item("shared", 500)
        for name in "abc":
            _put(store, _response(name, _item(name, 500)), [shared])
    path.write_bytes(path.read_bytes().replace(b"x" * 500 + b'"}', b"y" * 500 + b'"}', 1))
    async with open_store(path) as store:
        kept = _describe(store)
    assert len(list(path.parent.glob("*damaged*"))) == 1
    async with open_store(path) as store:
        assert _describe(store) == kept and len(list(path.parent.glob("*damaged*"))) == 1


async def test_a_store_in_memory_collects_no_changes() -> None:
    store = ResponseStore(2, 10**6)
    for name in "abc":
        _put(store, _response(name, _item(name)), [])
    await store.flush()
    assert store._changes == Changes() and not store._numbers and not store.is_durable
    await store.close()


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
