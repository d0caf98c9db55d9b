"""Decides which waiting requests wait for a running one that computes what they need next.

A request waits for a cache position that a running one will have stored. Where hits may end anywhere, it also
waits for the beginning of a running prompt. One that wants logprobs waits for a running request with logprobs
that is about to end. Such prompts often diverge at a place that is not known beforehand, such as the choices
of a question.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mlxrun.engine.prefix_cache.entry import Key
from mlxrun.engine.prefix_cache.radix_index import RadixIndex
from mlxrun.engine.prefix_cache.tracked_request import MIN_CACHE_POSITION, CachePosition, TrackedRequest

MIN_SHARED = 16  # tokens: what a request that waits for another one's logprobs must share with it at least


class PrefixWaiting:
    """The running requests, and the cache positions that each will compute. `grid_only`: see PrefixCache."""

    def __init__(self, index: RadixIndex, grid_only: bool) -> None:
        self._index = index
        # Hits end on the grid, or where the model has a state, and not where prompts diverge.
        self._has_fixed_ends = grid_only or index.has_states
        self._owners: dict[Key, set[TrackedRequest]] = {}  # by the key of a position
        self._points: dict[TrackedRequest, list[CachePosition]] = {}  # the nearest last
        self._ending: dict[TrackedRequest, None] = {}  # with logprobs, and they end with their prompt

    def add(self, tracked: TrackedRequest, points: Iterable[CachePosition]) -> None:
        """Note a request that begins to run, and the cache positions that it will compute."""
        remaining = sorted(points, reverse=True)
        if remaining:
            self._points[tracked] = remaining
        for _, key in remaining:
            self._owners.setdefault(key, set()).add(tracked)
        if tracked.book is not None and tracked.request.params.max_tokens <= 1 and not self._has_fixed_ends:
            self._ending[tracked] = None

    def mark_computed(self, tracked: TrackedRequest, stop: int) -> None:
        """Note that a request has computed and stored its cache positions up to `stop`."""
        remaining = self._points.get(tracked, [])
        while remaining and remaining[-1][0] <= stop:
            self._remove_owner(remaining.pop()[1], tracked)
        if not remaining:
            self._points.pop(tracked, None)

    def remove(self, tracked: TrackedRequest) -> None:
        """Remove a request that no longer runs."""
        self._ending.pop(tracked, None)
        for _, key in self._points.pop(tracked, []):
            self._remove_owner(key, tracked)

    def _remove_owner(self, key: Key, tracked: TrackedRequest) -> None:
        owners = self._owners[key]
        owners.discard(tracked)
        if not owners:
            del self._owners[key]

    def should_wait(self, tracked: TrackedRequest) -> bool:
        """Whether a running request computes what this waiting request needs next."""
        if self._owners and self._waits_for_position(tracked):
            return True
        if self._has_fixed_ends:
            return False
        return self._waits_for_prompt(tracked) if tracked.book is None else self._waits_for_logprobs(tracked)

    def _waits_for_position(self, tracked: TrackedRequest) -> bool:
        points = tracked.list_cache_positions(tracked.longest_useful_hit)
        if not any(key in self._owners for _, key in points):
            return False
        matched = tracked.match_length(self._index)
        for stop, key in points:
            if stop > matched:
                owners = [each for each in self._owners.get(key, ()) if tracked.can_use(each, stop)]
                for owner in owners:
                    owner.awaited = True
                if owners:
                    return True
                # A delta is of no use without those before it; a state is.
                if stop % self._index.chunk == 0 and not self._index.has_states:
                    return False
        return False

    def _waits_for_prompt(self, tracked: TrackedRequest) -> bool:
        """Whether a running prompt begins with what the request needs next, such as the same examples, and
        both part where nobody knew beforehand."""
        if not self._points:
            return False
        matched = tracked.match_length(self._index)
        stop = matched + MIN_CACHE_POSITION
        return stop <= tracked.longest_useful_hit and any(
            tracked.can_use(owner, stop) and tracked.may_wait_for(owner, matched, MIN_CACHE_POSITION)
            for owner in self.list_owners(stop)
        )

    def list_owners(self, stop: int) -> Iterator[TrackedRequest]:
        """Yield the requests that will compute the tokens before `stop`, or more."""
        return (tracked for tracked, points in self._points.items() if points[0][0] >= stop)

    def _waits_for_logprobs(self, tracked: TrackedRequest) -> bool:
        """Whether a running request that is about to end shares more with this one than the cache does. What
        it computes may be there before its logprobs are known. So of a wanted logprob, only what it found
        when it began counts as matched."""
        if not self._ending:
            return False
        matched = tracked.match_length(self._index)
        without_logprobs = max(tracked.request.logprobs_from, 1) - 1
        for owner in self._ending:
            usable = min(matched, max(owner.hit_length, without_logprobs))
            stop = usable + MIN_SHARED
            if stop > tracked.longest_useful_hit or not tracked.can_use(owner, stop):
                continue
            if tracked.may_wait_for(owner, usable, MIN_SHARED):
                return True
        return False
