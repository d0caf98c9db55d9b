"""Names of content: equal ids mean equal content, and a key names all content up to a position.

Positions are cut by a grid of `chunk` tokens. The key of a grid point is made of the key of the one before
and the ids between; a position off the grid hangs on the last grid point before it in the same way. A DELTA
that ends at a position has that key, a STATE one derived from it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from mlxrun.cache.entry import CacheEntry, Key
from mlxrun.scheduler.step_plan import SnapshotKind

WORDS = 8  # ids that one hash yields
LOW = (1 << 63) - 1


def digest(*parts: bytes) -> Key:
    return blake2b(b"".join(parts), digest_size=16).digest()


def content(tokens: Sequence[int], spans: Sequence[tuple[int, int]], digests: Sequence[bytes]) -> array[int]:
    """Token ids, where an image's are replaced by negative numbers made of its digest.

    ValueError if the images are not all named: such a prompt matches nothing.
    """
    if len(spans) != len(digests):
        raise ValueError(f"{len(spans)} image spans, but {len(digests)} digests")
    ids = array("q", tokens)
    for (start, stop), what in zip(spans, digests, strict=True):
        ids[start:stop] = _image(what, ids[start:stop])
    return ids


def _image(what: bytes, tokens: array[int]) -> array[int]:
    """As many ids as the image has tokens; the tokens count too, should one image be laid out in two ways."""
    seed = digest(digest(what), tokens.tobytes())
    blocks = range(-(-len(tokens) // WORDS))
    words = array("q")
    words.frombytes(b"".join(blake2b(seed + i.to_bytes(8, "little")).digest() for i in blocks))
    return array("q", [-1 - (word & LOW) for word in words[: len(tokens)]])


def part_key(key: Key, part: SnapshotKind) -> Key:
    """The key of the record of that part which ends where `key` does."""
    return key if part is SnapshotKind.DELTA else digest(b"state", key)


def record_key(record: CacheEntry) -> Key:
    """What a record's key has to be."""
    return part_key(digest(record.parent, record.ids.tobytes()), record.part)


class KeyChain:
    """The keys of one growing sequence, each computed when it is first asked for."""

    def __init__(self, root: Key, chunk: int, ids: array[int]) -> None:
        self.chunk = chunk
        self.ids = ids
        self._grid = [root]
        self._between: dict[int, Key] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def extend(self, tokens: Sequence[int]) -> None:
        """Answer tokens, which are their own ids."""
        self.ids.extend(tokens)

    def grid(self, index: int) -> Key:
        """The key after `index` whole chunks."""
        while len(self._grid) <= index:
            start = (len(self._grid) - 1) * self.chunk
            piece = self.ids[start : start + self.chunk]
            if len(piece) < self.chunk:
                raise IndexError(f"{len(self)} ids have no grid point {index}")
            self._grid.append(digest(self._grid[-1], piece.tobytes()))
        return self._grid[index]

    def at(self, stop: int) -> Key:
        """The key after `stop` ids."""
        index, rest = divmod(stop, self.chunk)
        if not rest:
            return self.grid(index)
        if stop not in self._between:
            self._between[stop] = digest(self.grid(index), self.ids[stop - rest : stop].tobytes())
        return self._between[stop]

    def key(self, part: SnapshotKind, stop: int) -> Key:
        """The key of the record of that part that ends at `stop`."""
        return part_key(self.at(stop), part)

    def draft(self, part: SnapshotKind, stop: int) -> CacheEntry:
        """A record without its payload: of the chunk, or the part of one, that ends at `stop`."""
        index = (stop - 1) // self.chunk
        start = index * self.chunk
        return CacheEntry(self.key(part, stop), self.grid(index), part, start, stop, self.ids[start:stop])
