"""What the prefix cache knows of a request until it ends.

A cache position is one that other requests may share: a grid point, one of the request's `cache_positions`,
or the end of its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mlxrun.core.request import Request, build_content_ids, has_known_content, round_down
from mlxrun.engine.prefix_cache.entry import AdapterSalt, CacheEntry, Key, KeyChain
from mlxrun.engine.prefix_cache.entry_logprobs import LogprobBook
from mlxrun.engine.prefix_cache.radix_index import RadixIndex

MIN_CACHE_POSITION = 64  # a cache position off the grid before this one is not worth waiting for

CachePosition = tuple[int, Key]


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """One request. Its key chain is built when it is first needed."""

    request: Request
    root: Key
    chunk: int
    grid_only: bool
    running: bool = False
    pins: list[CacheEntry] = field(default_factory=list)  # the entries of its hit
    hit_length: int = 0  # tokens that it took from the cache when it began to run
    state_at: int = 0  # position of its last state
    written_at: int = 0  # position of its last entry that was to be written to disk
    interval_states: list[tuple[CacheEntry, int]] = field(
        default_factory=list
    )  # states, and their ticks then
    pending: set[Key] = field(default_factory=set)  # snapshots that were asked for and are not stored yet
    computed: int = 0  # position up to which others need not wait once those are stored
    awaited: bool = False  # others wait for what it computes
    deferred: int = 0  # the prompt's end, if it is stored together with the answer only
    matched: tuple[int, int, int] = (-1, 0, 0)  # version of the index, tokens known, tokens matched then
    waited_at: int = -MIN_CACHE_POSITION  # tokens matched when it last began to wait for another prompt
    waits_for: str = ""  # the request for whose prompt it waits, or waited last
    book: LogprobBook | None = None  # the logprobs of its prompt, if it wants them
    _salt: AdapterSalt = field(init=False)
    _chain: KeyChain | None = None
    _cache_positions: tuple[int, list[CachePosition]] = (-1, [])

    def __post_init__(self) -> None:
        self._salt = AdapterSalt(self.request.adapter and self.request.adapter.digest)
        if self.request.params.prompt_logprobs is not None:
            self.book = LogprobBook(self.request.prompt, self.request.image_spans)

    @property
    def cacheable(self) -> bool:
        """Whether the content of the prompt is known."""
        return has_known_content(self.request)

    @property
    def storable(self) -> bool:
        """Whether others may use what the request computes. After a gap, results differ from those of the
        whole prompt."""
        return not self.request.positions

    @property
    def num_before_gaps(self) -> int:
        """The number of tokens before the first one that is left out. Entries may hold them."""
        positions = self.request.positions
        return next((at for at, place in enumerate(positions) if at != place), len(self.request.prompt))

    @property
    def chain(self) -> KeyChain:
        if self._chain is None:
            request = self.request
            ids = build_content_ids(request.prompt, request.image_spans, request.image_digests)
            self._chain = KeyChain(self.root, self.chunk, self._salt.mix(ids, 0))
        return self._chain

    def extend(self, output: Sequence[int]) -> None:
        """Take in the answer so far."""
        new = output[len(self.chain) - len(self.request.prompt) :]
        self.chain.extend(self._salt.mix(new, len(self.chain)))

    def round_down(self, length: int) -> int:
        """Return the longest length, at most `length`, where a hit may end: not inside an image."""
        return round_down(length, self.request.image_spans, self.chunk if self.grid_only else 1)

    @property
    def longest_useful_hit(self) -> int:
        """The number of tokens of the longest useful hit. It leaves one to compute, as in
        request_state.py."""
        known = len(self.chain)
        ends_in_image = any(start < known <= stop for start, stop in self.request.image_spans)
        return known if ends_in_image else known - 1

    def match_length(self, index: RadixIndex) -> int:
        """The longest hit that the request would have now, while it waits."""
        version = index.version, len(self.chain)
        if self.matched[:2] != version:
            match = index.match(self.chain, self.longest_useful_hit, self.round_down)
            self.matched = *version, match.length if match else 0
        return self.matched[2]

    def can_use(self, owner: TrackedRequest, stop: int) -> bool:
        """Whether the request may wait for a running one to compute its first `stop` tokens. From the first
        wanted logprob on, it needs logprobs too, and entries store only the likeliest token. It does not wait
        for a less urgent request, which may get no share of the next steps."""
        urgency, others = ((r.background, r.priority) for r in (self.request, owner.request))
        if urgency < others:
            return False
        wanted = self.request.params.prompt_logprobs
        has_logprobs = wanted is None or (wanted <= 1 and owner.book is not None)
        return has_logprobs or stop < self.request.logprobs_from

    def may_wait_for(self, owner: TrackedRequest, matched: int, more: int) -> bool:
        """Whether the request shares `more` tokens behind the first `matched` ones with a running one, and
        waits for that now. It waits for a second request only if it had that many more by then. Otherwise a
        small cache would make requests run one at a time."""
        ids, other, stop = self.chain.ids, owner.chain.ids, matched + more
        is_new = owner.request.id != self.waits_for
        if is_new and matched < self.waited_at + more:
            return False
        if other[matched:stop] != ids[matched:stop] or other[:matched] != ids[:matched]:
            return False
        owner.awaited = True
        if is_new:
            self.waits_for, self.waited_at = owner.request.id, matched
        return True

    def list_cache_positions(self, limit: int) -> list[CachePosition]:
        """Return all cache positions up to `limit` tokens."""
        if self._cache_positions[0] != limit:
            points = set(range(self.chunk, limit + 1, self.chunk))
            if not self.grid_only:
                points |= {
                    at
                    for at in (*self.request.all_cache_positions, limit)
                    if MIN_CACHE_POSITION <= at <= limit
                }
            points = {at for at in points if self.round_down(at) == at}
            self._cache_positions = limit, [(at, self.chain.get_key(at)) for at in sorted(points)]
        return self._cache_positions[1]
