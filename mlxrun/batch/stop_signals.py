"""Signals: the first SIGINT or SIGTERM ends the job in order, the second ends the process at once.

Where a process does more than one job, the job listens to no signals and ends only itself. Work that may be
cut short runs under `Stop.run`, which raises Interrupted; what must be whole does not.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from mlxrun.errors import MlxrunError

EXIT = 130
GRACE = 5.0  # seconds that cancelled work may take to let go
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
log = logging.getLogger(__name__)
T = TypeVar("T")


class Interrupted(MlxrunError):
    """The user stopped the job; it can be resumed."""

    exit_code = EXIT


class StopSignals:
    """Whether the job is to end, and the work that is cancelled when it is.

    `process`: whether the job is all that this process does, so that signals are its own.
    """

    def __init__(self, say: Callable[[str], None], *, process: bool = True) -> None:
        self._say = say
        self._process = process
        self._asked = asyncio.Event()
        self._stuck = False

    @property
    def process(self) -> bool:
        """Whether the job is all that this process does."""
        return self._process

    @property
    def requested(self) -> bool:
        """Whether a signal came, or `request` was called."""
        return self._asked.is_set()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals over while the job runs."""
        if not self._process:
            yield
            return
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
        if self.requested and self._process:
            os._exit(EXIT)  # records are whole in their files already; the next start needs nothing more
        self._asked.set()
        again = " (once more to stop at once)" if self._process else ""
        self._say(f"stopping: nothing new is started, what is finished is kept{again}")

    def check(self) -> None:
        """Raise Interrupted if a signal came."""
        if self.requested:
            raise Interrupted("interrupted")

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`; a signal cancels it."""
        task = asyncio.create_task(work)
        asked = asyncio.create_task(self._asked.wait())
        try:
            await asyncio.wait((task, asked), return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not self.requested:
                return task.result()
            await self._cancel(task)
            raise Interrupted("interrupted")
        finally:
            asked.cancel()
            task.cancel()

    async def patient(self, work: Coroutine[Any, Any, None]) -> None:
        """Await work that ends things; once a signal came it may take GRACE seconds."""
        task = asyncio.create_task(work)
        if not self.requested:
            await task
        elif (await asyncio.wait((task,), timeout=GRACE))[1]:
            self._stuck = True

    def leave_if_stuck(self) -> None:
        """End the process if something does not let itself be cancelled, such as the loading of a model."""
        if self._stuck and self._process:
            self._say("interrupted; the engine was busy and is cut off")
            os._exit(EXIT)

    async def _cancel(self, task: asyncio.Task[Any]) -> None:
        task.cancel()
        if (await asyncio.wait((task,), timeout=GRACE))[1]:
            self._stuck = True
        elif not task.cancelled() and task.exception() is not None:
            log.debug("while stopping: %r", task.exception())
