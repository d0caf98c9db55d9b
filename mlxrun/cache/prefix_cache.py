"""The prefix cache: what the scheduler asks (scheduler/prefix_cache_interface.py), and what the engine brings back.

Engine thread only. What cannot be used is a miss, a failure of the cache itself too: it may cost time, never
an answer. What to save is decided by cache/save_planner.py and copied by the runner; cache/entry_store.py keeps it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from mlxrun.cache.entry import CacheCounters, CacheEntry, DiskTierInterface, Key, PayloadCodec
from mlxrun.cache.entry_store import EntryStore
from mlxrun.cache.radix_index import RadixIndex, RadixMatch
from mlxrun.cache.save_planner import SnapshotPlanner
from mlxrun.cache.tracked_request import PlannedEntries, TrackedRequest
from mlxrun.config.settings import CacheSettings
from mlxrun.scheduler.request import HitKind, Request
from mlxrun.scheduler.step_plan import CacheHit, SnapshotKind, SnapshotRequest, SnapshotResult

log = logging.getLogger(__name__)

T = TypeVar("T")


class PrefixCache:
    """`root`: fingerprint of the model, and of all else that payloads depend on. `deltas`: some layers keep
    the keys of all tokens. `states`: some do not. `grid_only`: hits and records end on the grid only, so that
    a prompt is always cut the same way."""

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
        files: DiskTierInterface | None = None,
        grid_only: bool = False,
        counters: CacheCounters | None = None,
    ) -> None:
        self._root = root
        self._chunk = chunk
        self._grid_only = grid_only
        self._files = files
        self._index = RadixIndex(root, chunk, deltas=deltas, states=states)
        self._store = EntryStore(self._index, codec, files, memory_bytes, settings.disk_bytes, counters)
        self._saving = SnapshotPlanner(
            self._index,
            self._store,
            settings.checkpoint_every,
            grid_only=grid_only,
            lasting=self.lasting,
        )
        self._sessions: dict[str, TrackedRequest] = {}
        self._ahead = PlannedEntries()
        self._failed = False

    @property
    def stops(self) -> bool:
        return self._index.states and not self._grid_only

    @property
    def lasting(self) -> bool:
        return self._files is not None

    @property
    def nbytes(self) -> int:
        return self._store.nbytes

    @property
    def counters(self) -> CacheCounters:
        return self._store.counters

    def counts(self) -> Mapping[str, int]:
        """The counters by name; from any thread."""
        return asdict(self.counters)

    # -- the scheduler's side ---------------------------------------------------------------------------

    def open(self, request: Request) -> None:
        self._sessions[request.id] = TrackedRequest(request, self._root, self._chunk, self._grid_only)

    def held(self, request_id: str) -> bool:
        session = self._session(request_id)
        if session is None or session.running or not self._ahead:
            return False
        return self._safely(lambda: self._held(session), False)

    def _held(self, session: TrackedRequest) -> bool:
        points = session.keypoints(session.usable)
        if not any(key in self._ahead for _, key in points):
            return False
        state = self._index.version, len(session.chain)
        if session.matched[:2] != state:
            match = self._index.match(session.chain, session.usable, session.floor)
            session.matched = *state, match.length if match else 0
        for stop, key in points:
            if stop > session.matched[2]:
                if key in self._ahead:
                    for owner in self._ahead.owners(key):
                        self._sessions[owner].wanted = True
                    return True
                # Deltas are of no use without those before; of states any later one will do.
                if stop % self._chunk == 0 and not self._index.states:
                    return False
        return False

    def find(self, request_id: str, output: Sequence[int], most: int) -> CacheHit | None:
        session = self._session(request_id)
        hit = None
        if session is not None:
            self._stop(session)
            session.running = True
            hit = self._safely(lambda: self._find(session, output, most), None)
            session.state_at = session.written_at = hit.length if hit else 0
            self._safely(lambda: self._announce(session, hit.length if hit else 0, most), None)
        kind = hit.kind if hit else HitKind.MISS
        setattr(self.counters, kind.value, getattr(self.counters, kind.value) + 1)
        self.counters.tokens += hit.length if hit else 0
        return hit

    def _find(self, session: TrackedRequest, output: Sequence[int], most: int) -> CacheHit | None:
        session.know(output)
        while match := self._index.match(session.chain, most, session.floor):
            session.pins = match.records
            self._store.pin(session.pins)  # what is read now does not push out the rest of the hit
            payloads = self._load(match)
            if payloads is not None:
                self._store.touch(match.records[-2:], True)
                match.records[-1].uses += 1
                state = payloads.pop() if match.state else None
                deltas = zip(match.deltas, payloads, strict=True)
                parts = tuple((start, stop, payload) for (start, stop, _), payload in deltas)
                return CacheHit(match.length, _kind(match, most), parts, state)
            self._unpin(session)
        return None

    def _load(self, match: RadixMatch) -> list[Any] | None:
        """The payloads of a match; None if one of them cannot be used, which is then gone."""
        payloads = []
        for record in match.records:
            payload = self._store.load(record)
            if payload is None:
                return None
            payloads.append(payload)
        return payloads

    def _announce(self, session: TrackedRequest, length: int, most: int) -> None:
        """Others may wait for what this request is going to compute."""
        session.passed = length
        self._ahead.register(session.request.id, self._saving.ahead(session, length, most))

    def due(self, request_id: str, start: int, stop: int, target: int) -> list[SnapshotRequest]:
        session = self._session(request_id)
        if session is None or not session.running:
            return []
        return self._safely(lambda: self._due(session, start, stop, target), _none())

    def _due(self, session: TrackedRequest, start: int, stop: int, target: int) -> list[SnapshotRequest]:
        drafts = self._saving.due(session, start, stop, target)
        if not drafts and not session.asked:
            self._ahead.passed(session.request.id, session.passed)
        return self._saves(session, drafts)

    def release(self, request_id: str, output: Sequence[int], filled: int) -> list[SnapshotRequest]:
        session = self._session(request_id)
        if session is None or not session.running:
            return []
        saves = self._safely(
            lambda: self._saves(session, self._saving.rest(session, output, filled)), _none()
        )
        self._stop(session)
        return saves

    def close(self, request_id: str) -> None:
        session = self._sessions.pop(request_id, None)
        if session is not None:
            self._stop(session)

    def shrink(self, most: int) -> None:
        self._safely(lambda: self._store.shrink(most), None)

    # -- the engine's side ------------------------------------------------------------------------------

    def put(self, saved: SnapshotResult) -> None:
        """A copy is ready: into memory, and at checkpoints to disk."""
        draft: CacheEntry = saved.save.record
        kept = None
        if saved.payload is not None:
            kept = self._safely(lambda: self._store.put(draft, saved.payload), None)
            if kept is not None and draft.thinned:
                self._safely(lambda: self._store.thin(kept, draft), None)
        session = self._sessions.get(saved.save.request_id)
        if session is None:
            return
        if session.running and draft.part is SnapshotKind.STATE and draft.prompt:
            self._safely(lambda: self._replace_checkpoint(session, kept), None)
        session.asked.discard(draft.key)
        self._ahead.passed(session.request.id, draft.stop if session.asked else session.passed)

    def _replace_checkpoint(self, session: TrackedRequest, state: CacheEntry | None) -> None:
        """Of a prompt's states on the way only the newest is kept, and those that others use. The newest
        counts once it is a file, where there are files: until then the last one that is stays."""
        if state is None:
            return
        session.checkpoints.append((state, state.tick))
        safe = [i for i, (s, _) in enumerate(session.checkpoints) if self._store.is_safe(s)]
        first = safe[-1] if safe else 0
        last = len(session.checkpoints) - 1
        gone = [i for i in range(last) if i != first]
        for old, tick in (session.checkpoints[i] for i in gone):
            if not old.boundary and not old.pins and old.tick == tick:
                self._store.forget(old)
        session.checkpoints = [c for i, c in enumerate(session.checkpoints) if i not in gone]

    def discard(self, request_id: str) -> None:
        """The hit given to this request could not be restored."""
        session = self._session(request_id)
        if session is not None:
            records = session.pins
            self._unpin(session)
            session.state_at = session.written_at = 0
            self._safely(lambda: self._store.refuse(*records), None)

    def clear(self) -> None:
        """Forget all that no running request uses, in memory and on disk."""
        self._safely(self._store.clear, None)
        log.info("the prefix cache was cleared")

    def shutdown(self) -> None:
        """Nothing is asked any more: finish the writes."""
        if self._files is not None:
            self._files.close()

    # -- both -------------------------------------------------------------------------------------------

    def _session(self, request_id: str) -> TrackedRequest | None:
        session = self._sessions.get(request_id)
        return session if session is not None and session.cacheable else None

    def _saves(self, session: TrackedRequest, drafts: list[CacheEntry]) -> list[SnapshotRequest]:
        session.asked.update(draft.key for draft in drafts)
        return [
            SnapshotRequest(session.request.id, d.part, d.start, d.stop, d, self.lasting and d.durable)
            for d in drafts
        ]

    def _unpin(self, session: TrackedRequest) -> None:
        if session.pins:
            pins, session.pins = session.pins, []
            self._safely(lambda: self._store.unpin(pins), None)

    def _stop(self, session: TrackedRequest) -> None:
        """The request does not run, or not any more."""
        self._unpin(session)
        self._ahead.forget(session.request.id)
        session.running = False
        session.checkpoints = []
        session.asked.clear()

    def _safely(self, act: Callable[[], T], otherwise: T) -> T:
        """What the cache does, or as if it had done nothing."""
        try:
            return act()
        except Exception:
            if not self._failed:
                log.exception("the prefix cache failed; requests go on without it (logged once)")
            self._failed = True
            return otherwise


def _none() -> list[SnapshotRequest]:
    return []


def _kind(match: RadixMatch, most: int) -> HitKind:
    if match.length == most:
        return HitKind.EXACT if match.whole else HitKind.SUPERSEQUENCE
    return HitKind.PREFIX if match.whole else HitKind.LCP
