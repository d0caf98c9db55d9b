"""A few values that were costly to make, by key, so that they need not be made again.

Bounded in number and in the sum of their sizes; what was not used for longest goes first, one at a time.
May be used from any thread.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class Kept(Generic[V]):
    """At most `most` values, of sizes that sum to at most `room`. The newest stays, whatever its size."""

    def __init__(self, most: int, room: int) -> None:
        self._most = most
        self._room = room
        self._values: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()  # longest unused first
        self._size = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    @property
    def size(self) -> int:
        """Of all that is kept."""
        return self._size

    def get(self, key: Hashable) -> V | None:
        """The value of that key, which is used now."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def put(self, key: Hashable, value: V, size: int) -> None:
        """Keep a value, in place of another of its key."""
        with self._lock:
            self._remove(key)
            self._values[key] = value, size
            self._size += size
            while len(self._values) > 1 and (len(self._values) > self._most or self._size > self._room):
                self._remove(next(iter(self._values)))

    def drop(self, key: Hashable) -> None:
        """Forget one; nothing happens if it is gone."""
        with self._lock:
            self._remove(key)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._values.clear()
            self._size = 0

    def _remove(self, key: Hashable) -> None:
        self._size -= self._values.pop(key, (None, 0))[1]
