"""Stores the payloads of entries in memory and in the tier below it, if there is one, each within a budget.

An entry stays in the index while memory or the tier has it. It depends on the entries before it, which are
evicted after it, so every entry can be reached. If an entry is removed for another reason, all that depend on
it are removed too.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from mlxrun.core.step_plan import SnapshotKind
from mlxrun.engine.prefix_cache.cache_tier import CacheTier, EvictionOrder
from mlxrun.engine.prefix_cache.entry import CacheCounters, CacheEntry, PayloadCodec
from mlxrun.engine.prefix_cache.radix_index import RadixIndex

# In a model with states: ticks by which the states of prompts outlast those of the ends of answers.
PROMPT_BONUS = 1024


class EntryStore:
    """Memory for at most `memory_bytes`, and the tier below it."""

    def __init__(
        self,
        index: RadixIndex,
        codec: PayloadCodec,
        tier: CacheTier | None,
        memory_bytes: int,
        counters: CacheCounters,
    ) -> None:
        self.index = index
        self.counters = counters
        self.nbytes = 0  # in memory
        self._codec = codec
        self._tier = tier
        self._memory_bytes = memory_bytes
        self._memory_order = EvictionOrder(CacheEntry.must_stay_in_memory)
        self._tier_order = EvictionOrder(CacheEntry.must_stay)
        # Entries in the tier, and the longer entries that contain them but are not stored there yet.
        self._retired: list[tuple[CacheEntry, CacheEntry]] = []
        self._clock = 0
        if tier is not None:
            self._load_index(tier)

    def is_durable(self, entry: CacheEntry) -> bool:
        """Whether the entry would outlive the process. True if no entry would, or if the tier refused it."""
        if self._tier is None or not entry.in_tier:
            return self._tier is None or entry.durable
        return self._tier.is_stored(entry)

    # -- insertion --------------------------------------------------------------------------------------

    def insert(self, planned: CacheEntry, payload: Any) -> CacheEntry | None:
        """Store a payload. Return the entry that holds it, which may be longer; None if it is not stored."""
        prompt_end, planned.prompt_end = planned.prompt_end, None
        entry = self._insert(planned, payload)
        if entry is not None and prompt_end is not None and self.index.find_cover(prompt_end) is not None:
            self.index.mark_end(prompt_end)
        return entry

    def _insert(self, planned: CacheEntry, payload: Any) -> CacheEntry | None:
        known = self.index.entries.get(planned.key)
        if known is None and self.index.is_reachable(planned):
            known = self.index.find_cover(planned) if planned.kind is SnapshotKind.DELTA else None
            if known is None:
                return self._insert_new(planned, payload)
            self.index.mark_end(planned)
        if known is None:
            return None
        self.touch([known], planned.from_prompt)
        if known.key == planned.key:
            known.at_cache_position |= planned.at_cache_position
            if known.payload is None:
                self._add_to_memory(known, payload)
        if planned.durable:
            self.write(known)
        self.enforce_budgets()
        return known if known in self.index else None

    def _insert_new(self, entry: CacheEntry, payload: Any) -> CacheEntry | None:
        nbytes = self._codec.nbytes(payload)
        if nbytes > self._memory_bytes and not (entry.durable and self._tier is not None):
            return None
        contained = self.index.add(entry)
        self.touch([entry], entry.from_prompt)
        entry.payload, entry.nbytes = payload, nbytes
        self._count_payload(entry, 1)
        # A contained entry is deleted from the tier only once this one is there.
        if entry.durable or any(shorter.in_tier for shorter in contained):
            self.write(entry)
        for shorter in contained:
            entry.last_used = max(entry.last_used, shorter.last_used)
            entry.pinned |= shorter.pinned
            self._retire(shorter, entry)
            self.remove(shorter)
        if nbytes > self._memory_bytes:
            self._evict_from_memory(entry)
        self.enforce_budgets()
        return entry if entry in self.index else None

    def remove_obsolete_states(self, entry: CacheEntry, planned: CacheEntry) -> None:
        """Remove the states that `planned` made obsolete, if `entry`, its stored form, would outlive them."""
        obsolete, planned.obsolete_states = planned.obsolete_states, ()
        if self.is_durable(entry):
            for state in obsolete:
                if not state.must_stay() and state in self.index:
                    self.remove(state)

    def touch(self, entries: list[CacheEntry], prompt: bool) -> None:
        """Mark entries, and all that they depend on, as used now."""
        self._clock += 1
        tick = self._clock + (PROMPT_BONUS if prompt and self.index.has_states else 0)
        for entry in entries:
            entry.last_used = max(entry.last_used, tick)
            for above in self.index.iterate_ancestors(entry):
                if above.last_used >= tick:  # then so have those above it
                    break
                above.last_used = tick

    # -- lookup -----------------------------------------------------------------------------------------

    def load(self, entry: CacheEntry) -> Any:
        """Return a payload that can be restored, from memory or the tier. An unusable entry is removed, and
        None returned."""
        payload, from_disk = entry.payload, entry.payload is None
        if from_disk:
            serialized = self._tier.read(entry) if self._tier is not None else None
            if serialized is None:  # the tier has counted what it could not read
                self.remove(entry)
                return None
            with suppress(ValueError):
                payload = self._codec.decode(serialized)
        tokens = entry.stop - entry.start if entry.kind is SnapshotKind.DELTA else 0
        if payload is None or not self._codec.is_usable(payload, tokens):
            self.reject(entry)
            return None
        if from_disk:
            self._add_to_memory(entry, payload)
        return payload

    def _add_to_memory(self, entry: CacheEntry, payload: Any) -> None:
        """Store the payload of an entry that was only in the tier, if others can be evicted for it."""
        nbytes = self._codec.nbytes(payload)
        if nbytes > self._memory_bytes:
            return
        entry.payload, entry.nbytes = payload, nbytes
        self._count_payload(entry, 1)
        self.shrink(self._memory_bytes)
        if self.nbytes > self._memory_bytes and entry.payload is not None:
            self._evict_from_memory(entry)

    def pin(self, entries: list[CacheEntry]) -> None:
        for entry in entries:
            entry.pins += 1

    def unpin(self, entries: list[CacheEntry]) -> None:
        for entry in entries:
            entry.pins -= 1
        self.allow_eviction(entries)

    def allow_eviction(self, entries: Iterable[CacheEntry]) -> None:
        """Take entries that are pinned no longer back into the orders of eviction."""
        for entry in entries:
            if entry in self.index:
                if entry.payload is not None:
                    self._memory_order.add(entry)
                if entry.in_tier:
                    self._tier_order.add(entry)
        self.enforce_budgets()

    def measure(self, entry: CacheEntry) -> int | None:
        """Return the bytes that an entry takes in memory. An unusable entry is removed, and None returned."""
        payload = self.load(entry)
        return None if payload is None else self._codec.nbytes(payload)

    # -- eviction ---------------------------------------------------------------------------------------

    def enforce_budgets(self) -> None:
        self._delete_retired()
        self.shrink(self._memory_bytes)

    def shrink(self, max_bytes: int) -> None:
        """Evict entries until memory holds at most `max_bytes`, or only pinned entries."""
        while self.nbytes > max_bytes and (entry := self._memory_order.pop()) is not None:
            self._evict_from_memory(entry)
            self.counters.evicted += 1
            self._shrink_tier()  # after each, so that the tier never holds all of memory
        self._shrink_tier()

    def _evict_from_memory(self, entry: CacheEntry) -> None:
        """Write the entry to the tier first, if it is not there: a prompt may be longer than memory holds."""
        self.write(entry)
        if entry.in_tier:
            self._count_payload(entry, -1)
        else:
            self.remove(entry)

    def _shrink_tier(self) -> None:
        tier = self._tier
        if tier is None or tier.nbytes <= tier.max_bytes:
            return
        self._delete_retired(now=True)
        while tier.nbytes > tier.max_bytes and (entry := self._tier_order.pop()) is not None:
            self._delete_from_tier(entry)
            self.counters.evicted_disk += 1
            if entry.payload is None:
                self.remove(entry)

    def reject(self, *entries: CacheEntry) -> None:
        """Remove unusable entries from memory and the tier."""
        self.counters.refused += len(entries)
        for entry in entries:
            self.remove(entry)

    def clear(self) -> None:
        """Remove all entries but those that running requests use or depend on."""
        self._delete_retired(now=True)
        pinned = [entry for entry in self.index.entries.values() if entry.pins]
        needed = {e for entry in pinned for e in (entry, *self.index.iterate_ancestors(entry))}
        for entry in list(self.index.entries.values()):
            if entry not in needed:
                self.remove(entry)

    def remove(self, entry: CacheEntry) -> None:
        """Remove an entry, with all that depend on it, from memory and the tier."""
        pending = [entry]
        while pending:
            entry = pending.pop()
            if entry in self.index:
                pending += self.index.remove(entry)
                if entry.payload is not None:
                    self._count_payload(entry, -1)
                self._delete_from_tier(entry)

    def _count_payload(self, entry: CacheEntry, sign: int) -> None:
        """Account for a payload that has come into memory (1), or drop it from there (-1)."""
        self.nbytes += sign * entry.nbytes
        self.counters.entries += sign
        if sign > 0:
            self._memory_order.add(entry)
        else:
            entry.payload, entry.nbytes = None, 0
            self._memory_order.discard(entry)

    # -- the tier ---------------------------------------------------------------------------------------

    def write(self, entry: CacheEntry) -> None:
        """Write an entry to the tier, after all entries that it depends on."""
        if self._tier is None:
            return
        for each in [*reversed(list(self.index.iterate_ancestors(entry))), entry]:
            if each.in_tier:
                continue
            if each.payload is None or not self._tier.write(each, self._codec.encode(each.payload)):
                return
            each.in_tier = True
            self._tier_order.add(each)

    def _retire(self, shorter: CacheEntry, longer: CacheEntry) -> None:
        """Delete `shorter` from the tier once `longer`, which contains it, is stored there."""
        if shorter.in_tier:
            shorter.in_tier = False
            self._tier_order.discard(shorter)
            self._retired.append((shorter, longer))

    def _delete_retired(self, *, now: bool = False) -> None:
        if self._tier is None or not self._retired:
            return
        waiting, self._retired = self._retired, []
        for shorter, longer in waiting:
            again = self.index.entries.get(shorter.key)
            if again is not None and again.in_tier:
                continue
            if now or self._tier.is_stored(longer) or longer not in self.index:
                self._tier.delete(shorter)
            else:
                self._retired.append((shorter, longer))

    def _delete_from_tier(self, entry: CacheEntry) -> None:
        if entry.in_tier and self._tier is not None:
            self._tier.delete(entry)
            entry.in_tier = False
            self._tier_order.discard(entry)

    def _load_index(self, tier: CacheTier) -> None:
        """Add the entries of earlier runs, if all that they depend on is there too."""
        found = list(tier.scan())
        # Parents first; of entries with a common beginning the longest first, as it contains the others.
        for entry in sorted(found, key=lambda e: (e.start, e.kind is SnapshotKind.STATE, -e.stop)):
            if not self.index.fits(entry):
                self.counters.refused += 1
                tier.delete(entry)
            elif self.index.is_reachable(entry) and (
                entry.kind is SnapshotKind.STATE or self.index.find_cover(entry) is None
            ):
                self.index.add(entry)
                entry.in_tier = True
            else:
                tier.delete(entry)
        for entry in found:
            if entry in self.index:
                self.touch([entry], entry.at_cache_position)
        for entry in self.index.entries.values():
            self._tier_order.add(entry)
        self.enforce_budgets()
