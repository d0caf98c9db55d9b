"""Which record holds what: one radix tree of ids below each grid point, found by the point's key.

A whole chunk is found by its key alone; only in the chunk where a prompt ends, or parts from what is known,
are ids compared. So a search takes time linear in the prompt, however many records there are.
Where the model has deltas, every state is covered by one, and every delta's parent is there.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mlxrun.cache.content_keys import KeyChain
from mlxrun.cache.entry import CacheEntry, Key
from mlxrun.scheduler.step_plan import SnapshotKind


class RadixNode:
    """The end of an edge: `depth` tokens below the grid point, `ids` the last of them."""

    __slots__ = ("delta", "deltas", "depth", "down", "ended", "ids", "state", "up")

    def __init__(self, ids: array[int], depth: int, up: RadixNode | None) -> None:
        self.ids = ids
        self.depth = depth
        self.up = up
        self.down: dict[int, RadixNode] = {}
        self.delta: CacheEntry | None = None
        self.state: CacheEntry | None = None
        self.deltas = 0  # here and below
        self.ended = False  # some record ended here, if only before a longer one took its place

    def lineage(self) -> Iterator[RadixNode]:
        """This node and those above it, without the tree's root."""
        node = self
        while node.up is not None:
            yield node
            node = node.up


@dataclass(frozen=True, slots=True)
class RadixMatch:
    """What is there of a prompt's first `length` tokens. `whole`: a record ends right there."""

    length: int
    deltas: list[tuple[int, int, CacheEntry]]
    state: CacheEntry | None
    whole: bool

    @property
    def records(self) -> list[CacheEntry]:
        return [record for _, _, record in self.deltas] + ([self.state] if self.state else [])


def common(edge: array[int], ids: array[int], start: int, stop: int) -> int:
    """How many ids an edge shares with ids[start:stop]."""
    most = min(len(edge), stop - start)
    piece = ids[start : start + most]
    if edge[:most] == piece:
        return most
    return next(i for i in range(most) if edge[i] != piece[i])


class RadixIndex:
    """All records, of all tiers."""

    def __init__(self, root: Key, chunk: int, *, deltas: bool, states: bool) -> None:
        self.root = root
        self.chunk = chunk
        self.deltas = deltas
        self.states = states
        self.records: dict[Key, CacheEntry] = {}
        self.version = 0  # changes whenever records do
        self._trees: dict[Key, RadixNode] = {}
        self._nodes: dict[Key, RadixNode] = {}

    # -- search -----------------------------------------------------------------------------------------

    def match(self, chain: KeyChain, most: int, floor: Callable[[int], int]) -> RadixMatch | None:
        """The longest usable beginning, of at most `most` tokens, where `floor` allows it: it rounds a
        length down to one that is allowed."""
        most = min(most, len(chain))
        chunks, path, covered = self._covered(chain, most) if self.deltas else ([], [], most)
        state = self._last_state(chain, covered, floor) if self.states else None
        length = floor(covered) if not self.states else state.stop if state else 0
        if length <= 0:
            return None
        index, rest = divmod(length, self.chunk)
        deltas = [(record.start, record.stop, record) for record in chunks[:index]]
        if self.deltas and rest:
            record = chunks[index] if index < len(chunks) else _any_delta(path[-1])
            deltas.append((length - rest, length, record))
        return RadixMatch(length, deltas, state, self.states or not rest or self._ended(chain, length))

    def _covered(self, chain: KeyChain, most: int) -> tuple[list[CacheEntry], list[RadixNode], int]:
        """Whole chunks, then the way down the tree below the last of them, and the tokens of both."""
        chunks: list[CacheEntry] = []
        while (len(chunks) + 1) * self.chunk <= most:
            record = self.records.get(chain.grid(len(chunks) + 1))
            if record is None:
                break
            chunks.append(record)
        path, depth = self._walk(chain, len(chunks), most)
        return chunks, path, len(chunks) * self.chunk + depth

    def _walk(self, chain: KeyChain, index: int, stop: int) -> tuple[list[RadixNode], int]:
        """Down the tree of grid point `index`, not beyond token `stop`: the nodes, the last perhaps met in
        part only, and how many tokens they share with the prompt."""
        start = position = index * self.chunk
        stop = min(stop, start + self.chunk)
        path: list[RadixNode] = []
        node = self._trees.get(chain.grid(index))
        while node is not None and position < stop:
            node = node.down.get(chain.ids[position])
            if node is not None:
                path.append(node)
                shared = common(node.ids, chain.ids, position, stop)
                position += shared
                if shared < len(node.ids):
                    break
        return path, position - start

    def _last_state(self, chain: KeyChain, most: int, floor: Callable[[int], int]) -> CacheEntry | None:
        for index in range((most - 1) // self.chunk, -1, -1):
            path, depth = self._walk(chain, index, most)
            for node in reversed(path):
                state = node.state
                if state is not None and node.depth <= depth and floor(state.stop) == state.stop:
                    return state
        return None

    def states_of(self, chain: KeyChain, most: int) -> list[CacheEntry]:
        """The states of a prompt's first `most` tokens, the first one first."""
        found: list[CacheEntry] = []
        for index in range((most - 1) // self.chunk + 1):
            path, depth = self._walk(chain, index, most)
            found += [node.state for node in path if node.state is not None and node.depth <= depth]
        return found

    def _ended(self, chain: KeyChain, length: int) -> bool:
        path, depth = self._walk(chain, length // self.chunk, length)
        return bool(path) and path[-1].depth == depth and path[-1].ended

    # -- what rests on what -------------------------------------------------------------------------------

    def cover(self, record: CacheEntry) -> CacheEntry | None:
        """A delta that holds the record's tokens, and perhaps more."""
        chain = KeyChain(record.parent, self.chunk, record.ids)
        path, depth = self._walk(chain, 0, len(record.ids))
        return _any_delta(path[-1]) if depth == len(record.ids) and path[-1].deltas else None

    def reachable(self, record: CacheEntry) -> bool:
        """Whether all is there that a new record would rest on."""
        if not self.deltas:
            return True
        if record.parent != self.root and record.parent not in self.records:
            return False
        return record.part is SnapshotKind.DELTA or self.cover(record) is not None

    def ancestors(self, record: CacheEntry) -> Iterator[CacheEntry]:
        """The deltas that a record rests on, the last first."""
        above: CacheEntry | None = record
        if record.part is SnapshotKind.STATE:
            above = self.cover(record)
            if above is not None:
                yield above
        while above is not None and above.parent != self.root:
            above = self.records.get(above.parent)
            if above is not None:
                yield above

    # -- change -------------------------------------------------------------------------------------------

    def add(self, record: CacheEntry) -> list[CacheEntry]:
        """Enter a record; the deltas that are now a part of it, and not needed any more."""
        node = self._node(record)
        self.records[record.key] = record
        self._nodes[record.key] = node
        self.version += 1
        if record.part is SnapshotKind.STATE:
            node.state = record
            return []
        node.delta = record
        for above in node.lineage():
            above.deltas += 1
        above_it = (above.delta for above in node.lineage() if above is not node)
        return [part for part in above_it if part is not None]

    def mark(self, record: CacheEntry) -> None:
        """A record that is a part of another, and not entered, ends here."""
        self._node(record)

    def remove(self, record: CacheEntry) -> list[CacheEntry]:
        """Take a record out; those that rested on it, to be removed next."""
        node = self._nodes.pop(record.key)
        del self.records[record.key]
        self.version += 1
        orphans: list[CacheEntry] = []
        if record.part is SnapshotKind.STATE:
            node.state = None
        else:
            node.delta = None
            for above in node.lineage():
                above.deltas -= 1
                if not above.deltas and above.state is not None:
                    orphans.append(above.state)
            orphans += _all_records(self._trees.get(record.key))
        self._prune(record.parent, node)
        return orphans

    def _node(self, record: CacheEntry) -> RadixNode:
        """The node where a record ends, made if need be."""
        node = self._trees.setdefault(record.parent, RadixNode(array("q"), 0, None))
        ids, position = record.ids, 0
        while position < len(ids):
            child = node.down.get(ids[position])
            if child is None:
                child = node.down[ids[position]] = RadixNode(ids[position:], len(ids), node)
            shared = common(child.ids, ids, position, len(ids))
            node = child if shared == len(child.ids) else _split(child, shared)
            position += shared
        node.ended = True
        return node

    def _prune(self, parent: Key, node: RadixNode) -> None:
        """Undo what the node was made for."""
        while node.up is not None and not node.down and node.delta is None and node.state is None:
            del node.up.down[node.ids[0]]
            node = node.up
        if node.up is None:
            if not node.down:
                del self._trees[parent]
        elif len(node.down) == 1 and node.delta is None and node.state is None and not node.ended:
            (child,) = node.down.values()
            child.ids, child.up = node.ids + child.ids, node.up
            node.up.down[child.ids[0]] = child


def _any_delta(node: RadixNode) -> CacheEntry:
    while node.delta is None:
        node = next(child for child in node.down.values() if child.deltas)
    return node.delta


def _all_records(node: RadixNode | None) -> list[CacheEntry]:
    found: list[CacheEntry] = []
    nodes = [node] if node is not None else []
    while nodes:
        node = nodes.pop()
        found += [record for record in (node.delta, node.state) if record is not None]
        nodes += node.down.values()
    return found


def _split(child: RadixNode, shared: int) -> RadixNode:
    """A node inside an edge, after its first `shared` ids."""
    up = child.up
    assert up is not None
    middle = RadixNode(child.ids[:shared], child.depth - len(child.ids) + shared, up)
    middle.deltas = child.deltas
    up.down[middle.ids[0]] = middle
    child.ids, child.up = child.ids[shared:], middle
    middle.down[child.ids[0]] = child
    return middle
