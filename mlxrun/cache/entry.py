"""What the prefix cache keeps, and the two things that it is given: a codec (model/snapshot/snapshots.py) and files.

A record is found by content. Token ids inside an image's span are replaced by numbers made of the image's
digest, so equal ids mean equal content, and one comparison serves text and images (cache/content_keys.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mlxrun.scheduler.payload import SerializedPayload as SerializedPayload
from mlxrun.scheduler.payload import SerializedTensor as SerializedTensor
from mlxrun.scheduler.step_plan import SnapshotKind

Key = bytes  # 16 bytes


@dataclass(slots=True, eq=False)
class CacheEntry:
    """One entry of the cache.

    DELTA: keys and values of tokens [start, stop), start on the grid, stop at most the next grid point.
    STATE: the states after exactly `stop` tokens; `start` is the last grid point before `stop`.
    `key` names the part and all content up to `stop`; `parent` is the chain's key at `start`; `ids` is the
    content (int64) of [start, stop).
    """

    key: Key
    parent: Key
    part: SnapshotKind
    start: int
    stop: int
    ids: array[int]
    payload: Any = None  # in memory, or None while only on disk
    nbytes: int = 0  # of the payload in memory
    boundary: bool = False  # a state that was kept on purpose: evicted last
    on_disk: bool = False
    tick: int = 0  # when it was last used
    pins: int = 0  # running requests that use it
    prompt: bool = False  # computed for a prompt, or used by one: outlasts what only ended an answer
    durable: bool = False  # a draft's wish: to be written, with all that it rests on
    inside: CacheEntry | None = None  # of a draft: the end of the prompt, which it goes beyond
    uses: int = 0  # requests that began with it
    thinned: Sequence[CacheEntry] = ()  # of a draft: states that nobody needs once this one is kept


class PayloadCodec(Protocol):
    """What the cache must know of payloads, which it never looks into. Engine thread only."""

    def nbytes(self, payload: Any) -> int:
        """Bytes of device memory."""
        ...

    def encode(self, payload: Any) -> SerializedPayload:
        """The payload as bytes."""
        ...

    def decode(self, blob: SerializedPayload) -> Any:
        """The payload again. ValueError if these bytes are not a payload of this model."""
        ...

    def usable(self, payload: Any, tokens: int) -> bool:
        """Whether it can be restored: one row, the right shapes and types, a delta of `tokens` tokens at
        least (0 for a state)."""
        ...


class DiskTierInterface(Protocol):
    """The disk tier (cache/disk_tier.py): a passive store of records. Nothing here raises or waits for the disk,
    but `read`, which reads."""

    @property
    def nbytes(self) -> int:
        """Bytes of the files, those under way included."""
        ...

    def scan(self) -> Sequence[CacheEntry]:
        """What is there, least recently used first, `on_disk` set, no payloads. Bad files are deleted."""
        ...

    def write(self, record: CacheEntry, blob: SerializedPayload) -> bool:
        """Hand it to the writer thread; False if nothing is written any more (disk full, read-only)."""
        ...

    def stored(self, record: CacheEntry) -> bool:
        """Whether it is a file, and not only on its way to be one."""
        ...

    def read(self, record: CacheEntry) -> SerializedPayload | None:
        """The bytes, checked, also of a write under way; None if the file is gone or bad (then deleted)."""
        ...

    def delete(self, record: CacheEntry) -> None:
        """Forget it; nothing happens if it is not there."""
        ...

    def close(self) -> None:
        """Finish the writes under way and stop."""
        ...


@dataclass(slots=True)
class CacheCounters:
    """What the cache did since it started; whole numbers that other threads may read."""

    exact: int = 0
    prefix: int = 0
    supersequence: int = 0
    lcp: int = 0
    miss: int = 0
    tokens: int = 0  # that need not be computed
    records: int = 0  # in memory now
    memory_bytes: int = 0  # now
    disk_bytes: int = 0  # now
    evicted: int = 0  # from memory
    evicted_disk: int = 0
    refused: int = 0  # files and payloads that could not be used
    written: int = 0  # files
    read: int = 0  # files
