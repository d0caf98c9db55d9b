"""The order of eviction from one tier: least recently used first, suffix before prefix.

This is a heap that is updated lazily. An entry's `last_used` only grows, so the tick in the heap is a lower
bound: an entry whose tick is out of date goes back with its new one when it is popped.
"""

from __future__ import annotations

import heapq
from itertools import count

from mlxrun.core.step_plan import SnapshotKind
from mlxrun.engine.prefix_cache.entry import CacheEntry


class EvictionOrder:
    """The entries of a tier. An entry that is pinned when it is popped is out until it is added again."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, bool, int, int, CacheEntry]] = []
        self._queued: set[CacheEntry] = set()
        self._numbers = count()  # unique, so that entries themselves are never compared

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, entry: CacheEntry) -> None:
        if entry not in self._queued:
            self._queued.add(entry)
            # At the same tick states go before the deltas that they depend on.
            rank = (entry.last_used, entry.kind is SnapshotKind.DELTA, -entry.stop, next(self._numbers))
            heapq.heappush(self._heap, (*rank, entry))

    def discard(self, entry: CacheEntry) -> None:
        """Remove an entry that has left the tier."""
        self._queued.discard(entry)
        if len(self._heap) > 2 * len(self._queued) + 64:
            queued, self._heap, self._queued = self._queued, [], set()
            for other in queued:
                self.add(other)

    def pop(self) -> CacheEntry | None:
        """Remove and return the entry to evict next; None if all are pinned."""
        while self._heap:
            last_used, _, _, _, entry = heapq.heappop(self._heap)
            if entry not in self._queued:
                continue
            self._queued.discard(entry)
            if entry.pins:
                continue
            if entry.last_used == last_used:
                return entry
            self.add(entry)
        return None
