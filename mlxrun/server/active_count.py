"""Counts what is being answered, for those who wait until nothing is, or end what still is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class ActiveCount:
    """`count`: blocks of `hold` that run now."""

    def __init__(self) -> None:
        self.count = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ended: dict[asyncio.Task[Any], Exception] = {}

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Have `wait_idle` wait for the block, and `end_all` end it. A task has one block at a time."""
        task = asyncio.current_task()
        assert task is not None
        self.count += 1
        self._idle.clear()
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if task not in self._ended or task.uncancel():  # it was cancelled by others, or by both
                raise
            raise self._ended[task] from None
        finally:
            self._tasks.discard(task)
            self._ended.pop(task, None)
            self.count -= 1
            if not self.count:
                self._idle.set()

    def end_all(self, error: Exception) -> None:
        """Have all blocks raise this error where they wait."""
        for task in self._tasks - self._ended.keys():
            self._ended[task] = error
            task.cancel()

    async def wait_idle(self) -> None:
        """Wait until no block runs."""
        await self._idle.wait()
