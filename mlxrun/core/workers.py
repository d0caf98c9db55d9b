"""Runs slow work on worker threads, so that short requests do not wait behind it.

Each kind of work has a lane with few threads. Work that nobody waits for is abandoned: it is dropped before
it starts, or it ends where it calls `check_abandoned`.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property, partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

LONG_TEXT = 100_000  # characters: some 50 ms of tokenizing
HUGE_TEXT = 1_000_000  # characters: half a second and 150 MB
_CPUS = os.cpu_count() or 1


class Abandoned(Exception):
    """Nobody waits for this work."""


class LaneJob:
    """One call of a lane. It knows whether the call is abandoned, and which callbacks end it then."""

    def __init__(self) -> None:
        self.abandoned = False
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def abandon(self) -> None:
        with self._lock:
            self.abandoned = True
            for callback in self._callbacks:
                callback()

    @contextmanager
    def end_by(self, callback: Callable[[], None]) -> Iterator[None]:
        """Call the callback if the job is abandoned within the block."""
        with self._lock:
            if self.abandoned:
                raise Abandoned
            self._callbacks.append(callback)
        try:
            yield
        finally:
            with self._lock:
                self._callbacks.remove(callback)


_job: contextvars.ContextVar[LaneJob | None] = contextvars.ContextVar("job", default=None)


def check_abandoned() -> None:
    """Raise Abandoned if the caller of the lane was cancelled."""
    job = _job.get()
    if job is not None and job.abandoned:
        raise Abandoned


@contextmanager
def end_by(callback: Callable[[], None]) -> Iterator[None]:
    """Within the block, call the callback if the lane's job is abandoned. Raises Abandoned if it was, before
    or meanwhile."""
    job = _job.get()
    with nullcontext() if job is None else job.end_by(callback):
        yield
    check_abandoned()


class Lane:
    """Worker threads for one kind of work. They start with the first call."""

    def __init__(self, name: str, threads: int) -> None:
        self.threads = threads
        self._name = name

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.threads, self._name)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of a function that a thread of the lane runs. If the caller is cancelled, the work is
        abandoned. The cancellation takes effect once its thread is free, so that its resources can be
        released."""
        job, context = LaneJob(), contextvars.copy_context()
        context.run(_job.set, job)
        future = self._pool.submit(partial(context.run, function, *args, **kwargs))
        result = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            job.abandon()
            if not future.cancel():
                result.add_done_callback(ignore_error)
                await wait_until_done(result)
            raise


async def wait_until_done(future: asyncio.Future[Any]) -> None:
    """Wait until a future is done, however often the caller is cancelled meanwhile."""
    while not future.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait((future,))


async def run_together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all coroutines. If one fails, the others are cancelled and its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except BaseExceptionGroup as errors:
        raise find_first_error(errors) from errors
    return [task.result() for task in tasks]


async def finishes_before(task: asyncio.Future[Any], other: Awaitable[Any]) -> bool:
    """Wait for either, and return whether the task is done. The wait for the other one ends with the call."""
    waiting = asyncio.ensure_future(other)
    try:
        await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    return task.done()


def find_first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first exception of a group that is not a group itself."""
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found


def ignore_error(result: asyncio.Future[Any]) -> None:
    """A callback for a future that nobody waits for: asyncio would log its error."""
    if not result.cancelled():
        result.exception()


LONG_TEXTS = Lane("long-texts", max(1, min(4, _CPUS // 2)))
HUGE_TEXTS = Lane("huge-texts", max(1, min(4, _CPUS // 4)))
GRAMMARS = Lane("grammars", max(1, min(4, _CPUS // 4)))  # large ones, which take seconds
IMAGES = Lane("images", max(1, min(8, _CPUS // 2)))
PDFS = Lane("pdfs", 2)  # of which each may take 2 GB, see api/text/media/pdf_process.py
AUDIO_FILES = Lane("audio", 2)  # of which each may take 4 GB, see api/text/media/audio_process.py
VIDEOS = Lane("videos", 2)  # of which each may take 4 GB, see api/text/media/videos.py


async def run_on_text(size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of a function that tokenizes `size` characters. Long texts run on a lane of their own."""
    if size > LONG_TEXT:
        lane = HUGE_TEXTS if size > HUGE_TEXT else LONG_TEXTS
        return await lane.run(function, *args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)
