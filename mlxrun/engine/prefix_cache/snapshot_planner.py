"""Decides which snapshots of rows to take for the prefix cache. It returns planned entries, which have no
payloads.

It plans deltas at every grid point, so that an interrupted prompt keeps its work. It plans states where other
prompts are likely to diverge, and at intervals between. When a row is freed, it plans the rest of the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType

from mlxrun.core.step_plan import SnapshotKind
from mlxrun.engine.prefix_cache.containment import contain_failures
from mlxrun.engine.prefix_cache.entry import CacheEntry, Key
from mlxrun.engine.prefix_cache.entry_store import EntryStore
from mlxrun.engine.prefix_cache.radix_index import RadixIndex
from mlxrun.engine.prefix_cache.tracked_request import CachePosition, TrackedRequest

KEEP_NEWEST = 2  # states of a conversation that stay beside a new one: where its last turn began and ended
FORK_HITS = 2  # a state from which this many requests went on stays as well


class SnapshotPlanner:
    """Plans snapshots.

    `interval`: tokens between two writes to a tier, and between two states of a prompt. `survives_restart`:
    the end of a prompt is stored at once; else it can wait for the answer. `intervals_only`: only what is
    an interval behind the last write is written. Where a model has states, that is a state.
    """

    def __init__(
        self,
        index: RadixIndex,
        store: EntryStore,
        interval: int,
        *,
        grid_only: bool,
        survives_restart: bool,
        intervals_only: bool = False,
    ) -> None:
        self._index = index
        self._store = store
        self._chunk = index.chunk
        # A kill can lose one chunk that is being computed and one that is being written.
        self._interval = max(interval - index.chunk, index.chunk)
        self._grid_only = grid_only
        self._stores_ends = survives_restart and not intervals_only
        self._intervals_only = intervals_only

    def plan_cache_positions(self, tracked: TrackedRequest, length: int, limit: int) -> list[CachePosition]:
        """Return the cache positions that a request will have stored. It begins to run after `length`
        tokens."""
        points: list[CachePosition] = []
        state_at = length
        for stop, key in tracked.list_cache_positions(limit):
            if stop > length and (
                not self._index.has_states or self._needs_state(tracked, stop, limit, state_at)
            ):
                points.append((stop, key))
                if not self._intervals_only or self._is_due(stop, state_at):
                    state_at = stop
        return points

    def plan_snapshots(self, tracked: TrackedRequest, start: int, stop: int, target: int) -> list[CacheEntry]:
        """Return the planned entries for tokens [start, stop) of a prompt whose prefill ends at `target`."""
        last = tracked.written_at if self._intervals_only else tracked.state_at
        needs_state = self._needs_state(tracked, stop, target, last)
        ends = range((start // self._chunk + 1) * self._chunk, stop + 1, self._chunk)
        planned_entries = self._plan_missing_deltas(tracked, ends)
        store_end = stop == target and (self._stores_ends or tracked.awaited)
        partial = stop % self._chunk and not self._grid_only and (needs_state or store_end)
        tracked.deferred = stop if stop == target and not partial else 0
        if partial:
            planned_entries += self._plan_missing_deltas(tracked, [stop])
        if needs_state:
            tracked.state_at = stop
            planned_entries += self._plan_missing_state(tracked, stop)
        for planned in planned_entries:
            at = planned.stop
            is_state = planned.kind is SnapshotKind.STATE
            planned.from_prompt = True
            planned.at_cache_position = is_state and (
                at == target or at in tracked.request.all_cache_positions
            )
            planned.durable = self._is_durable(tracked, planned, is_state or at == target)
            if planned.durable:
                tracked.written_at = at
        # Nobody needs to wait for what is not going to be stored now.
        done = partial or stop == target or not self._index.has_deltas
        tracked.computed = max(tracked.computed, stop if done else stop - stop % self._chunk)
        return planned_entries

    def _needs_state(self, tracked: TrackedRequest, stop: int, target: int, last: int) -> bool:
        if not self._index.has_states or (self._grid_only and stop % self._chunk):
            return False
        overdue = stop % self._chunk == 0 and self._is_due(stop, last)
        return overdue or stop == target or stop in tracked.request.all_cache_positions

    def _is_due(self, stop: int, last: int) -> bool:
        return stop - last >= self._interval

    def _is_durable(self, tracked: TrackedRequest, planned: CacheEntry, is_end: bool) -> bool:
        """Whether a planned entry is to be written to a tier. `is_end`: others may begin where it ends."""
        is_due = self._is_due(planned.stop, tracked.written_at)
        if not self._intervals_only:
            return is_end or is_due
        return is_due and (planned.kind is SnapshotKind.STATE) == self._index.has_states

    @contain_failures(NoneType)
    def replace_interval_state(self, tracked: TrackedRequest, state: CacheEntry) -> None:
        """Remove the earlier states of a running prompt, except those that others use. With a disk tier, the
        newest state that is a file stays until a newer one is a file."""
        tracked.interval_states.append((state, state.last_used))
        durable = [i for i, (entry, _) in enumerate(tracked.interval_states) if self._store.is_durable(entry)]
        stays = {durable[-1] if durable else 0, len(tracked.interval_states) - 1}
        for i, (old, tick) in enumerate(tracked.interval_states):
            if i not in stays and not old.at_cache_position and not old.must_stay() and old.last_used == tick:
                self._store.remove(old)
        tracked.interval_states = [tracked.interval_states[i] for i in sorted(stays)]

    def plan_final_snapshots(
        self, tracked: TrackedRequest, output: Sequence[int], num_cached: int
    ) -> list[CacheEntry]:
        """Return the planned entries for what a freed row holds and the cache lacks."""
        tracked.extend(output)
        prompt_tokens = len(tracked.request.prompt)
        stop = min(num_cached, len(tracked.chain))
        if self._grid_only:  # and of the prompt only: a cold run prefills what this row has decoded
            stop = min(stop, prompt_tokens - 1)
            stop -= stop % self._chunk
        # If the model has states, deltas without a state at their end are of no use.
        if not stop or (self._index.has_states and stop != num_cached):
            return []
        ends = [*range(self._chunk, stop + 1, self._chunk), *([stop] if stop % self._chunk else [])]
        planned_entries = self._plan_missing_deltas(tracked, ends)
        if self._index.has_states:
            planned_entries += self._plan_missing_state(tracked, stop)
        for planned in planned_entries:
            is_end = planned.stop == stop
            planned.durable = is_end and self._is_durable(tracked, planned, is_end)
            planned.from_prompt = stop <= prompt_tokens  # an interrupted prompt comes back
            if planned.kind is SnapshotKind.DELTA and planned.start < tracked.deferred < planned.stop:
                planned.prompt_end = tracked.chain.plan_entry(SnapshotKind.DELTA, tracked.deferred)
        return planned_entries

    def _plan_missing_deltas(self, tracked: TrackedRequest, ends: Sequence[int]) -> list[CacheEntry]:
        if not self._index.has_deltas:
            return []
        chain = tracked.chain
        missing = [
            end for end in ends if not self._is_known(tracked, chain.get_entry_key(SnapshotKind.DELTA, end))
        ]
        planned_entries = [chain.plan_entry(SnapshotKind.DELTA, end) for end in missing]
        return [
            planned
            for planned in planned_entries
            if planned.stop % self._chunk == 0 or not self._use_cover(planned)
        ]

    def _use_cover(self, planned: CacheEntry) -> bool:
        """Whether an entry contains the planned entry already; that entry then counts as used."""
        cover = self._index.find_cover(planned)
        if cover is not None:
            self._index.mark_end(planned)
            self._store.touch([cover], True)
        return cover is not None

    def _plan_missing_state(self, tracked: TrackedRequest, stop: int) -> list[CacheEntry]:
        key = tracked.chain.get_entry_key(SnapshotKind.STATE, stop)
        known = self._index.entries.get(key)
        if known is not None:
            self._store.touch([known], True)
        if self._is_known(tracked, key):
            return []
        planned = tracked.chain.plan_entry(SnapshotKind.STATE, stop)
        # A conversation goes on from its end. Of its earlier states those stay from which other requests go
        # on: the first one, which is the end of the system prompt, and those where it forked.
        earlier = self._index.find_states(tracked.chain, stop - 1)[1:-KEEP_NEWEST]
        planned.obsolete_states = [state for state in earlier if state.hit_count < FORK_HITS]
        return [planned]

    def _is_known(self, tracked: TrackedRequest, key: Key) -> bool:
        return key in self._index.entries or key in tracked.pending
