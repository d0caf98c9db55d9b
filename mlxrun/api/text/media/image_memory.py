"""The memory that decoded images may take, of all requests together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary


class ImageMemory:
    """A budget of `most` bytes. Requests wait for their share in the order of their arrival, so that none
    waits forever. One event loop only."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        """Hold `size` bytes, at most `most`, during the block; wait until they are free."""
        assert size <= self.most
        if self._waiting or self.used + size > self.most:
            await self._wait(size)
        else:
            self.used += size
        try:
            yield
        finally:
            self._release(size)

    async def _wait(self, size: int) -> None:
        turn = (size, asyncio.get_running_loop().create_future())
        self._waiting.append(turn)
        try:
            await turn[1]
        except asyncio.CancelledError:
            if not turn[1].cancelled():
                self._release(size)  # it was admitted at the same moment
            elif turn in self._waiting:
                self._waiting.remove(turn)
                self._admit()  # the next one may need less
            raise

    def _release(self, size: int) -> None:
        self.used -= size
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self.used + self._waiting[0][0] <= self.most:
            size, turn = self._waiting.popleft()
            if not turn.cancelled():
                self.used += size
                turn.set_result(None)


_memories: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, ImageMemory]] = WeakKeyDictionary()


def get_image_memory(most: int) -> ImageMemory:
    """The budget of this process, which its requests and its jobs share: one for each running event loop."""
    memories = _memories.setdefault(asyncio.get_running_loop(), {})
    return memories.setdefault(most, ImageMemory(most))
