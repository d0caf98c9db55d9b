"""What the prefix cache is tested with: payloads that say what they hold, files in a dict, and no model.

What a row holds is written down here without the cache's own keys, so a hit with wrong content is seen.
"""

from __future__ import annotations

import ast
from array import array
from collections.abc import Sequence
from typing import Any

from mlxrun.cache.entry import CacheEntry, SerializedPayload, SerializedTensor
from mlxrun.cache.prefix_cache import PrefixCache
from mlxrun.config.settings import CacheSettings
from mlxrun.scheduler.request import Request, SamplingParams
from mlxrun.scheduler.request_state import RequestState
from mlxrun.scheduler.step_plan import CacheHit, SnapshotKind, SnapshotRequest, SnapshotResult

STATE_BYTES = 6


def truth(request: Request, output: Sequence[int] = ()) -> tuple[Any, ...]:
    """What each position of a request holds."""
    content: list[Any] = [*request.prompt, *output]
    for (start, stop), what in zip(request.image_spans, request.image_digests, strict=True):
        content[start:stop] = [(what, i) for i in range(stop - start)]
    return tuple(content)


def make_request(rid: str, prompt: Sequence[int], **more: Any) -> Request:
    return Request(rid, tuple(prompt), SamplingParams(), **more)


class FakeCodec:
    """A payload is (part, content); a byte a token, or some for a state."""

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

    def decode(self, blob: SerializedPayload) -> Any:
        self.decoded += 1
        if "payload" not in blob.meta:
            raise ValueError("not a payload")
        return ast.literal_eval(blob.meta["payload"])

    def is_usable(self, payload: Any, tokens: int) -> bool:
        return payload not in self.broken and (payload[0] == "state" or len(payload[1]) >= tokens)


class FakeDiskTier:
    """A disk. `drop`: reads of these keys fail."""

    def __init__(self) -> None:
        self.files: dict[bytes, tuple[CacheEntry, SerializedPayload]] = {}
        self.full = False
        self.closed = False

    @property
    def nbytes(self) -> int:
        return sum(blob.nbytes for _, blob in self.files.values())

    def scan(self) -> list[CacheEntry]:
        return [
            CacheEntry(
                r.key,
                r.parent,
                r.kind,
                r.start,
                r.stop,
                array("q", r.ids),
                boundary=r.boundary,
                on_disk=True,
            )
            for r, _ in self.files.values()
        ]

    def write(self, record: CacheEntry, blob: SerializedPayload) -> bool:
        if not self.full:
            self.files[record.key] = (record, blob)
        return not self.full

    def is_stored(self, record: CacheEntry) -> bool:
        return record.key in self.files

    def read(self, record: CacheEntry) -> SerializedPayload | None:
        found = self.files.get(record.key)
        return found[1] if found else None

    def delete(self, record: CacheEntry) -> None:
        self.files.pop(record.key, None)

    def close(self) -> None:
        self.closed = True


def make_cache(
    chunk: int = 8, *, deltas: bool = True, states: bool = False, memory: int = 10**6, **more: Any
) -> PrefixCache:
    settings = CacheSettings(
        checkpoint_every=more.pop("every", 16), disk_bytes=more.pop("disk", 10**6), stored_bits=None
    )
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
        self.request_state = RequestState(request, 0, 0.0, 10**6)
        self.hit: CacheHit | None = None
        self.filled = 0
        cache.track(request)

    @property
    def content(self) -> tuple[Any, ...]:
        return truth(self.request, self.request_state.output)

    def begin(self) -> CacheHit | None:
        self.hit = self.cache.lookup(self.request.id, self.request_state.output, self.request_state.prefill_target)
        if self.hit is not None:
            self.check(self.hit)
        self.request_state.num_computed_tokens = self.filled = self.hit.length if self.hit else 0
        self.request_state.running = True
        self.request_state.decoding = self.filled == self.request_state.prefill_target
        return self.hit

    def check(self, hit: CacheHit) -> None:
        """The hit holds exactly what the request's first tokens are."""
        assert 0 < hit.length <= self.request_state.prefill_target
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

    def saved(self, save: SnapshotRequest) -> SnapshotResult:
        start = save.start if save.kind is SnapshotKind.DELTA else 0
        assert save.stop <= self.filled
        assert save.kind is SnapshotKind.DELTA or save.stop == self.filled
        return SnapshotResult(save, (save.kind.value, self.content[start : save.stop]))

    def prefill(self, most: int = 10**6) -> bool:
        """One chunk; whether there was one."""
        if self.request_state.decoding:
            return False
        start, stop = self.request_state.num_computed_tokens, self.request_state.find_chunk_end(self.chunk, most)
        if self.cache.needs_boundary_stops:
            stop = next((b for b in self.request.boundaries if start < b < stop), stop)
        target = self.request_state.prefill_target
        self.request_state.record_prefill(stop)
        self.filled = stop
        for save in self.cache.plan_snapshots(self.request.id, start, stop, target):
            self.cache.store_snapshot(self.saved(save))
        return True

    def decode(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.filled = len(self.content)
            self.request_state.output.append(token)

    def preempt(self) -> None:
        """Out of the batch: it may come back."""
        saves = self.cache.plan_final_snapshots(self.request.id, self.request_state.output, self.filled)
        for save in saves:
            self.cache.store_snapshot(self.saved(save))
        self.request_state.reset()
        self.filled = 0

    def end(self) -> None:
        if self.request_state.running:
            self.preempt()
        self.cache.forget(self.request.id)

    def serve(self, answer: Sequence[int] = ()) -> CacheHit | None:
        """All of it."""
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
    """What must hold between any two calls: sums, budgets, and that everything kept can be reached."""
    index, store = cache._index, cache._store
    records = index.entries.values()
    held = [r for r in records if r.payload is not None]
    assert store.nbytes == sum(r.nbytes for r in held) == cache.counters.memory_bytes
    assert cache.counters.records == len(held)
    assert set(index.entries) == set(index._nodes)
    if memory is not None:
        assert store.nbytes <= max(memory, sum(r.nbytes for r in held if r.pins))
    for record in records:
        assert record.payload is not None or record.on_disk, "in no tier"
        assert index.is_reachable(record)
        assert all(
            a.last_used >= record.last_used
            for a in list(index.iterate_ancestors(record))[record.kind is SnapshotKind.STATE :]
        )
    files = cache._files
    if files is not None:
        retired = {part.key for part, _ in store._retired}
        assert {r.key for r in records if r.on_disk} | retired == set(files.blobs)  # type: ignore[attr-defined]
    live = set(index._nodes.values())
    assert all(any(n is node or n in live for n in node.walk_up()) for node in live)
    if not records:
        assert not index._trees
