"""The limits of API keys: requests at once, and requests and tokens in a minute.

A request counts in `max_concurrent` from its arrival, and in the requests of a minute once it is prepared. A
limit of a minute is a bucket that fills evenly. What was not used stays, up to that of a minute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from mlxrun.core.errors import RateLimited
from mlxrun.server.http.access import ApiKeys

_MINUTE = 60.0


@dataclass(slots=True)
class Bucket:
    """What is used of a limit. It may be more than the limit, as tokens are counted when they were used."""

    used: float = 0.0
    time: float = 0.0  # when that was computed

    def refill(self, limit: int | None, now: float) -> None:
        """Forgive what has been paid off since the last time. `limit`: of a minute; None forgives all."""
        paid = self.used if limit is None else (now - self.time) * limit / _MINUTE
        self.used, self.time = max(0.0, self.used - paid), now

    def add(self, amount: float, limit: int | None, now: float) -> None:
        """Count what was used. Without a limit nothing is to be paid off later."""
        self.refill(limit, now)
        self.used += 0.0 if limit is None else amount

    def compute_wait(self, limit: int, needed: float) -> float:
        """The seconds until `needed` more fit into the limit."""
        return max(0.0, self.used + needed - limit) * _MINUTE / limit


@dataclass(slots=True)
class KeyUsage:
    """What an API key uses."""

    running: int = 0
    requests: Bucket = field(default_factory=Bucket)
    tokens: Bucket = field(default_factory=Bucket)


class KeyLimits:
    """Counts the requests and tokens of each API key. The limits may change meanwhile."""

    def __init__(self, keys: ApiKeys, clock: Callable[[], float]) -> None:
        self._keys = keys
        self._clock = clock
        self._usage: dict[str, KeyUsage] = {}
        self._accepted: dict[str, ExitStack] = {}  # by the ids of requests

    @contextmanager
    def accept(self, request_id: str, name: str) -> Iterator[None]:
        """Count a request of the key of this name in `max_concurrent` while the block runs, unless something
        takes over. RateLimited if it is one too many."""
        if name not in self._keys.settings:  # the server has no keys, or this one is gone
            yield
            return
        most, usage = self._keys.settings[name].max_concurrent, self._usage.setdefault(name, KeyUsage())
        if most is not None and usage.running >= most:
            text = f"{usage.running} requests of the API key {name!r} are running (max_concurrent)"
            raise RateLimited(f"{text}: try again later")
        with ExitStack() as stack:
            stack.enter_context(self._occupy(name))
            self._accepted[request_id] = stack
            try:
                yield
            finally:
                del self._accepted[request_id]

    def take_over(self, request_id: str, name: str) -> ExitStack:
        """Return what an accepted request holds. From now on it is held by what outlives the request."""
        found = self._accepted.get(request_id)
        if found is not None:
            return found.pop_all()
        found = ExitStack()  # the request has ended already
        found.enter_context(self._occupy(name))
        return found

    @contextmanager
    def hold(self, name: str, parent: str = "") -> Iterator[None]:
        """Count a request of the key of this name in the limits of a minute. RateLimited if it is one too
        many. `parent`: the id of the accepted request, if this one outlives it."""
        if name not in self._keys.settings:
            yield
            return
        usage = self._usage.setdefault(name, KeyUsage())
        self._check(name, usage)
        usage.requests.add(1, self._keys.settings[name].requests_per_minute, self._clock())
        with self.take_over(parent, name) if parent else ExitStack():
            yield

    @contextmanager
    def _occupy(self, name: str) -> Iterator[None]:
        usage = self._usage.setdefault(name, KeyUsage())
        usage.running += 1
        try:
            yield
        finally:
            usage.running -= 1

    def count_tokens(self, name: str, tokens: int) -> None:
        """Count the tokens of a request that has ended."""
        if name in self._usage and name in self._keys.settings:
            limit = self._keys.settings[name].tokens_per_minute
            self._usage[name].tokens.add(tokens, limit, self._clock())

    def _check(self, name: str, usage: KeyUsage) -> None:
        limits, now = self._keys.settings[name], self._clock()
        for what, bucket, limit, needed in (
            ("requests_per_minute", usage.requests, limits.requests_per_minute, 1.0),
            ("tokens_per_minute", usage.tokens, limits.tokens_per_minute, 0.0),
        ):
            bucket.refill(limit, now)
            wait = 0.0 if limit is None else bucket.compute_wait(limit, needed)
            if wait > 0:
                text = f"the API key {name!r} has used its {limit} {what}: try again in {math.ceil(wait)} s"
                raise RateLimited(text, wait)
