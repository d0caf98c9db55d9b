"""Keys of content: a key names all content up to a position, by its ids (core/request.py).

A grid point is a multiple of `chunk` tokens. Its key is made of the key of the grid point before it and the
ids between the two; the key of a position off the grid is made of the last grid point before it in the same
way. A DELTA that ends at a position has that key, a STATE one that is derived from it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from mlxrun.core.request import ID_MASK, compute_digest
from mlxrun.core.step_plan import SnapshotKind
from mlxrun.engine.prefix_cache.entry import CacheEntry, Key


class AdapterSalt:
    """Makes the ids of what an adapter computes: those of no other adapter, nor of the model as it is.
    `digest`: of the adapter's files; None: the ids stay as they are."""

    def __init__(self, digest: str | None) -> None:
        self._words = array("q")
        if digest is not None:
            self._words.frombytes(blake2b(digest.encode()).digest())

    def mix(self, ids: Sequence[int], start: int) -> array[int]:
        """Return the ids of content at positions from `start` on; negative ones stay negative."""
        if not self._words:
            return array("q", ids)
        count = len(self._words)
        return array("q", [x ^ (self._words[at % count] & ID_MASK) for at, x in enumerate(ids, start)])


def derive_kind_key(key: Key, kind: SnapshotKind) -> Key:
    """Return the key of the entry of that kind which ends where `key` does."""
    return key if kind is SnapshotKind.DELTA else compute_digest(b"state", key)


def compute_entry_key(entry: CacheEntry) -> Key:
    """Return the key that the entry must have, by its content."""
    return derive_kind_key(compute_digest(entry.parent, entry.ids.tobytes()), entry.kind)


class KeyChain:
    """The keys of one growing sequence, each computed when it is first needed."""

    def __init__(self, root: Key, chunk: int, ids: array[int]) -> None:
        self.chunk = chunk
        self.ids = ids
        self._grid = [root]
        self._between: dict[int, Key] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append the tokens of an answer, which are their own ids."""
        self.ids.extend(tokens)

    def get_grid_key(self, index: int) -> Key:
        """Return the key after `index` full chunks."""
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
        """Return the key of the entry of that kind that ends at `stop`."""
        return derive_kind_key(self.get_key(stop), kind)

    def draft_entry(self, kind: SnapshotKind, stop: int) -> CacheEntry:
        """Return an entry without its payload: of the chunk, or the beginning of one, that ends at `stop`."""
        index = (stop - 1) // self.chunk
        start = index * self.chunk
        parent = self.get_grid_key(index)
        return CacheEntry(self.get_entry_key(kind, stop), parent, kind, start, stop, self.ids[start:stop])
