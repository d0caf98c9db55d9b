"""Signals: the first SIGINT or SIGTERM ends the job in order, the second ends the process at once.

Work that may be cut short runs under `Stop.run`, which raises Interrupted; what must be whole does not.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from mlxrun.errors import MlxrunError

EXIT = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
T = TypeVar("T")


class Interrupted(MlxrunError):
    """The user stopped the job; it can be resumed."""

    exit_code = EXIT


class Stop:
    """Whether the job is to end, and the work that is cancelled when it is."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.requested = False
        self._say = say
        self._task: asyncio.Task[Any] | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals over while the job runs."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.request)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def request(self) -> None:
        """What a signal does."""
        if self.requested:
            os._exit(EXIT)  # records are whole in their files already; the next start needs nothing more
        self.requested = True
        self._say("stopping: nothing new is started, what is finished is kept (once more to stop at once)")
        if self._task is not None:
            self._task.cancel()

    def check(self) -> None:
        """Raise Interrupted if a signal came."""
        if self.requested:
            raise Interrupted("interrupted")

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`; a signal cancels it."""
        if self.requested:
            work.close()
            self.check()
        self._task = asyncio.ensure_future(work)
        try:
            return await self._task
        except (asyncio.CancelledError, MlxrunError):
            self.check()
            raise
        finally:
            self._task = None
