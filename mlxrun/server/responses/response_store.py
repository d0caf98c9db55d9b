"""Stores responses and conversations in memory, within limits of count and bytes.

The least recently used object is evicted first. Items that several objects share are stored and counted once.
An object belongs to the API key that created it; for other keys it does not exist.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

Item = dict[str, Any]
Event = tuple[str, str]  # its type, and its JSON
_EVENT_BYTES = 150  # of an event besides its text


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A finished response or a conversation, with its items. It is never changed.

    `body`: as clients get it. `items`: a response has those of its prompt and its output; the next response
    begins with them. `events`: of a response that ran in the background.
    """

    owner: str
    body: dict[str, Any]
    items: tuple[Item, ...]
    base_bytes: int  # without the items
    item_bytes: tuple[int, ...]
    events: tuple[Event, ...] = ()

    @classmethod
    def measure(
        cls, owner: str, body: dict[str, Any], items: Sequence[Item], events: Sequence[Event] = ()
    ) -> StoredObject:
        """Make an object and measure its bytes. Slow for a long conversation: call it on a worker thread."""
        base_bytes = _count_bytes({**body, "output": None}) + 8 * len(items)
        base_bytes += sum(len(text) + _EVENT_BYTES for _, text in events)
        return cls(owner, body, tuple(items), base_bytes, tuple(map(_count_bytes, items)), tuple(events))

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


class ResponseStore:
    """At most `max_objects` responses and conversations, of `max_bytes` together. Thread-safe and fast."""

    def __init__(self, max_objects: int, max_bytes: int) -> None:
        self.bytes = 0
        self._max_objects = max_objects
        self._max_bytes = max_bytes
        self._lock = threading.RLock()
        self._stored: OrderedDict[str, StoredObject] = OrderedDict()  # the least recently used one first
        self._references: Counter[int] = Counter()  # by id() of an item: how many objects have it
        self._index: dict[tuple[str, str], Item] = {}  # by owner and the item's own id: the newest such item

    def __len__(self) -> int:
        return len(self._stored)

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
            if name in self._stored:
                self._remove(name)
            self._stored[name] = stored
            self.bytes += stored.base_bytes
            for item, size in stored.iterate_sizes():
                self.bytes += 0 if self._references[id(item)] else size
                self._references[id(item)] += 1
                self._index[stored.owner, item["id"]] = item
            while self._stored and (len(self) > self._max_objects or self.bytes > self._max_bytes):
                self._remove(next(iter(self._stored)))
            return name in self._stored

    def get(self, owner: str, name: str) -> StoredObject | None:
        """Return the object of this owner and id, if any, and make it the most recently used one."""
        with self._lock:
            stored = self._stored.get(name)
            if stored is None or stored.owner != owner:
                return None
            self._stored.move_to_end(name)
            return stored

    def get_item(self, owner: str, item_id: str) -> Item | None:
        """Return the newest item of this id in an object of this owner."""
        with self._lock:
            return self._index.get((owner, item_id))

    def delete(self, owner: str, name: str) -> None:
        """Delete an object if it exists. Other objects keep the items that they share with it."""
        with self._lock:
            if self.get(owner, name) is not None:
                self._remove(name)

    def _remove(self, name: str) -> None:
        stored = self._stored.pop(name)
        self.bytes -= stored.base_bytes
        for item, size in stored.iterate_sizes():
            self._references[id(item)] -= 1
            if not self._references[id(item)]:
                self.bytes -= size
                del self._references[id(item)]
                if self._index.get((stored.owner, item["id"])) is item:
                    del self._index[stored.owner, item["id"]]


def _count_bytes(value: Any) -> int:
    """Memory of a JSON value, without its keys, which are shared."""
    total, stack = 0, [value]
    while stack:
        each = stack.pop()
        total += sys.getsizeof(each)
        if isinstance(each, dict):
            stack.extend(each.values())
        elif isinstance(each, list):
            stack.extend(each)
    return total
