"""Keeps the logprobs of prompts beside the entries of the prefix cache, and finds them again."""

from __future__ import annotations

from types import NoneType

from mlxrun.core.request import TokenLogprob
from mlxrun.core.step_plan import SnapshotKind
from mlxrun.engine.prefix_cache.containment import contain_failures
from mlxrun.engine.prefix_cache.entry import CacheEntry
from mlxrun.engine.prefix_cache.entry_logprobs import LogprobBook
from mlxrun.engine.prefix_cache.entry_store import EntryStore
from mlxrun.engine.prefix_cache.radix_index import RadixIndex
from mlxrun.engine.prefix_cache.tracked_request import TrackedRequest


class LogprobKeeper:
    """Stores and finds the logprobs of prompts. `grid_only`: see PrefixCache."""

    def __init__(self, index: RadixIndex, store: EntryStore, grid_only: bool) -> None:
        self._index = index
        self._store = store
        self._grid_only = grid_only

    def find_prompt_logprobs(self, tracked: TrackedRequest, start: int) -> list[TokenLogprob]:
        """Return the known logprobs of a prompt from `start` on, up to the first unknown one. Entries store
        only the likeliest token, so a request that wants more finds nothing."""
        wanted = tracked.request.params.prompt_logprobs
        if tracked.book is None or wanted is None or wanted > 1:
            return []
        overlaps = self.list_overlaps(tracked)
        for entry, matched in overlaps:
            if entry.logprobs is not None:
                tracked.book.take(entry.logprobs, matched)
        self._store.touch([entry for entry, _ in overlaps[-1:]], True)
        return tracked.book.read(start)

    @contain_failures(NoneType)
    def add_new_logprobs(self, tracked: TrackedRequest) -> None:
        """Store new logprobs of a prompt beside the entries of its tokens."""
        book = tracked.book
        if book is not None and book.changed and tracked.cacheable:
            book.changed = False
            for entry, matched in self.list_overlaps(tracked):
                self.add_logprobs(entry, book, matched)

    def add_logprobs(self, entry: CacheEntry, book: LogprobBook | None, matched: int) -> None:
        """Store a prompt's logprobs in an entry, or a planned one, whose tokens equal the prompt's up to
        position `matched`. An entry's file is written again if it lacked logprobs and its payload is in
        memory."""
        is_state = entry.kind is SnapshotKind.STATE
        if book is None or (is_state and self._index.has_deltas):  # the deltas of the state have them
            return
        first = 0 if is_state else entry.start
        new = book.make_logprobs(first, entry.stop, matched)
        if new is None:
            return
        old = entry.logprobs
        entry.logprobs = new if old is None else old.merge(new)
        has_more = entry.logprobs is not old and (old is None or not old.complete)
        if has_more and entry.in_tier and entry.payload is not None:
            entry.in_tier = False
            try:
                self._store.write(entry)
            finally:
                entry.in_tier = True  # if the new file is refused, the old one is still there

    def list_overlaps(self, tracked: TrackedRequest) -> list[tuple[CacheEntry, int]]:
        """The entries that may have logprobs of a prompt. Where prompts are computed on the grid only, its
        last token is in no full chunk. The chunk of a longer prompt is then of no use."""
        limit = len(tracked.request.prompt) - int(self._grid_only)
        return self._index.list_overlaps(tracked.chain, limit, self._grid_only)
