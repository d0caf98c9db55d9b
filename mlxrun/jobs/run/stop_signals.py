"""The first SIGINT or SIGTERM ends the job in order. The second ends the process at once, also after the job.

In a server, a job handles no signals and ends only itself. Work that may be cancelled runs under
`StopSignals.run`, which raises Interrupted; work that must be completed does not.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from mlxrun.core.errors import MlxrunError
from mlxrun.core.workers import Abandoned, LaneJob, finishes_before

EXIT = 130
GRACE = 5.0  # seconds that cancelled work may take to end
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
log = logging.getLogger(__name__)
T = TypeVar("T")


class Interrupted(MlxrunError):
    """The user stopped the job; it can be resumed."""

    exit_code = EXIT


class StopSignals:
    """Knows whether the job must end, and then cancels its work. `owns_process`: the process runs only this
    job, so signals are for it and a user is reading."""

    def __init__(self, say: Callable[[str], None], *, owns_process: bool = True) -> None:
        self._say = say
        self.owns_process = owns_process
        self._requested = asyncio.Event()
        self._work = LaneJob()
        self._stuck = False
        self._handling = False

    @property
    def requested(self) -> bool:
        """Whether a signal came, or `request` was called."""
        return self._requested.is_set()

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Handle the signals while the job runs. Jobs that follow one another may nest this in an outer
        block, so that no signal is missed between them."""
        if not self.owns_process or self._handling:
            yield
            return
        loop = asyncio.get_running_loop()
        earlier = {number: signal.getsignal(number) for number in _SIGNALS}
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.request)
        self._handling = True
        try:
            yield
        finally:
            self._handling = False
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_DFL if self.requested else earlier[number])

    def request(self) -> None:
        """Stop the job, as a signal does. A second call ends the process if the job owns it."""
        if self.requested and self.owns_process:
            os._exit(EXIT)  # all written records are complete; the next start needs no more
        self._requested.set()
        self._work.abandon()
        again = " (press Ctrl-C again to stop immediately)" if self.owns_process else ""
        self._say(f"stopping: no new lines are started, finished lines are kept{again}")

    def check(self) -> None:
        """Raise Interrupted if a signal came."""
        if self.requested:
            raise Interrupted("interrupted")

    @contextmanager
    def end_by(self, kill: Callable[[], None]) -> Iterator[None]:
        """Call `kill` if a signal comes during the block, from any thread. Interrupted if one came."""
        try:
            with self._work.end_by(kill):
                yield
        except Abandoned as error:
            raise Interrupted("interrupted") from error
        self.check()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`; a signal cancels it and raises Interrupted."""
        task = asyncio.create_task(work)
        try:
            if await finishes_before(task, self._requested.wait()) and not self.requested:
                return task.result()
            await self._cancel(task)
            raise Interrupted("interrupted")
        finally:
            task.cancel()

    async def run_cleanup(self, work: Coroutine[Any, Any, None]) -> None:
        """Await work that closes resources. After a signal it may take GRACE seconds."""
        task = asyncio.create_task(work)
        if not self.requested:
            await task
        elif (await asyncio.wait((task,), timeout=GRACE))[1]:
            self._stuck = True

    def exit_if_stuck(self) -> None:
        """End the process if some work could not be cancelled, such as the loading of a model."""
        if self._stuck and self.owns_process:
            self._say("interrupted; the engine was busy and has been killed")
            os._exit(EXIT)

    async def _cancel(self, task: asyncio.Task[Any]) -> None:
        task.cancel()
        if (await asyncio.wait((task,), timeout=GRACE))[1]:
            self._stuck = True
        elif not task.cancelled() and task.exception() is not None:
            log.debug("while stopping: %r", task.exception())
