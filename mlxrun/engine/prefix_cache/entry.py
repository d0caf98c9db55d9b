"""Entries of the prefix cache and their keys, the cache's counters, and the interface of its codec.

An entry is found by its content ids (core/request.py). They are token ids; inside images they are numbers
derived from the image's digest.

A key names all content up to a position. A grid point is a multiple of `chunk` tokens. A position's key is
the digest of two things: the key of the last grid point before it, and the ids between the two. A DELTA that
ends at the position has this key; a STATE has a key derived from it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

from mlxrun.core.request import ID_MASK, compute_digest
from mlxrun.core.step_plan import SerializedPayload, SnapshotKind
from mlxrun.engine.prefix_cache.entry_logprobs import EntryLogprobs, LogprobBook

Key = bytes  # 16 bytes


@dataclass(slots=True, eq=False)
class CacheEntry:
    """One entry of the cache. Without a payload it is a planned entry.

    DELTA: keys and values of tokens [start, stop), start on the grid, stop at most the next grid point.
    STATE: the states after exactly `stop` tokens; `start` is the last grid point before `stop`. `key`: names
    the kind and all content up to `stop`; `parent`: the key of the grid point at `start`; `ids`: the content
    (int64) of [start, stop).
    """

    key: Key
    parent: Key
    kind: SnapshotKind
    start: int
    stop: int
    ids: array[int]
    payload: Any = None  # in memory; None while the entry is only in a tier
    nbytes: int = 0  # of the payload in memory
    # A state at a position that other prompts are likely to share: evicted last
    at_cache_position: bool = False
    in_tier: bool = False
    last_used: int = 0  # in ticks of the store's clock
    pins: int = 0  # running requests that use it
    pinned: bool = False  # an operator has pinned a prefix that needs it
    from_prompt: bool = False  # computed for a prompt, or used by one: outlasts the ends of answers
    durable: bool = False  # of a planned entry: it is to be written to a tier, after all that it depends on
    # Of a planned entry that goes beyond the end of its prompt: that end
    prompt_end: CacheEntry | None = None
    hit_count: int = 0  # requests whose hit ended with it
    # Of a planned entry: states that nobody needs once it is stored
    obsolete_states: Sequence[CacheEntry] = ()
    logprobs: EntryLogprobs | None = None  # logprobs of its tokens, if a request wanted them
    # Of a planned entry: the prompt's logprobs, which may be known before it is stored
    book: LogprobBook | None = None

    def must_stay(self) -> bool:
        """Whether a running request or a pinned prefix needs the entry, in memory or in the tier."""
        return self.pins > 0 or self.pinned

    def must_stay_in_memory(self) -> bool:
        """Whether the entry may not leave memory. One of a pinned prefix may, if a tier has it."""
        return self.pins > 0 or (self.pinned and not self.in_tier)


class PayloadCodec(Protocol):
    """Handles payloads, which are opaque to the cache (model/kv/snapshot/snapshots.py). Engine thread
    only."""

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
        """Whether the payload can be restored: one row, with the right shapes and types. `tokens`: the fewest
        tokens of a delta, 0 for a state."""
        ...


@dataclass(slots=True)
class CacheCounters:
    """Numbers of the cache since it started. Other threads may read them."""

    exact: int = 0
    prefix: int = 0
    supersequence: int = 0
    lcp: int = 0
    miss: int = 0
    tokens: int = 0  # that need not be computed
    entries: int = 0  # in memory now
    pinned_bytes: int = 0  # of the prefixes that an operator has pinned, as they take in memory
    evicted: int = 0  # from memory
    evicted_disk: int = 0
    refused: int = 0  # files and payloads that could not be used
    written: int = 0  # files
    read: int = 0  # files


class AdapterSalt:
    """Makes ids of content that an adapter computed. They differ from those of other adapters and of the
    plain model. `digest`: of the adapter's files; None: ids stay unchanged."""

    def __init__(self, digest: str | None) -> None:
        self._words = array("q")
        if digest is not None:
            self._words.frombytes(blake2b(digest.encode()).digest())

    def mix(self, ids: Sequence[int], start: int) -> array[int]:
        """Return the ids of content at positions from `start` on. Negative ids stay negative."""
        if not self._words:
            return array("q", ids)
        count = len(self._words)
        return array("q", [x ^ (self._words[at % count] & ID_MASK) for at, x in enumerate(ids, start)])


def derive_kind_key(key: Key, kind: SnapshotKind) -> Key:
    """Return the key of an entry of this kind that ends where `key` does."""
    return key if kind is SnapshotKind.DELTA else compute_digest(b"state", key)


def compute_entry_key(entry: CacheEntry) -> Key:
    """Return the key that the entry must have by its content."""
    return derive_kind_key(compute_digest(entry.parent, entry.ids.tobytes()), entry.kind)


class KeyChain:
    """The keys of one growing sequence. Each is computed when it is first needed."""

    def __init__(self, root: Key, chunk: int, ids: array[int]) -> None:
        self.chunk = chunk
        self.ids = ids
        self._grid = [root]
        self._between: dict[int, Key] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append the ids of an answer's tokens."""
        self.ids.extend(tokens)

    def get_grid_key(self, index: int) -> Key:
        """Return the key after `index` full chunks. IndexError if the sequence is shorter."""
        while len(self._grid) <= index:
            start = (len(self._grid) - 1) * self.chunk
            ids = self.ids[start : start + self.chunk]
            if len(ids) < self.chunk:
                raise IndexError(f"{len(self)} ids have no grid point {index}")
            self._grid.append(compute_digest(self._grid[-1], ids.tobytes()))
        return self._grid[index]

    def get_key(self, stop: int) -> Key:
        """Return the key after `stop` ids."""
        index, rest = divmod(stop, self.chunk)
        if not rest:
            return self.get_grid_key(index)
        if stop not in self._between:
            ids = self.ids[stop - rest : stop]
            self._between[stop] = compute_digest(self.get_grid_key(index), ids.tobytes())
        return self._between[stop]

    def get_entry_key(self, kind: SnapshotKind, stop: int) -> Key:
        """Return the key of an entry of this kind that ends at `stop`."""
        return derive_kind_key(self.get_key(stop), kind)

    def plan_entry(self, kind: SnapshotKind, stop: int) -> CacheEntry:
        """Return an entry without a payload. It covers the chunk, or the beginning of one, that ends at
        `stop`."""
        index = (stop - 1) // self.chunk
        start = index * self.chunk
        parent = self.get_grid_key(index)
        return CacheEntry(self.get_entry_key(kind, stop), parent, kind, start, stop, self.ids[start:stop])
