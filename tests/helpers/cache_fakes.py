"""Fakes for tests of the prefix cache: payloads that say what they hold, a disk tier in a dict, and no model.

The content of a row is described here without the cache's own keys, so that a hit with wrong content fails.
"""

from __future__ import annotations

import ast
from array import array
from collections.abc import Sequence
from typing import Any

from mlxrun.config.settings import CacheSettings
from mlxrun.core.request import Request, SamplingParams
from mlxrun.core.step_plan import (
    CacheHit,
    SerializedPayload,
    SerializedTensor,
    SnapshotKind,
    SnapshotRequest,
    SnapshotResult,
)
from mlxrun.engine.prefix_cache.entry import CacheEntry
from mlxrun.engine.prefix_cache.prefix_cache import PrefixCache
from mlxrun.engine.scheduler.request_state import RequestState

STATE_BYTES = 6


def list_content(request: Request, output: Sequence[int] = ()) -> tuple[Any, ...]:
    """Return the content of each position of a request."""
    content: list[Any] = [*request.prompt, *output]
    for (start, stop), what in zip(request.image_spans, request.image_digests, strict=True):
        content[start:stop] = [(what, i) for i in range(stop - start)]
    return tuple(content)


def make_request(rid: str, prompt: Sequence[int], **more: Any) -> Request:
    return Request(rid, tuple(prompt), SamplingParams(), **more)


class FakeCodec:
    """A payload is (kind, content); it has one byte a token, a state STATE_BYTES."""

    def __init__(self) -> None:
        self.broken: set[Any] = set()
        self.decoded = 0

    def nbytes(self, payload: Any) -> int:
        return len(payload[1]) if payload[0] == "delta" else STATE_BYTES

    def encode(self, payload: Any) -> SerializedPayload:
        size = self.nbytes(payload)
        return SerializedPayload(
            {"x": SerializedTensor("U8", (size,), bytes(size))}, {"payload": repr(payload)}
        )

    def decode(self, serialized: SerializedPayload) -> Any:
        self.decoded += 1
        if "payload" not in serialized.meta:
            raise ValueError("not a payload")
        return ast.literal_eval(serialized.meta["payload"])

    def is_usable(self, payload: Any, tokens: int) -> bool:
        return payload not in self.broken and (payload[0] == "state" or len(payload[1]) >= tokens)


class FakeTier:
    """A tier in a dict, which another cache may go on with; while `full` is set it accepts nothing."""

    survives_restart = True

    def __init__(self) -> None:
        self.max_bytes = 10**6
        self.files: dict[bytes, tuple[CacheEntry, SerializedPayload]] = {}
        self.full = False
        self.closed = False

    @property
    def nbytes(self) -> int:
        return sum(payload.nbytes for _, payload in self.files.values())

    def scan(self) -> list[CacheEntry]:
        return [
            CacheEntry(
                e.key,
                e.parent,
                e.kind,
                e.start,
                e.stop,
                array("q", e.ids),
                at_cache_position=e.at_cache_position,
            )
            for e, _ in self.files.values()
        ]

    def write(self, entry: CacheEntry, payload: SerializedPayload) -> bool:
        if not self.full:
            self.files[entry.key] = (entry, payload)
        return not self.full

    def is_stored(self, entry: CacheEntry) -> bool:
        return entry.key in self.files

    def read(self, entry: CacheEntry) -> SerializedPayload | None:
        found = self.files.get(entry.key)
        return found[1] if found else None

    def delete(self, entry: CacheEntry) -> None:
        self.files.pop(entry.key, None)

    def close(self) -> None:
        self.closed = True


def make_cache(
    chunk: int = 8, *, deltas: bool = True, states: bool = False, memory: int = 10**6, **more: Any
) -> PrefixCache:
    settings = CacheSettings(
        checkpoint_every=more.pop("every", 16),
        stored_bits=None,
        intervals_only=more.pop("intervals_only", False),
    )
    limit = more.pop("disk", 10**6)
    if more.get("tier") is not None:
        more["tier"].max_bytes = limit
    more.setdefault("codec", FakeCodec())
    return PrefixCache(
        b"r" * 16, chunk, deltas=deltas, states=states, settings=settings, memory_bytes=memory, **more
    )


class Row:
    """A request that is served as the scheduler and the runner would, a chunk at a time."""

    def __init__(self, cache: PrefixCache, request: Request, chunk: int = 8) -> None:
        self.cache = cache
        self.request = request
        self.chunk = chunk
        self.state = RequestState(request, 0, 0.0, 10**6)
        self.hit: CacheHit | None = None
        self.filled = 0
        cache.track(request)

    @property
    def content(self) -> tuple[Any, ...]:
        return list_content(self.request, self.state.output)

    def begin(self) -> CacheHit | None:
        self.hit = self.cache.lookup(self.request.id, self.state.output, self.state.prefill_target)
        if self.hit is not None:
            self.check(self.hit)
        self.state.num_computed_tokens = self.filled = self.hit.length if self.hit else 0
        self.state.running = True
        self.state.decoding = self.filled == self.state.prefill_target
        return self.hit

    def check(self, hit: CacheHit) -> None:
        """Check that the hit holds exactly the content of the request's first tokens."""
        assert 0 < hit.length <= self.state.prefill_target
        assert not any(start < hit.length < stop for start, stop in self.request.image_spans)
        at = 0
        for start, stop, payload in hit.deltas:
            assert start == at, "deltas follow each other"
            assert payload[0] == "delta"
            assert payload[1][: stop - start] == self.content[start:stop], "wrong content in a delta"
            at = stop
        assert not hit.deltas or at == hit.length
        assert hit.deltas or hit.state is not None
        if hit.state is not None:
            assert hit.state == ("state", self.content[: hit.length]), "wrong content in a state"

    def take_snapshot(self, wanted: SnapshotRequest) -> SnapshotResult:
        start = wanted.start if wanted.kind is SnapshotKind.DELTA else 0
        assert wanted.stop <= self.filled
        assert wanted.kind is SnapshotKind.DELTA or wanted.stop == self.filled
        return SnapshotResult(wanted, (wanted.kind.value, self.content[start : wanted.stop]))

    def prefill(self, most: int = 10**6) -> bool:
        """Prefill one chunk; whether there was one."""
        if self.state.decoding:
            return False
        start, stop = (
            self.state.num_computed_tokens,
            self.state.find_chunk_end(self.chunk, most),
        )
        if self.cache.stops_at_cache_positions:
            stop = next((b for b in self.request.cache_positions if start < b < stop), stop)
        target = self.state.prefill_target
        self.state.record_prefill(stop)
        self.filled = stop
        for wanted in self.cache.plan_snapshots(self.request.id, start, stop, target):
            self.cache.store_snapshot(self.take_snapshot(wanted))
        return True

    def decode(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.filled = len(self.content)
            self.state.output.append(token)

    def preempt(self) -> None:
        """Free the row; the request may get one again."""
        for wanted in self.cache.plan_final_snapshots(self.request.id, self.state.output, self.filled):
            self.cache.store_snapshot(self.take_snapshot(wanted))
        self.state.reset()
        self.filled = 0

    def end(self) -> None:
        if self.state.running:
            self.preempt()
        self.cache.forget(self.request.id)

    def serve(self, answer: Sequence[int] = ()) -> CacheHit | None:
        """Serve the request from its lookup to its end."""
        hit = self.begin()
        while self.prefill():
            pass
        self.decode(answer)
        self.end()
        return hit


def serve(
    cache: PrefixCache, rid: str, prompt: Sequence[int], answer: Sequence[int] = (), **more: Any
) -> CacheHit | None:
    chunk = more.pop("chunk", 8)
    return Row(cache, make_request(rid, prompt, **more), chunk).serve(answer)


def check_integrity(cache: PrefixCache, memory: int | None = None) -> None:
    """Check what must be true between any two calls: sums, budgets, and that every entry can be reached."""
    index, store = cache._index, cache._store
    entries = index.entries.values()
    in_memory = [e for e in entries if e.payload is not None]
    assert store.nbytes == sum(e.nbytes for e in in_memory) == cache.read_counters()["memory_bytes"]
    assert cache.counters.entries == len(in_memory)
    assert set(index.entries) == set(index._nodes)
    if memory is not None:
        assert store.nbytes <= max(memory, sum(e.nbytes for e in in_memory if e.must_stay_in_memory()))
    for entry in entries:
        assert entry.payload is not None or entry.in_tier, "in no tier"
        assert index.is_reachable(entry)
        assert all(
            above.last_used >= entry.last_used
            for above in list(index.iterate_ancestors(entry))[entry.kind is SnapshotKind.STATE :]
        )
    tier = cache._tier
    if tier is not None:
        retired = {shorter.key for shorter, _ in store._retired}
        assert {e.key for e in entries if e.in_tier} | retired == set(tier.files)
    live = set(index._nodes.values())
    assert all(any(n is node or n in live for n in node.walk_up()) for node in live)
    if not entries:
        assert not index._trees


def list_entries(cache: PrefixCache, kind: SnapshotKind | None = None) -> list[CacheEntry]:
    return [entry for entry in cache._index.entries.values() if kind in (None, entry.kind)]


def list_stops(cache: PrefixCache, kind: SnapshotKind) -> list[int]:
    """The positions at which the entries of a kind end."""
    return sorted(entry.stop for entry in list_entries(cache, kind))
