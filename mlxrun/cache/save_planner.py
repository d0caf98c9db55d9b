"""What to copy out of rows for the prefix cache: drafts, which are records that have no payload yet.

Deltas at every grid point, so that an interrupted prompt keeps its work; states where other prompts are
likely to part from this one, and now and then in between; and what is left when a row goes.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxrun.cache.entry import CacheEntry, Key
from mlxrun.cache.entry_store import EntryStore
from mlxrun.cache.radix_index import RadixIndex
from mlxrun.cache.tracked_request import Keypoint, TrackedRequest
from mlxrun.scheduler.step_plan import SnapshotKind

NEWEST = 2  # states of a conversation that stay beside a new one: where its last turn began and ended
FORK = 2  # a state that so many requests began with stays as well


class SnapshotPlanner:
    """`every`: tokens between two writes to disk, and between two states of a prompt. `lasting`: what is kept
    may outlive the process, so a prompt's end is kept at once; else it can wait for the answer."""

    def __init__(
        self, index: RadixIndex, store: EntryStore, every: int, *, grid_only: bool, lasting: bool
    ) -> None:
        self._index = index
        self._store = store
        self._chunk = index.chunk
        # A kill finds one chunk half computed and one half written.
        self._every = max(every - index.chunk, index.chunk)
        self._grid_only = grid_only
        self._lasting = lasting

    def ahead(self, session: TrackedRequest, length: int, most: int) -> list[Keypoint]:
        """Where a request that begins to run after `length` tokens will have kept something."""
        points: list[Keypoint] = []
        state_at = length
        for stop, key in session.keypoints(most):
            if stop > length and (not self._index.states or self._wants_state(session, stop, most, state_at)):
                points.append((stop, key))
                state_at = stop
        return points

    def due(self, session: TrackedRequest, start: int, stop: int, target: int) -> list[CacheEntry]:
        """What to keep of tokens [start, stop) of a prompt whose prefill ends at `target`."""
        state = self._wants_state(session, stop, target, session.state_at)
        ends = range((start // self._chunk + 1) * self._chunk, stop + 1, self._chunk)
        drafts = self._missing_deltas(session, ends)
        ends_now = stop == target and (self._lasting or session.wanted)
        partial = stop % self._chunk and not self._grid_only and (state or ends_now)
        session.deferred = stop if stop == target and not partial else 0
        if partial:
            drafts += self._missing_deltas(session, [stop])
        if state:
            session.state_at = stop
            drafts += self._missing_state(session, stop)
        for draft in drafts:
            at = draft.stop
            draft.prompt = True
            draft.boundary = draft.part is SnapshotKind.STATE and (
                at == target or at in session.request.boundaries
            )
            overdue = at - session.written_at >= self._every
            draft.durable = overdue or draft.part is SnapshotKind.STATE or at == target
            if draft.durable:
                session.written_at = at
        over = partial or stop == target  # nobody need wait for what is not going to be kept now
        kept = stop if over or not self._index.deltas else stop - stop % self._chunk
        session.passed = max(session.passed, kept)
        return drafts

    def _wants_state(self, session: TrackedRequest, stop: int, target: int, since: int) -> bool:
        if not self._index.states or (self._grid_only and stop % self._chunk):
            return False
        overdue = stop % self._chunk == 0 and stop - since >= self._every
        return overdue or stop == target or stop in session.request.boundaries

    def rest(self, session: TrackedRequest, output: Sequence[int], filled: int) -> list[CacheEntry]:
        """What a row that is dropped holds and the cache does not."""
        session.know(output)
        stop = min(filled, len(session.chain))
        if self._grid_only:  # and of the prompt alone: a cold prompt prefills what this row decoded
            stop = min(stop, len(session.request.prompt) - 1)
            stop -= stop % self._chunk
        # Keys without a state are of no use where there are states.
        if not stop or (self._index.states and stop != filled):
            return []
        ends = [*range(self._chunk, stop + 1, self._chunk), *([stop] if stop % self._chunk else [])]
        drafts = self._missing_deltas(session, ends)
        if self._index.states:
            drafts += self._missing_state(session, stop)
        for draft in drafts:
            draft.durable = draft.stop == stop
            draft.prompt = stop <= len(session.request.prompt)  # an interrupted prompt comes back
            if draft.part is SnapshotKind.DELTA and draft.start < session.deferred < draft.stop:
                draft.inside = session.chain.draft(SnapshotKind.DELTA, session.deferred)
        return drafts

    def _missing_deltas(self, session: TrackedRequest, ends: Sequence[int]) -> list[CacheEntry]:
        if not self._index.deltas:
            return []
        missing = [
            end for end in ends if not self._known(session, session.chain.key(SnapshotKind.DELTA, end))
        ]
        drafts = [session.chain.draft(SnapshotKind.DELTA, end) for end in missing]
        return [draft for draft in drafts if draft.stop % self._chunk == 0 or not self._covered(draft)]

    def _covered(self, draft: CacheEntry) -> bool:
        cover = self._index.cover(draft)
        if cover is not None:
            self._index.mark(draft)
            self._store.touch([cover], True)
        return cover is not None

    def _missing_state(self, session: TrackedRequest, stop: int) -> list[CacheEntry]:
        key = session.chain.key(SnapshotKind.STATE, stop)
        known = self._index.records.get(key)
        if known is not None:
            self._store.touch([known], True)
        if self._known(session, key):
            return []
        draft = session.chain.draft(SnapshotKind.STATE, stop)
        # A conversation goes on from its end. Of what it passed stays where others begin: the first state,
        # which is the system prompt's end, and where it forked.
        passed = self._index.states_of(session.chain, stop - 1)[1:-NEWEST]
        draft.thinned = [state for state in passed if state.uses < FORK]
        return [draft]

    def _known(self, session: TrackedRequest, key: Key) -> bool:
        return key in self._index.records or key in session.asked
