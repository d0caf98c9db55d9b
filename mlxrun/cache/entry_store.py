"""The records' payloads: in memory within a budget, and on disk, if there is one, within another.

A record is in the index as long as it is in some tier. What it rests on is evicted after it, so nothing is
kept that cannot be reached; what is removed for another reason takes with it all that rested on it.
"""

from __future__ import annotations

from typing import Any

from mlxrun.cache.content_keys import record_key
from mlxrun.cache.entry import CacheCounters, CacheEntry, DiskTierInterface, PayloadCodec, SerializedPayload
from mlxrun.cache.eviction import EvictionOrder
from mlxrun.cache.radix_index import RadixIndex
from mlxrun.scheduler.step_plan import SnapshotKind

# In a model with states, ticks by which what prompts need outlasts what only ended an answer.
OUTLAST = 1024


class EntryStore:
    """The two tiers. `memory_bytes` and `disk_bytes`: the most that each may hold. What files read, write and
    refuse they count themselves."""

    def __init__(
        self,
        index: RadixIndex,
        codec: PayloadCodec,
        files: DiskTierInterface | None,
        memory_bytes: int,
        disk_bytes: int,
        counters: CacheCounters | None = None,
    ) -> None:
        self.index = index
        self.counters = counters or CacheCounters()
        self.nbytes = 0  # in memory
        self._codec = codec
        self._files = files
        self._memory_bytes = memory_bytes
        self._disk_bytes = disk_bytes
        self._memory = EvictionOrder()
        self._disk = EvictionOrder()
        self._retired: list[
            tuple[CacheEntry, CacheEntry]
        ] = []  # parts whose files are there until the whole's are
        self._clock = 0
        if files is not None:
            self._scan(files)

    def is_safe(self, record: CacheEntry) -> bool:
        """Whether it would outlive the process, or nothing would."""
        return self._files is None or not record.on_disk or self._files.stored(record)

    # -- in ---------------------------------------------------------------------------------------------

    def put(self, draft: CacheEntry, payload: Any) -> CacheEntry | None:
        """Keep a payload; the record that holds it now, which may be a longer one, or None if none does."""
        inside, draft.inside = draft.inside, None
        kept = self._put(draft, payload)
        if kept is not None and inside is not None and self.index.cover(inside) is not None:
            self.index.mark(inside)
        return kept

    def _put(self, draft: CacheEntry, payload: Any) -> CacheEntry | None:
        known = self.index.records.get(draft.key)
        if known is None and self.index.reachable(draft):
            known = self.index.cover(draft) if draft.part is SnapshotKind.DELTA else None
            if known is None:
                return self._enter(draft, payload)
            self.index.mark(draft)
        if known is None:
            return None
        self.touch([known], draft.prompt)
        if known.key == draft.key:
            known.boundary |= draft.boundary
            if known.payload is None:
                self._hold(known, payload)
        if draft.durable:
            self._write(known)
        self.enforce()
        return self._if_kept(known)

    def _enter(self, record: CacheEntry, payload: Any) -> CacheEntry | None:
        nbytes = self._codec.nbytes(payload)
        if nbytes > self._memory_bytes and not (record.durable and self._files is not None):
            return None
        parts = self.index.add(record)
        self.touch([record], record.prompt)
        record.payload, record.nbytes = payload, nbytes
        self._account(record, 1)
        # A part is only deleted from disk once the whole is on it.
        if record.durable or any(part.on_disk for part in parts):
            self._write(record)
        for part in parts:
            record.tick = max(record.tick, part.tick)
            self._retire(part, record)
            self.forget(part)
        if nbytes > self._memory_bytes:
            self._drop(record)
        self.enforce()
        return self._if_kept(record)

    def thin(self, kept: CacheEntry, draft: CacheEntry) -> None:
        """Forget the states that `draft` made superfluous, if `kept`, which holds it, would outlive them."""
        gone, draft.thinned = draft.thinned, ()
        if self.is_safe(kept):
            for state in gone:
                if not state.pins and self._if_kept(state) is not None:
                    self.forget(state)

    def _if_kept(self, record: CacheEntry) -> CacheEntry | None:
        return record if self.index.records.get(record.key) is record else None

    def touch(self, records: list[CacheEntry], prompt: bool) -> None:
        """They were used now, and with them all that they rest on."""
        self._clock += 1
        tick = self._clock + (OUTLAST if prompt and self.index.states else 0)
        for record in records:
            record.tick = max(record.tick, tick)
            for above in self.index.ancestors(record):
                if above.tick >= tick:  # then so are those above it
                    break
                above.tick = tick

    # -- out ----------------------------------------------------------------------------------------------

    def load(self, record: CacheEntry) -> Any:
        """A payload that can be restored, from memory or disk; None if it cannot, and the record is gone."""
        payload, read = record.payload, record.payload is None
        if read:
            blob = self._files.read(record) if self._files is not None else None
            if blob is None:  # files count what they could not read
                self.forget(record)
                return None
            payload = self._decode(blob)
        tokens = record.stop - record.start if record.part is SnapshotKind.DELTA else 0
        if payload is None or not self._codec.usable(payload, tokens):
            self.refuse(record)
            return None
        if read:
            self._hold(record, payload)
        return payload

    def _decode(self, blob: SerializedPayload) -> Any:
        try:
            return self._codec.decode(blob)
        except ValueError:
            return None

    def _hold(self, record: CacheEntry, payload: Any) -> None:
        """Keep in memory what was only on disk, if others can make room for it."""
        nbytes = self._codec.nbytes(payload)
        if nbytes > self._memory_bytes:
            return
        record.payload, record.nbytes = payload, nbytes
        self._account(record, 1)
        self.shrink(self._memory_bytes)
        if self.nbytes > self._memory_bytes and record.payload is not None:
            self._drop(record)

    def pin(self, records: list[CacheEntry]) -> None:
        for record in records:
            record.pins += 1

    def unpin(self, records: list[CacheEntry]) -> None:
        for record in records:
            record.pins -= 1
            if not record.pins and self.index.records.get(record.key) is record:
                if record.payload is not None:
                    self._memory.add(record)
                if record.on_disk:
                    self._disk.add(record)
        self.enforce()

    # -- eviction -----------------------------------------------------------------------------------------

    def enforce(self) -> None:
        """Both budgets."""
        self._delete_retired()
        self.shrink(self._memory_bytes)

    def shrink(self, most: int) -> None:
        """Hold at most so many bytes in memory, or what is pinned."""
        while self.nbytes > most:
            record = self._memory.pop()
            if record is None:
                break
            self._drop(record)
            self.counters.evicted += 1
        self._trim_disk()
        self._report()

    def _drop(self, record: CacheEntry) -> None:
        """Out of memory; to disk, if it is not there, so that a prompt may be longer than memory holds."""
        self._write(record)
        if record.on_disk:
            self._account(record, -1)
            self._report()
        else:
            self.forget(record)

    def _trim_disk(self) -> None:
        if self._files is not None and self._files.nbytes > self._disk_bytes:
            self._delete_retired(now=True)
        while self._files is not None and self._files.nbytes > self._disk_bytes:
            record = self._disk.pop()
            if record is None:
                break
            self._unlink(record)
            self.counters.evicted_disk += 1
            if record.payload is None:
                self.forget(record)

    def refuse(self, *records: CacheEntry) -> None:
        """They cannot be used: gone, from all tiers."""
        self.counters.refused += len(records)
        for record in records:
            self.forget(record)

    def clear(self) -> None:
        """Forget all but what running requests use, and what that rests on."""
        pinned = [record for record in self.index.records.values() if record.pins]
        kept = {id(r) for record in pinned for r in (record, *self.index.ancestors(record))}
        for record in list(self.index.records.values()):
            if id(record) not in kept:
                self.forget(record)

    def forget(self, record: CacheEntry) -> None:
        """Out of all tiers, with all that rests on it."""
        gone = [record]
        while gone:
            record = gone.pop()
            if self.index.records.get(record.key) is record:
                gone += self.index.remove(record)
                if record.payload is not None:
                    self._account(record, -1)
                self._unlink(record)
        self._report()

    def _account(self, record: CacheEntry, sign: int) -> None:
        """A payload came into memory, or leaves it."""
        self.nbytes += sign * record.nbytes
        self.counters.records += sign
        if sign > 0:
            self._memory.add(record)
        else:
            record.payload, record.nbytes = None, 0
            self._memory.discard(record)

    def _report(self) -> None:
        self.counters.memory_bytes = self.nbytes
        self.counters.disk_bytes = self._files.nbytes if self._files is not None else 0

    # -- disk ---------------------------------------------------------------------------------------------

    def _write(self, record: CacheEntry) -> None:
        """To disk, after all that it rests on."""
        if self._files is None:
            return
        for part in [*reversed(list(self.index.ancestors(record))), record]:
            if part.on_disk:
                continue
            if part.payload is None or not self._files.write(part, self._codec.encode(part.payload)):
                return
            part.on_disk = True
            self._disk.add(part)

    def _retire(self, part: CacheEntry, whole: CacheEntry) -> None:
        """The part's file goes once the whole has one: if that cannot be written, the next run finds it."""
        if part.on_disk:
            part.on_disk = False
            self._disk.discard(part)
            self._retired.append((part, whole))

    def _delete_retired(self, *, now: bool = False) -> None:
        if self._files is None or not self._retired:
            return
        waiting, self._retired = self._retired, []
        for part, whole in waiting:
            again = self.index.records.get(part.key)
            if again is not None and again.on_disk:
                continue
            if now or self._files.stored(whole) or self.index.records.get(whole.key) is not whole:
                self._files.delete(part)
            else:
                self._retired.append((part, whole))

    def _unlink(self, record: CacheEntry) -> None:
        if record.on_disk and self._files is not None:
            self._files.delete(record)
            record.on_disk = False
            self._disk.discard(record)

    def _scan(self, files: DiskTierInterface) -> None:
        """What an earlier run left, as far as all is there that it rests on."""
        found = list(files.scan())
        # Parents first; of what begins alike the longest first, which the others are parts of.
        for record in sorted(found, key=lambda r: (r.start, r.part is SnapshotKind.STATE, -r.stop)):
            if not self._sound(record):
                self.counters.refused += 1
                files.delete(record)
            elif not self.index.reachable(record) or (
                record.part is SnapshotKind.DELTA and self.index.cover(record) is not None
            ):
                files.delete(record)
            else:
                self.index.add(record)
        for record in found:
            if self._if_kept(record) is not None:
                self.touch([record], record.boundary)
        for record in self.index.records.values():
            self._disk.add(record)
        self.enforce()

    def _sound(self, record: CacheEntry) -> bool:
        size, chunk = record.stop - record.start, self.index.chunk
        known = self.index.deltas if record.part is SnapshotKind.DELTA else self.index.states
        placed = record.start % chunk == 0 and 0 < size <= chunk
        rooted = (record.parent == self.index.root) == (record.start == 0)
        return known and placed and rooted and len(record.ids) == size and record.key == record_key(record)
