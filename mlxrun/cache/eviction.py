"""Whose turn it is to be evicted from one tier: the least recently used, suffix before prefix.

A heap with old entries left in it. A record's tick only grows, so an entry's is a lower bound: one that is
out of date is put back with the new tick when it comes up.
"""

from __future__ import annotations

import heapq
from itertools import count

from mlxrun.cache.entry import CacheEntry
from mlxrun.scheduler.step_plan import SnapshotKind

_Entry = tuple[int, bool, int, int, CacheEntry]


class EvictionOrder:
    """The records of a tier. Those that were pinned when they came up are out until they are added again."""

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._queued: set[CacheEntry] = set()
        self._numbers = count()  # nothing compares records

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, record: CacheEntry) -> None:
        if record not in self._queued:
            self._queued.add(record)
            # At the same tick states go before the deltas that they rest on.
            rank = (record.tick, record.part is SnapshotKind.DELTA, -record.stop, next(self._numbers))
            heapq.heappush(self._heap, (*rank, record))

    def discard(self, record: CacheEntry) -> None:
        """It has left the tier."""
        self._queued.discard(record)
        if len(self._heap) > 2 * len(self._queued) + 64:
            left, self._heap, self._queued = self._queued, [], set()
            for other in left:
                self.add(other)

    def pop(self) -> CacheEntry | None:
        """The next to go, None if all are pinned."""
        while self._heap:
            tick, _, _, _, record = heapq.heappop(self._heap)
            if record not in self._queued:
                continue
            self._queued.discard(record)
            if record.pins:
                continue
            if record.tick == tick:
                return record
            self.add(record)
        return None
