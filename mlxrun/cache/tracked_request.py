"""What the prefix cache knows of a request from `open` to `close`, and what running requests will compute.

A keypoint is a position that others may have in common with a request: a grid point, one of its boundaries,
or the end of its prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mlxrun.cache.content_keys import KeyChain, content
from mlxrun.cache.entry import CacheEntry, Key
from mlxrun.scheduler.request import Request

LEAST = 64  # a keypoint off the grid before this one is not worth waiting for

Keypoint = tuple[int, Key]


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """One request. `chain` is made when it is first needed."""

    request: Request
    root: Key
    chunk: int
    grid_only: bool
    running: bool = False
    pins: list[CacheEntry] = field(default_factory=list)  # its hit
    state_at: int = 0  # where its last state was kept
    written_at: int = 0  # where its last record was written to disk
    checkpoints: list[tuple[CacheEntry, int]] = field(default_factory=list)  # states, and ticks when kept
    asked: set[Key] = field(default_factory=set)  # saves under way
    passed: int = 0  # what will be there once those are
    wanted: bool = False  # others wait for what it computes
    deferred: int = 0  # the prompt's end, if it is kept with the answer only
    matched: tuple[int, int, int] = (-1, 0, 0)  # version of the index and tokens known: tokens matched then
    _chain: KeyChain | None = None
    _points: tuple[int, list[Keypoint]] = (-1, [])

    @property
    def cacheable(self) -> bool:
        return len(self.request.spans) == len(self.request.digests)

    @property
    def chain(self) -> KeyChain:
        if self._chain is None:
            request = self.request
            self._chain = KeyChain(
                self.root, self.chunk, content(request.prompt, request.spans, request.digests)
            )
        return self._chain

    def know(self, output: Sequence[int]) -> None:
        """The answer so far."""
        self.chain.extend(output[len(self.chain) - len(self.request.prompt) :])

    def floor(self, length: int) -> int:
        """The longest length up to this one at which a hit may end: not inside an image."""
        while True:
            if self.grid_only:
                length -= length % self.chunk
            inside = [start for start, stop in self.request.spans if start < length < stop]
            if not inside:
                return length
            length = inside[0]

    @property
    def usable(self) -> int:
        """The longest hit that would be of use: a token is left to compute, as in scheduler/request_state.py."""
        known = len(self.chain)
        ends_in_image = any(start < known <= stop for start, stop in self.request.spans)
        return known if ends_in_image else known - 1

    def keypoints(self, most: int) -> list[Keypoint]:
        """All, up to `most` tokens."""
        if self._points[0] != most:
            points = set(range(self.chunk, most + 1, self.chunk))
            if not self.grid_only:
                points |= {at for at in (*self.request.boundaries, most) if LEAST <= at <= most}
            points = {at for at in points if self.floor(at) == at}
            self._points = most, [(at, self.chain.at(at)) for at in sorted(points)]
        return self._points[1]


class PlannedEntries:
    """The keypoints that running requests have before them."""

    def __init__(self) -> None:
        self._owners: dict[Key, set[str]] = {}
        self._points: dict[str, list[Keypoint]] = {}  # the nearest last

    def __bool__(self) -> bool:
        return bool(self._owners)

    def __contains__(self, key: object) -> bool:
        return key in self._owners

    def owners(self, key: Key) -> frozenset[str]:
        """The requests that are going to compute a keypoint."""
        return frozenset(self._owners.get(key, ()))

    def register(self, request_id: str, points: Iterable[Keypoint]) -> None:
        self.forget(request_id)
        left = sorted(points, reverse=True)
        if left:
            self._points[request_id] = left
        for _, key in left:
            self._owners.setdefault(key, set()).add(request_id)

    def passed(self, request_id: str, stop: int) -> None:
        """The request has computed so far, and it has been kept."""
        left = self._points.get(request_id, [])
        while left and left[-1][0] <= stop:
            self._disown(left.pop()[1], request_id)
        if not left:
            self._points.pop(request_id, None)

    def forget(self, request_id: str) -> None:
        """The request does not run any more."""
        for _, key in self._points.pop(request_id, []):
            self._disown(key, request_id)

    def _disown(self, key: Key, request_id: str) -> None:
        owners = self._owners[key]
        owners.discard(request_id)
        if not owners:
            del self._owners[key]
