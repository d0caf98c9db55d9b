"""The index of entries by content: one radix tree of ids below each grid point, found by its key.

A full chunk is found by its key alone. Ids are compared only in the chunk where a prompt ends or diverges. So
a search takes time linear in the prompt, however many entries there are.

If the model has deltas, every state is covered by a delta, and the parent of every delta is in the index.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from mlxrun.core.step_plan import SnapshotKind
from mlxrun.engine.prefix_cache.entry import CacheEntry, Key, KeyChain

RoundDown = Callable[[int], int]
MAX_OVERLAPS = 16  # branches of a chunk that are searched for one with logprobs


@dataclass(slots=True, eq=False)
class RadixNode:
    """The end of an edge, `depth` tokens below the grid point. `ids`: the edge's ids, the last ones of these
    tokens."""

    ids: array[int]
    depth: int
    parent: RadixNode | None
    children: dict[int, RadixNode] = field(default_factory=dict)
    delta: CacheEntry | None = None
    state: CacheEntry | None = None
    delta_count: int = 0  # here and below
    is_end: bool = False  # an entry ended here, if only before a longer one replaced it

    def walk_up(self) -> Iterator[RadixNode]:
        """Yield this node and those above it, without the tree's root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


@dataclass(frozen=True, slots=True)
class RadixMatch:
    """The entries of a prompt's first `length` tokens. The last delta may have more. `ends_entry`: an entry
    ends at `length`."""

    length: int
    deltas: list[CacheEntry]
    state: CacheEntry | None
    ends_entry: bool

    @property
    def entries(self) -> list[CacheEntry]:
        return self.deltas + ([self.state] if self.state else [])


def count_common_ids(edge: array[int], ids: array[int], start: int, stop: int) -> int:
    """Return how many ids an edge shares with ids[start:stop]."""
    limit = min(len(edge), stop - start)
    other = ids[start : start + limit]
    if edge[:limit] == other:
        return limit
    return next(i for i in range(limit) if edge[i] != other[i])


class RadixIndex:
    """All entries, in memory and in the tier. `has_deltas`, `has_states`: the kinds that the model has."""

    def __init__(self, root: Key, chunk: int, *, has_deltas: bool, has_states: bool) -> None:
        self.root = root
        self.chunk = chunk
        self.has_deltas = has_deltas
        self.has_states = has_states
        self.entries: dict[Key, CacheEntry] = {}
        self.version = 0  # changes whenever the entries do
        self._trees: dict[Key, RadixNode] = {}
        self._nodes: dict[Key, RadixNode] = {}

    def __contains__(self, entry: CacheEntry) -> bool:
        return self.entries.get(entry.key) is entry

    # -- search -----------------------------------------------------------------------------------------

    def match(self, chain: KeyChain, limit: int, round_down: RoundDown) -> RadixMatch | None:
        """Return the longest usable match of at most `limit` tokens. `round_down` rounds a length down to one
        where a match may end."""
        limit = min(limit, len(chain))
        chunks, path, covered = self._match_deltas(chain, limit) if self.has_deltas else ([], [], limit)
        state = self._find_last_state(chain, covered, round_down) if self.has_states else None
        length = round_down(covered) if not self.has_states else state.stop if state else 0
        if length <= 0:
            return None
        index, rest = divmod(length, self.chunk)
        deltas = chunks[:index]
        if self.has_deltas and rest:
            deltas.append(chunks[index] if index < len(chunks) else _find_delta(path[-1]))
        ends_entry = self.has_states or not rest or self._is_end(chain, length)
        return RadixMatch(length, deltas, state, ends_entry)

    def _match_deltas(self, chain: KeyChain, limit: int) -> tuple[list[CacheEntry], list[RadixNode], int]:
        """Return the full chunks, the path down the tree below the last one, and the tokens of both."""
        chunks: list[CacheEntry] = []
        while (len(chunks) + 1) * self.chunk <= limit:
            entry = self.entries.get(chain.get_grid_key(len(chunks) + 1))
            if entry is None:
                break
            chunks.append(entry)
        path, depth = self._walk_down(chain, len(chunks), limit)
        return chunks, path, len(chunks) * self.chunk + depth

    def _walk_down(self, chain: KeyChain, index: int, stop: int) -> tuple[list[RadixNode], int]:
        """Walk down the tree of grid point `index`, at most to token `stop`. Return the nodes, of which the
        last may match in part only, and how many tokens they share with the prompt."""
        start = position = index * self.chunk
        stop = min(stop, start + self.chunk)
        path: list[RadixNode] = []
        node = self._trees.get(chain.get_grid_key(index))
        while node is not None and position < stop:
            node = node.children.get(chain.ids[position])
            if node is not None:
                path.append(node)
                shared = count_common_ids(node.ids, chain.ids, position, stop)
                position += shared
                if shared < len(node.ids):
                    break
        return path, position - start

    def _find_last_state(self, chain: KeyChain, limit: int, round_down: RoundDown) -> CacheEntry | None:
        for index in range((limit - 1) // self.chunk, -1, -1):
            path, depth = self._walk_down(chain, index, limit)
            for node in reversed(path):
                state = node.state
                if state is not None and node.depth <= depth and round_down(state.stop) == state.stop:
                    return state
        return None

    def find_states(self, chain: KeyChain, limit: int) -> list[CacheEntry]:
        """Return the states of a prompt's first `limit` tokens, in order of position."""
        states: list[CacheEntry] = []
        for index in range((limit - 1) // self.chunk + 1):
            path, depth = self._walk_down(chain, index, limit)
            states += [node.state for node in path if node.state is not None and node.depth <= depth]
        return states

    def list_overlaps(self, chain: KeyChain, limit: int, whole_only: bool) -> list[tuple[CacheEntry, int]]:
        """Return the entries with logprobs of a prompt's first `limit` tokens. Each comes with the position
        up to which its tokens equal the prompt's. `whole_only`: entries of full chunks."""
        if not self.has_deltas:  # then states have the logprobs of all tokens before them
            return [(state, state.stop) for state in self.find_states(chain, limit)]
        chunks, path, covered = self._match_deltas(chain, min(limit, len(chain)))
        found = [(entry, entry.stop) for entry in chunks]
        if path and not whole_only:
            below = list(itertools.islice(_iterate_deltas(path[-1]), MAX_OVERLAPS))
            complete = [entry for entry in below if entry.logprobs is not None and entry.logprobs.complete]
            found += [(entry, covered) for entry in [*complete, *below][:1]]
        return found

    def _is_end(self, chain: KeyChain, length: int) -> bool:
        path, depth = self._walk_down(chain, length // self.chunk, length)
        return bool(path) and path[-1].depth == depth and path[-1].is_end

    # -- dependencies -----------------------------------------------------------------------------------

    def find_cover(self, entry: CacheEntry) -> CacheEntry | None:
        """Return a delta that holds the entry's tokens, and perhaps more."""
        chain = KeyChain(entry.parent, self.chunk, entry.ids)
        path, depth = self._walk_down(chain, 0, len(entry.ids))
        return _find_delta(path[-1]) if depth == len(entry.ids) and path[-1].delta_count else None

    def fits(self, entry: CacheEntry) -> bool:
        """Whether the model has entries of this kind, and this one is on the grid."""
        known = self.has_deltas if entry.kind is SnapshotKind.DELTA else self.has_states
        on_grid = entry.start % self.chunk == 0 and 0 < entry.stop - entry.start <= self.chunk
        return known and on_grid and (entry.parent == self.root) == (entry.start == 0)

    def is_reachable(self, entry: CacheEntry) -> bool:
        """Whether the index has all that a new entry would depend on."""
        if not self.has_deltas:
            return True
        if entry.parent != self.root and entry.parent not in self.entries:
            return False
        return entry.kind is SnapshotKind.DELTA or self.find_cover(entry) is not None

    def iterate_ancestors(self, entry: CacheEntry) -> Iterator[CacheEntry]:
        """Yield the deltas that an entry depends on, the last first."""
        above: CacheEntry | None = entry
        if entry.kind is SnapshotKind.STATE:
            above = self.find_cover(entry)
            if above is not None:
                yield above
        while above is not None and above.parent != self.root:
            above = self.entries.get(above.parent)
            if above is not None:
                yield above

    # -- changes ----------------------------------------------------------------------------------------

    def add(self, entry: CacheEntry) -> list[CacheEntry]:
        """Add an entry. Return the deltas that it contains and that are no longer needed."""
        node = self._make_node(entry)
        self.entries[entry.key] = entry
        self._nodes[entry.key] = node
        self.version += 1
        if entry.kind is SnapshotKind.STATE:
            node.state = entry
            return []
        node.delta = entry
        for above in node.walk_up():
            above.delta_count += 1
        return [above.delta for above in node.walk_up() if above is not node and above.delta is not None]

    def mark_end(self, entry: CacheEntry) -> None:
        """Note the end of an entry that is not added, because another one contains it."""
        self._make_node(entry)

    def remove(self, entry: CacheEntry) -> list[CacheEntry]:
        """Remove an entry. Return those that depended on it; the caller must remove them next."""
        node = self._nodes.pop(entry.key)
        del self.entries[entry.key]
        self.version += 1
        orphans: list[CacheEntry] = []
        if entry.kind is SnapshotKind.STATE:
            node.state = None
        else:
            node.delta = None
            for above in node.walk_up():
                above.delta_count -= 1
                if not above.delta_count and above.state is not None:
                    orphans.append(above.state)
            orphans += _collect_entries(self._trees.get(entry.key))
        self._prune(entry.parent, node)
        return orphans

    def _make_node(self, entry: CacheEntry) -> RadixNode:
        """Return the node where an entry ends; it is created if there is none."""
        node = self._trees.setdefault(entry.parent, RadixNode(array("q"), 0, None))
        ids, position = entry.ids, 0
        while position < len(ids):
            child = node.children.get(ids[position])
            if child is None:
                child = node.children[ids[position]] = RadixNode(ids[position:], len(ids), node)
            shared = count_common_ids(child.ids, ids, position, len(ids))
            node = child if shared == len(child.ids) else _split(child, shared)
            position += shared
        node.is_end = True
        return node

    def _prune(self, tree: Key, node: RadixNode) -> None:
        """Remove a node that holds no entry any more, with those above it that only led to it."""
        while node.parent is not None and not node.children and node.delta is None and node.state is None:
            del node.parent.children[node.ids[0]]
            node = node.parent
        if node.parent is None:
            if not node.children:
                del self._trees[tree]
        elif len(node.children) == 1 and node.delta is None and node.state is None and not node.is_end:
            (child,) = node.children.values()
            child.ids, child.parent = node.ids + child.ids, node.parent
            node.parent.children[child.ids[0]] = child


def _find_delta(node: RadixNode) -> CacheEntry:
    """Return a delta at this node or below it."""
    return next(_iterate_deltas(node))


def _iterate_deltas(node: RadixNode) -> Iterator[CacheEntry]:
    """Yield the deltas at this node and below it."""
    nodes = [node]
    while nodes:
        node = nodes.pop()
        if node.delta is not None:
            yield node.delta
        nodes += [child for child in node.children.values() if child.delta_count]


def _collect_entries(node: RadixNode | None) -> list[CacheEntry]:
    """Return all entries at this node and below it."""
    entries: list[CacheEntry] = []
    nodes = [node] if node is not None else []
    while nodes:
        node = nodes.pop()
        entries += [entry for entry in (node.delta, node.state) if entry is not None]
        nodes += node.children.values()
    return entries


def _split(child: RadixNode, shared: int) -> RadixNode:
    """Insert a node into the edge of `child`, after its first `shared` ids."""
    parent = child.parent
    assert parent is not None
    middle = RadixNode(child.ids[:shared], child.depth - len(child.ids) + shared, parent)
    middle.delta_count = child.delta_count
    parent.children[middle.ids[0]] = middle
    child.ids, child.parent = child.ids[shared:], middle
    middle.children[child.ids[0]] = child
    return middle
