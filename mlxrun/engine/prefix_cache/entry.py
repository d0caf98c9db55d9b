"""Entries and counters of the prefix cache, and what it asks of a codec (model/kv/snapshot/snapshots.py).

An entry is found by its content. Token ids inside an image's span are replaced by numbers derived from the
image's digest, so that equal ids mean equal content, in text and images alike (core/request.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mlxrun.core.step_plan import SerializedPayload, SnapshotKind
from mlxrun.engine.prefix_cache.entry_scores import EntryScores, ScoreBook

Key = bytes  # 16 bytes


@dataclass(slots=True, eq=False)
class CacheEntry:
    """One entry of the cache; without a payload it is a draft, the plan of an entry.

    DELTA: keys and values of tokens [start, stop), start on the grid, stop at most the next grid point.
    STATE: the states after exactly `stop` tokens; `start` is the last grid point before `stop`.
    `key` names the kind and all content up to `stop`; `parent` is the key of the grid point at `start`; `ids`
    is the content (int64) of [start, stop).
    """

    key: Key
    parent: Key
    kind: SnapshotKind
    start: int
    stop: int
    ids: array[int]
    payload: Any = None  # in memory; None while the entry is only on disk
    nbytes: int = 0  # of the payload in memory
    boundary: bool = False  # a state at a position that other prompts are likely to share: evicted last
    on_disk: bool = False
    last_used: int = 0  # in ticks of the store's clock
    pins: int = 0  # running requests that use it
    from_prompt: bool = False  # computed for a prompt, or used by one: outlasts the ends of answers
    durable: bool = False  # a draft that is to be written to disk, after all that it depends on
    prompt_end: CacheEntry | None = None  # of a draft that goes beyond the end of its prompt: that end
    hit_count: int = 0  # requests whose hit ended with it
    obsolete_states: Sequence[CacheEntry] = ()  # of a draft: states that nobody needs once it is stored
    scores: EntryScores | None = None  # logprobs of its tokens, if a request wanted them
    book: ScoreBook | None = None  # of a draft: the prompt's logprobs, which may be known before it is stored


class PayloadCodec(Protocol):
    """What the cache asks about payloads, which it never looks into. Engine thread only."""

    def nbytes(self, payload: Any) -> int:
        """Return the bytes of device memory that the payload takes."""
        ...

    def encode(self, payload: Any) -> SerializedPayload:
        """Return the payload as bytes."""
        ...

    def decode(self, serialized: SerializedPayload) -> Any:
        """Return the payload of these bytes. ValueError if they are not a payload of this model."""
        ...

    def is_usable(self, payload: Any, tokens: int) -> bool:
        """Whether the payload can be restored: one row, the right shapes and types, a delta of at least
        `tokens` tokens (0 for a state)."""
        ...


@dataclass(slots=True)
class CacheCounters:
    """What the cache did since it started. Other threads may read these numbers."""

    exact: int = 0
    prefix: int = 0
    supersequence: int = 0
    lcp: int = 0
    miss: int = 0
    tokens: int = 0  # that need not be computed
    entries: int = 0  # in memory now
    memory_bytes: int = 0  # now
    disk_bytes: int = 0  # now
    evicted: int = 0  # from memory
    evicted_disk: int = 0
    refused: int = 0  # files and payloads that could not be used
    written: int = 0  # files
    read: int = 0  # files
