"""Stores responses and conversations in memory, within limits of count, bytes and age, and in a file if there
is one.

The least recently used object is evicted first. Items that several objects share are stored and counted once.
An object belongs to the API key that created it; for other keys it does not exist. The file has the same
objects once `flush` has returned, and the next store of that file begins with them.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any

from mlxrun.server.batches.durable_files import StorageError
from mlxrun.server.responses.response_file import Changes, Contents, ResponseFile

Item = dict[str, Any]
Event = tuple[str, str]  # its type, and its JSON
_EVENT_BYTES = 150  # of an event besides its text


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A finished response or a conversation, with its items. It is never changed.

    `body`: as clients get it. `items`: a response has those of its prompt and its output; the next response
    begins with them. `events`: of a response that ran in the background. `changed_at`: seconds since 1970.
    """

    owner: str
    body: dict[str, Any]
    items: tuple[Item, ...]
    base_bytes: int  # without the items
    item_bytes: tuple[int, ...]
    events: tuple[Event, ...] = ()
    changed_at: float = 0.0

    @classmethod
    def measure(
        cls, owner: str, body: dict[str, Any], items: Sequence[Item], events: Sequence[Event] = ()
    ) -> StoredObject:
        """Make an object and measure its bytes. Slow for a long conversation: call it on a worker thread."""
        sizes = tuple(map(_count_bytes, items))
        base = {**body, "output": None}
        base_bytes = _count_bytes(base) + _count_key_bytes(list(base.values())) + 8 * len(items)
        base_bytes += sum(len(text) + _EVENT_BYTES for _, text in events)
        return cls(owner, body, tuple(items), base_bytes, sizes, tuple(events), time.time())

    @classmethod
    def restore(
        cls, document: dict[str, Any], items: Mapping[int, Item], sizes: Mapping[int, int]
    ) -> StoredObject:
        """Make the object that `describe` described. `items`, and their bytes in `sizes`: by number."""
        numbers, events = document["numbers"], tuple((name, text) for name, text in document["events"])
        own = tuple(items[number] for number in numbers)
        body = document["body"]
        if "output" in body:
            body["output"] = list(own[len(own) - body["output"] :])
        own_sizes = tuple(sizes[number] for number in numbers)
        return cls(document["owner"], body, own, document["bytes"], own_sizes, events, document["changed_at"])

    def describe(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Describe the object for a file that has its items under these numbers. A response's output is the
        end of its items, and only counted."""
        body = self.body | ({"output": len(self.body["output"])} if "output" in self.body else {})
        fields = {"owner": self.owner, "changed_at": self.changed_at, "bytes": self.base_bytes}
        return fields | {"body": body, "numbers": numbers, "events": self.events}

    @property
    def id(self) -> str:
        return str(self.body["id"])

    @property
    def context(self) -> tuple[Item, ...]:
        """The items of a response's prompt."""
        return self.items[: len(self.items) - len(self.body["output"])]

    def iterate_sizes(self) -> Iterator[tuple[Item, int]]:
        """Iterate over the items, each with its bytes."""
        return zip(self.items, self.item_bytes, strict=True)


def _count_bytes(value: Any) -> int:
    """Memory of a JSON value without its keys, as responses and items have the same ones."""
    return sum(map(sys.getsizeof, _iterate_values(value)))


def _count_key_bytes(value: Any) -> int:
    """Memory of the keys in a JSON value, each once. Those in schemas are the client's, of any length."""
    objects = (each for each in _iterate_values(value) if isinstance(each, dict))
    return sum(map(sys.getsizeof, set(chain.from_iterable(objects))))


def _iterate_values(value: Any) -> Iterator[Any]:
    """Iterate over a JSON value and all values within it."""
    stack = [value]
    while stack:
        each = stack.pop()
        yield each
        if isinstance(each, dict):
            stack.extend(each.values())
        elif isinstance(each, list):
            stack.extend(each)


log = logging.getLogger(__name__)


class ResponseStore:
    """At most `max_objects` responses and conversations, of `max_bytes` together. Thread-safe and fast.

    `lifetime`: seconds from an object's last change until it is removed; None: it is not. `file`: call `open`
    first, `flush` after changes, and `close` in the end.
    """

    def __init__(
        self,
        max_objects: int,
        max_bytes: int,
        *,
        lifetime: float | None = None,
        file: ResponseFile | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.bytes = 0
        self._max_objects = max_objects
        self._max_bytes = max_bytes
        self._lifetime = lifetime
        self._file = file
        self._now = now
        self._lock = threading.RLock()
        self._stored: OrderedDict[str, StoredObject] = OrderedDict()  # the least recently used one first
        self._references: Counter[int] = Counter()  # by id() of an item: how many objects have it
        # By owner and the item's own id: all such items by id(), the newest one last.
        self._index: dict[tuple[str, str], dict[int, Item]] = {}
        self._numbers: dict[int, int] = {}  # by id() of an item: its number in the file
        self._last_number = 0
        self._changes = Changes()  # that the file does not have yet
        self._is_failing = False  # the last change could not be written
        self._thread = ThreadPoolExecutor(1, "stored-responses")  # of the file; it starts with the first call

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def is_durable(self) -> bool:
        """Whether what is stored outlives the process."""
        return self._file is not None

    def add(self, stored: StoredObject) -> bool:
        """Store an object in place of the one with its id. False if it alone exceeds the limits; then neither
        is stored."""
        name = stored.id
        own = {id(item): size for item, size in stored.iterate_sizes()}
        if stored.base_bytes + sum(own.values()) > self._max_bytes:  # or all others would be evicted first
            log.warning("%s is too large for server.store_bytes and was not stored", name)
            self.delete(stored.owner, name)
            return False
        with self._lock:
            before = self._stored.pop(name, None)
            self._insert(stored)
            if before is not None:  # the items that both have stay where they are
                self._release(before)
            self._evict()
            return name in self._stored

    def get(self, owner: str, name: str) -> StoredObject | None:
        """Return the object of this owner and id, if any, and make it the most recently used one."""
        with self._lock:
            stored = self._stored.get(name)
            if stored is None or stored.owner != owner or self._has_expired(stored):
                return None
            self._stored.move_to_end(name)
            return stored

    def get_item(self, owner: str, item_id: str) -> Item | None:
        """Return the newest item of this id in an object of this owner."""
        with self._lock:
            found = self._index.get((owner, item_id))
            return None if found is None else found[next(reversed(found))]

    def delete(self, owner: str, name: str) -> None:
        """Delete an object if it exists. Other objects keep the items that they share with it."""
        with self._lock:
            if self.get(owner, name) is not None:
                self._remove(name)

    def remove_expired(self) -> None:
        """Remove objects whose lifetime is over."""
        with self._lock:
            expired = [name for name, stored in self._stored.items() if self._has_expired(stored)]
            for name in expired:
                self._remove(name)
        if expired:
            log.info("%d stored responses and conversations have expired", len(expired))

    def _has_expired(self, stored: StoredObject) -> bool:
        return self._lifetime is not None and stored.changed_at + self._lifetime <= self._now()

    def _evict(self) -> None:
        while self._stored and (len(self) > self._max_objects or self.bytes > self._max_bytes):
            self._remove(next(iter(self._stored)))

    def _insert(self, stored: StoredObject) -> None:
        self._stored[stored.id] = stored
        self.bytes += stored.base_bytes
        for item, size in stored.iterate_sizes():
            if not self._references[id(item)]:
                self.bytes += size
                if self._file is not None and id(item) not in self._numbers:
                    self._last_number += 1
                    self._numbers[id(item)] = self._last_number
                    self._changes.items[self._last_number] = {"bytes": size, "item": item}
            self._references[id(item)] += 1
            same = self._index.setdefault((stored.owner, item["id"]), {})
            same.pop(id(item), None)
            same[id(item)] = item
        if self._file is not None:
            numbers = [self._numbers[id(item)] for item in stored.items]
            self._changes.objects.pop(stored.id, None)  # it is the last one now
            self._changes.objects[stored.id] = stored.describe(numbers)

    def _remove(self, name: str) -> None:
        self._release(self._stored.pop(name))
        if self._file is not None:
            self._changes.objects[name] = None

    def _release(self, stored: StoredObject) -> None:
        """Forget what an object has, and what no other one has."""
        self.bytes -= stored.base_bytes
        for item, size in stored.iterate_sizes():
            self._references[id(item)] -= 1
            if not self._references[id(item)]:
                self.bytes -= size
                del self._references[id(item)]
                same = self._index[stored.owner, item["id"]]
                del same[id(item)]
                if not same:
                    del self._index[stored.owner, item["id"]]
                if self._file is not None:
                    self._changes.items[self._numbers.pop(id(item))] = None

    # -- the file -----------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Begin with what the file has. If it cannot be used, objects are in memory only, with a warning.
        ConfigError if a newer mlxrun has written it."""
        await self._run(self._open)

    async def flush(self) -> None:
        """Write all changes so far to the file. If that fails, the log says so, and the next call tries
        again."""
        await self._run(self._write)

    async def tidy(self) -> None:
        """Remove expired objects, and the remains of what was deleted from the disk."""
        self.remove_expired()
        await self._run(self._tidy)

    async def close(self) -> None:
        """Write what is not written, and close the file."""
        await self._run(self._close)
        self._thread.shutdown(wait=False)

    async def _run(self, work: Callable[[ResponseFile], None]) -> None:
        """Do work on the file in its thread, also if the caller is cancelled meanwhile."""
        if self._file is not None:
            loop = asyncio.get_running_loop()
            await asyncio.shield(loop.run_in_executor(self._thread, work, self._file))

    def _open(self, file: ResponseFile) -> None:
        try:
            found = file.open()
        except StorageError as error:
            log.warning("responses and conversations end with the server: %s", error)
            self._file = None
            return
        with self._lock:
            self._load(found)
            self.remove_expired()
            self._evict()
        self._write(file)

    def _load(self, found: Contents) -> None:
        self._last_number = max(found.items, default=0)
        items = {number: row["item"] for number, row in found.items.items()}
        sizes = {number: row["bytes"] for number, row in found.items.items()}
        if not found.is_salvaged:
            self._numbers = {id(item): number for number, item in items.items()}
        for document in found.documents:
            self._insert(StoredObject.restore(document, items, sizes))
        if not found.is_salvaged:  # the file has all of it
            unused = [number for number, item in items.items() if id(item) not in self._references]
            self._changes = Changes(items=dict.fromkeys(unused))
            for number in unused:
                del self._numbers[id(items[number])]

    def _write(self, file: ResponseFile) -> None:
        with self._lock:
            changes, self._changes = self._changes, Changes()
        try:
            if changes:
                file.write(changes)
        except (sqlite3.Error, OSError) as error:
            with self._lock:
                self._changes = changes | self._changes
            if not self._is_failing:
                text = "%s: cannot be written: %s; new responses are in memory only until it can"
                log.error(text, file.path, error)
            self._is_failing = True
        else:
            if changes and self._is_failing:
                log.info("%s: can be written again, and has all responses", file.path)
                self._is_failing = False

    def _tidy(self, file: ResponseFile) -> None:
        self._write(file)
        try:
            file.shrink()
        except sqlite3.Error as error:
            log.warning("%s: cannot be made smaller: %s", file.path, error)

    def _close(self, file: ResponseFile) -> None:
        self._tidy(file)
        if self._changes:
            log.error("%s: the last changes were not written and are lost", file.path)
        file.close()
        self._file = None
