"""The limits of API keys over several models: the front counts requests, and their processes report the rest.

A request counts while it is relayed. A response in the background counts until its process reports its end.
Tokens count when a process reports them, at the end of a request.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from mlxrun.cluster.models.messages import BackgroundBegun, BackgroundEnded, KeyReport, TokensUsed
from mlxrun.server.http.access import ApiKeys
from mlxrun.server.http.key_limits import KeyLimits


class SharedLimits:
    """The limits of the front."""

    def __init__(self, limits: KeyLimits) -> None:
        self._limits = limits

    @contextmanager
    def hold(self, request_id: str, key: str) -> Iterator[None]:
        """Count a request of the key of this name while the block runs. RateLimited if it is one too many."""
        with self._limits.accept(request_id, key), self._limits.hold(key):
            yield

    @contextmanager
    def follow_process(self) -> Iterator[Callable[[KeyReport], None]]:
        """Yield what records the reports of a process. Its responses in the background end with the block."""
        background: dict[int, ExitStack] = {}

        def record(report: KeyReport) -> None:
            match report:
                case TokensUsed(key, tokens):
                    self._limits.count_tokens(key, tokens)
                case BackgroundBegun(key, request_id, number):
                    background[number] = self._limits.take_over(request_id, key)
                case BackgroundEnded(number):
                    background.pop(number).close()

        try:
            yield record
        finally:
            for stack in background.values():
                stack.close()


class LimitReporter(KeyLimits):
    """Stands in a process where a server has its limits: it reports what they count to the front."""

    def __init__(self, report: Callable[[KeyReport], None]) -> None:
        super().__init__(ApiKeys({}), time.monotonic)
        self._report = report
        self._numbers = itertools.count()

    @contextmanager
    def hold(self, name: str, parent: str = "") -> Iterator[None]:
        """Report that a response in the background runs within the block, if it is one."""
        if not name or not parent:
            yield
            return
        number = next(self._numbers)
        self._report(BackgroundBegun(name, parent, number))
        try:
            yield
        finally:
            self._report(BackgroundEnded(number))

    def count_tokens(self, name: str, tokens: int) -> None:
        """Report the tokens of a request that has ended."""
        if name:
            self._report(TokensUsed(name, tokens))
