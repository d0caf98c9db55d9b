"""The interface of a tier of the prefix cache, the order of eviction, and the list of tiers.

Payloads are restored from memory. The tier of `cache.backend` is below memory and holds entries as bytes.
Entries are written to it when they leave memory, or when they must outlive the process.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Protocol

from mlxrun.config.settings import CacheSettings
from mlxrun.core.step_plan import SerializedPayload, SnapshotKind
from mlxrun.engine.prefix_cache.disk_tier import DiskTier
from mlxrun.engine.prefix_cache.entry import CacheCounters, CacheEntry


class CacheTier(Protocol):
    """Holds entries as bytes, by their keys. Only the engine thread calls it, but for `nbytes`, which any
    thread may read. No method raises, and only `read` and `scan` may wait for a disk.

    EntryStore deletes entries while `nbytes` exceeds `max_bytes`. A tier counts what it reads, writes and
    refuses in its CacheCounters.
    """

    max_bytes: int
    survives_restart: bool  # whether another process can find the entries

    @property
    def nbytes(self) -> int:
        """Bytes that the tier holds, pending writes included."""
        ...

    def scan(self) -> Sequence[CacheEntry]:
        """Return the entries of earlier processes, without payloads, least recently used first. It is called
        once, before all other methods."""
        ...

    def write(self, entry: CacheEntry, payload: SerializedPayload) -> bool:
        """Take in or replace an entry. False if it is not accepted."""
        ...

    def is_stored(self, entry: CacheEntry) -> bool:
        """Whether the entry's write is complete, so that a read finds it, also after a restart if the tier
        survives one."""
        ...

    def read(self, entry: CacheEntry) -> SerializedPayload | None:
        """Return the verified payload. An unusable entry is deleted; its payload, or a missing one, is
        None."""
        ...

    def delete(self, entry: CacheEntry) -> None:
        """Remove an entry. A missing entry is ignored."""
        ...

    def close(self) -> None:
        """Finish the pending writes."""
        ...


# By `cache.backend`; the others are `none` and `memory`, which have no tier below memory. The bytes are
# the fingerprint of the model, and of all else that payloads depend on.
TIERS: Mapping[str, Callable[[CacheSettings, bytes, CacheCounters], CacheTier]] = {
    "disk": DiskTier.open,
}


class EvictionOrder:
    """The entries of memory or of a tier: least recently used first, suffix before prefix. An entry that must
    stay when it is popped leaves the order until it is added again. `must_stay`: tells which do.

    The order is a heap with lazy updates. An entry's `last_used` only grows, so the tick in the heap is a
    lower bound. A popped entry with an old tick goes back with its new one.
    """

    def __init__(self, must_stay: Callable[[CacheEntry], bool]) -> None:
        self._must_stay = must_stay
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
            if self._must_stay(entry):
                continue
            if entry.last_used == last_used:
                return entry
            self.add(entry)
        return None
