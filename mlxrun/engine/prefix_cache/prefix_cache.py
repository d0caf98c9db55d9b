"""The prefix cache, as the scheduler and the engine call it on the engine thread.

Unusable entries count as cache misses, and so does a failure of the cache: it may cost time, but never an
answer. snapshot_planner.py decides what to store, the runner copies it, and entry_store.py stores it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import NoneType
from typing import Any

from mlxrun.config.settings import CacheSettings
from mlxrun.core.request import HitKind, Request, TokenLogprob
from mlxrun.core.step_plan import (
    CacheHit,
    PinnedPrefix,
    PromptLogprobs,
    SnapshotKind,
    SnapshotRequest,
    SnapshotResult,
)
from mlxrun.engine.prefix_cache.cache_tier import CacheTier
from mlxrun.engine.prefix_cache.containment import contain_failures
from mlxrun.engine.prefix_cache.entry import CacheCounters, CacheEntry, Key, PayloadCodec
from mlxrun.engine.prefix_cache.entry_store import EntryStore
from mlxrun.engine.prefix_cache.logprob_keeper import LogprobKeeper
from mlxrun.engine.prefix_cache.pinned_prefixes import PinnedPrefixes
from mlxrun.engine.prefix_cache.prefix_waiting import PrefixWaiting
from mlxrun.engine.prefix_cache.radix_index import RadixIndex, RadixMatch
from mlxrun.engine.prefix_cache.snapshot_planner import SnapshotPlanner
from mlxrun.engine.prefix_cache.tracked_request import TrackedRequest
from mlxrun.engine.scheduler.prefix_cache_interface import PrefixCacheInterface

log = logging.getLogger(__name__)


class PrefixCache(PrefixCacheInterface):
    """Finds and stores entries for requests.

    `root`: fingerprint of the model and of all else that payloads depend on. `deltas`: some layers have the
    keys of all tokens; `states`: some do not. `grid_only`: hits and entries end on the grid only, so that
    prompts are always computed in the same chunks.
    """

    def __init__(
        self,
        root: Key,
        chunk: int,
        *,
        deltas: bool,
        states: bool,
        codec: PayloadCodec,
        settings: CacheSettings,
        memory_bytes: int,
        tier: CacheTier | None = None,
        grid_only: bool = False,
        counters: CacheCounters | None = None,
    ) -> None:
        self._root = root
        self._chunk = chunk
        self._grid_only = grid_only
        self._tier = tier
        self.counters = counters or CacheCounters()
        self._index = index = RadixIndex(root, chunk, has_deltas=deltas, has_states=states)
        self._store = EntryStore(index, codec, tier, memory_bytes, self.counters)
        self._pinned = PinnedPrefixes(self._store, int(settings.pinned_share * memory_bytes))
        self._logprobs = LogprobKeeper(index, self._store, grid_only)
        self._planner = SnapshotPlanner(
            index,
            self._store,
            settings.checkpoint_every,
            grid_only=grid_only,
            survives_restart=self.survives_restart,
            intervals_only=settings.intervals_only,
        )
        self._tracked: dict[str, TrackedRequest] = {}
        self._waiting = PrefixWaiting(index, grid_only)
        self._failed = False

    @property
    def stops_at_cache_positions(self) -> bool:
        return self._index.has_states and not self._grid_only

    @property
    def survives_restart(self) -> bool:
        return self._tier is not None and self._tier.survives_restart

    @property
    def nbytes(self) -> int:
        return self._store.nbytes

    def read_counters(self) -> Mapping[str, int]:
        tier = 0 if self._tier is None else self._tier.nbytes
        return {**asdict(self.counters), "memory_bytes": self.nbytes, "disk_bytes": tier}

    # -- called by the scheduler ------------------------------------------------------------------------

    def track(self, request: Request) -> None:
        self._tracked[request.id] = TrackedRequest(request, self._root, self._chunk, self._grid_only)

    @contain_failures(bool)
    def should_wait_for_prefix(self, request_id: str) -> bool:
        tracked = self._get_tracked(request_id)
        if tracked is None or tracked.running or not tracked.storable:
            return False
        return self._waiting.should_wait(tracked)

    @contain_failures(int)
    def count_cached(self, request: Request) -> int:
        tracked = TrackedRequest(request, self._root, self._chunk, self._grid_only)
        return tracked.match_length(self._index) if tracked.cacheable else 0

    @contain_failures(tuple)
    def find_prompt_logprobs(self, request_id: str, start: int) -> Sequence[TokenLogprob]:
        tracked = self._get_tracked(request_id)
        if tracked is None:
            return ()
        found, size = self._logprobs.find_prompt_logprobs(tracked, start), len(tracked.request.prompt)
        if start + len(found) == size and not tracked.request.params.max_tokens:  # there will be no lookup
            self.counters.exact += 1
            self.counters.tokens += size
        return found

    def record_prompt_logprobs(self, logprobs: PromptLogprobs) -> None:
        tracked = self._tracked.get(logprobs.request_id)
        if tracked is not None and tracked.book is not None:
            tracked.book.record(logprobs.start, logprobs.logprobs)

    def lookup(self, request_id: str, output: Sequence[int], max_tokens: int) -> CacheHit | None:
        tracked = self._get_tracked(request_id)
        hit = None
        if tracked is not None:
            self._stop(tracked)
            tracked.running = True
            hit = self._find_hit(tracked, output, max_tokens)
            tracked.hit_length = tracked.state_at = hit.length if hit else 0
            tracked.written_at = self._find_written(tracked)
            self._register_cache_positions(tracked, tracked.hit_length, max_tokens)
        kind = hit.kind if hit else HitKind.MISS
        setattr(self.counters, kind.value, getattr(self.counters, kind.value) + 1)
        self.counters.tokens += hit.length if hit else 0
        return hit

    @contain_failures(NoneType)
    def _find_hit(self, tracked: TrackedRequest, output: Sequence[int], max_tokens: int) -> CacheHit | None:
        if not tracked.storable:
            max_tokens = min(max_tokens, tracked.num_before_gaps)
        tracked.extend(output)
        while match := self._index.match(tracked.chain, max_tokens, tracked.round_down):
            tracked.pins = match.entries
            self._store.pin(tracked.pins)  # so that loading one entry does not evict another of this hit
            payloads = self._load_payloads(match)
            if payloads is not None:
                self._store.touch(match.entries[-2:], True)
                match.entries[-1].hit_count += 1
                state = payloads.pop() if match.state else None
                ends = [min(entry.stop, match.length) for entry in match.deltas]
                deltas = tuple(zip((entry.start for entry in match.deltas), ends, payloads, strict=True))
                return CacheHit(match.length, _classify(match, max_tokens), deltas, state)
            self._unpin(tracked)
            self._pinned.drop_lost()
        return None

    def _find_written(self, tracked: TrackedRequest) -> int:
        """The tokens of the request's hit that are in the tier, or queued for it."""
        last = tracked.pins[-1:] if self._index.has_states else tracked.pins
        return max((min(entry.stop, tracked.hit_length) for entry in last if entry.in_tier), default=0)

    def _load_payloads(self, match: RadixMatch) -> list[Any] | None:
        """Return the payloads of a match; None if one of them cannot be used, whose entry is then removed."""
        payloads = []
        for entry in match.entries:
            payload = self._store.load(entry)
            if payload is None:
                return None
            payloads.append(payload)
        return payloads

    @contain_failures(NoneType)
    def _register_cache_positions(self, tracked: TrackedRequest, length: int, max_tokens: int) -> None:
        """Let others wait for what this request is going to compute."""
        tracked.computed = length
        if tracked.storable:
            self._waiting.add(tracked, self._planner.plan_cache_positions(tracked, length, max_tokens))

    @contain_failures(list)
    def plan_snapshots(self, request_id: str, start: int, stop: int, target: int) -> list[SnapshotRequest]:
        tracked = self._get_tracked(request_id)
        if tracked is None or not tracked.running or not tracked.storable:
            return []
        planned_entries = self._planner.plan_snapshots(tracked, start, stop, target)
        if not planned_entries and not tracked.pending:
            self._waiting.mark_computed(tracked, tracked.computed)
        return self._request_snapshots(tracked, planned_entries)

    @contain_failures(list)
    def plan_final_snapshots(
        self, request_id: str, output: Sequence[int], kv_length: int
    ) -> list[SnapshotRequest]:
        tracked = self._get_tracked(request_id)
        if tracked is None or not tracked.running:
            return []
        try:
            if not tracked.storable:
                return []
            planned_entries = self._planner.plan_final_snapshots(tracked, output, kv_length)
            return self._request_snapshots(tracked, planned_entries)
        finally:
            self._stop(tracked)

    def forget(self, request_id: str) -> None:
        tracked = self._tracked.pop(request_id, None)
        if tracked is not None:
            self._stop(tracked)

    @contain_failures(NoneType)
    def shrink(self, max_bytes: int) -> None:
        self._store.shrink(max_bytes)

    # -- called by the engine ---------------------------------------------------------------------------

    def store_snapshot(self, snapshot: SnapshotResult) -> None:
        planned: CacheEntry = snapshot.request.entry
        entry = self._insert(planned, snapshot.payload) if snapshot.payload is not None else None
        tracked = self._tracked.get(snapshot.request.request_id)
        if tracked is None:
            return
        if (
            entry is not None
            and tracked.running
            and planned.kind is SnapshotKind.STATE
            and planned.from_prompt
        ):
            self._planner.replace_interval_state(tracked, entry)
        tracked.pending.discard(planned.key)
        self._waiting.mark_computed(tracked, planned.stop if tracked.pending else tracked.computed)

    @contain_failures(NoneType)
    def _insert(self, planned: CacheEntry, payload: Any) -> CacheEntry | None:
        book, planned.book = planned.book, None
        self._logprobs.add_logprobs(planned, book, planned.stop)
        entry = self._store.insert(planned, payload)
        if entry is not None:
            self._logprobs.add_logprobs(entry, book, planned.stop)
            self._store.remove_obsolete_states(entry, planned)
        return entry

    @contain_failures(NoneType)
    def invalidate_hit(self, request_id: str) -> None:
        tracked = self._get_tracked(request_id)
        if tracked is not None:
            entries = tracked.pins
            self._unpin(tracked)
            tracked.hit_length = tracked.state_at = tracked.written_at = 0
            self._store.reject(*entries)
            self._pinned.drop_lost()

    @contain_failures(NoneType)
    def clear(self) -> None:
        self._pinned.clear()
        self._store.clear()
        log.info("the prefix cache was cleared")

    @property
    def pinned_prefixes(self) -> Sequence[PinnedPrefix]:
        return self._pinned.described

    def pin_prefix(self, request: Request, stop: int, name: str) -> PinnedPrefix | None:
        tracked = TrackedRequest(request, self._root, self._chunk, self._grid_only)
        match = self._index.match(tracked.chain, stop, tracked.round_down) if tracked.cacheable else None
        if match is None:
            return None
        self._store.pin(match.entries)  # so that loading one entry does not evict another
        try:
            sizes = {entry.key: self._store.measure(entry) for entry in match.entries}
            usable = {key: size for key, size in sizes.items() if size is not None}
            return self._pinned.add(tracked.chain, match, usable, name) if usable == sizes else None
        finally:
            self._store.unpin(match.entries)

    @contain_failures(bool)
    def unpin_prefix(self, prefix_id: str) -> bool:
        return self._pinned.remove(prefix_id)

    @contain_failures(NoneType)
    def release_pinned_memory(self, max_bytes: int) -> None:
        self._store.shrink(max_bytes)
        if self.nbytes > max_bytes and self._pinned.described:
            log.warning("all prefixes were unpinned: a request needs the memory that they take")
            self._pinned.clear()
            self._store.shrink(max_bytes)

    @contain_failures(NoneType)
    def shutdown(self) -> None:
        if self._tier is not None:
            self._tier.close()
            self._store.enforce_budgets()  # what was waiting for the writes to end

    # -- shared -----------------------------------------------------------------------------------------

    def _get_tracked(self, request_id: str) -> TrackedRequest | None:
        tracked = self._tracked.get(request_id)
        return tracked if tracked is not None and tracked.cacheable else None

    def _request_snapshots(
        self, tracked: TrackedRequest, planned_entries: list[CacheEntry]
    ) -> list[SnapshotRequest]:
        tracked.pending.update(planned.key for planned in planned_entries)
        for planned in planned_entries:
            planned.book = tracked.book
        request_id, outlives = tracked.request.id, self.survives_restart
        return [
            SnapshotRequest(request_id, d.kind, d.start, d.stop, d, outlives and d.durable)
            for d in planned_entries
        ]

    @contain_failures(NoneType)
    def _unpin(self, tracked: TrackedRequest) -> None:
        if tracked.pins:
            pins, tracked.pins = tracked.pins, []
            self._store.unpin(pins)

    def _stop(self, tracked: TrackedRequest) -> None:
        """Forget what is only known of a running request."""
        self._logprobs.add_new_logprobs(tracked)
        self._unpin(tracked)
        self._waiting.remove(tracked)
        tracked.running = False
        tracked.interval_states = []
        tracked.pending.clear()


def _classify(match: RadixMatch, max_tokens: int) -> HitKind:
    if match.length == max_tokens:
        return HitKind.EXACT if match.ends_entry else HitKind.SUPERSEQUENCE
    return HitKind.PREFIX if match.ends_entry else HitKind.LCP
