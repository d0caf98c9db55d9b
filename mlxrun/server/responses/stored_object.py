"""A stored response or conversation, and its size in memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
        base_bytes = _count_bytes({**body, "output": None}) + 8 * len(items)
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
