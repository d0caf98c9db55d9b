"""Prefixes that an operator has pinned. Their entries are ordinary ones that eviction leaves alone.

With a tier, pinned entries may leave memory, since the tier keeps them. Without one they stay in memory. An
entry that is replaced by a longer one, which contains it, hands its mark on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

from mlxrun.core.byte_sizes import format_rounded
from mlxrun.core.errors import RequestError
from mlxrun.core.step_plan import PinnedPrefix
from mlxrun.engine.prefix_cache.entry import CacheEntry, Key, KeyChain
from mlxrun.engine.prefix_cache.entry_store import EntryStore
from mlxrun.engine.prefix_cache.radix_index import RadixMatch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Pinned:
    """`sizes`: bytes in memory by the keys of its entries, which other prefixes may share."""

    described: PinnedPrefix
    chain: KeyChain
    sizes: Mapping[Key, int]


class PinnedPrefixes:
    """The pinned prefixes of a cache. `max_bytes`: of device memory that they may take together."""

    def __init__(self, store: EntryStore, max_bytes: int) -> None:
        self.described: tuple[PinnedPrefix, ...] = ()  # replaced as a whole: other threads read it
        self._store = store
        self._max_bytes = max_bytes
        self._pinned: dict[str, _Pinned] = {}

    def add(self, chain: KeyChain, match: RadixMatch, sizes: Mapping[Key, int], name: str) -> PinnedPrefix:
        """Pin the entries of a match. A prefix that is pinned already gets the new name. RequestError if that
        would be more than `max_bytes`."""
        known = {key: size for each in self._pinned.values() for key, size in each.sizes.items()}
        total = sum({**known, **sizes}.values())
        if total > self._max_bytes:
            raise RequestError(
                f"the prefix of {match.length} tokens takes {format_rounded(sum(sizes.values()))}; with the "
                f"pinned ones that is {format_rounded(total)}, and at most {format_rounded(self._max_bytes)} "
                "can be pinned: unpin others, or raise cache.pinned_share or cache.memory_bytes",
                code="pinned_limit",
            )
        prefix_id = chain.get_key(match.length).hex()[:16]
        made = PinnedPrefix(prefix_id, name, match.length, sum(sizes.values()), int(time.time()))
        self._pinned[prefix_id] = _Pinned(made, chain, sizes)
        for entry in match.entries:
            self._store.write(entry)
        self._mark_entries()
        return made

    def remove(self, prefix_id: str) -> bool:
        """Unpin a prefix. Returns whether there was one with this id."""
        found = self._pinned.pop(prefix_id, None)
        if found is not None:
            self._mark_entries()
        return found is not None

    def clear(self) -> None:
        """Unpin all prefixes."""
        self._pinned.clear()
        self._mark_entries()

    def drop_lost(self) -> None:
        """Drop the prefixes of which an entry could not be used any more, and was removed."""
        lost = [name for name, each in self._pinned.items() if self._match(each) is None]
        for prefix_id in lost:
            described = self._pinned.pop(prefix_id).described
            log.warning("the pinned prefix %s (%s) was lost: warm it again", prefix_id, described.name)
        if lost:
            self._mark_entries()

    def _match(self, pinned: _Pinned) -> RadixMatch | None:
        """The entries that a pinned prefix has now; None if some are missing."""
        tokens = pinned.described.tokens
        match = self._store.index.match(pinned.chain, tokens, lambda length: length)
        return match if match is not None and match.length == tokens else None

    def _mark_entries(self) -> None:
        """Mark exactly the entries of the pinned prefixes."""
        matches = filter(None, map(self._match, self._pinned.values()))
        wanted: set[CacheEntry] = {entry for match in matches for entry in match.entries}
        before = [entry for entry in self._store.index.entries.values() if entry.pinned]
        for entry in (*before, *wanted):
            entry.pinned = entry in wanted
        sizes = {key: size for each in self._pinned.values() for key, size in each.sizes.items()}
        self._store.counters.pinned_bytes = sum(sizes.values())
        self.described = tuple(each.described for each in self._pinned.values())
        self._store.allow_eviction([entry for entry in before if not entry.pinned])
