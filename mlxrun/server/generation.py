"""From a prepared request to the pieces of its answers: all choices at once, merged while nobody reads.

The token events of a choice go through its `Choice` (api/choice.py) here and nowhere else in the server.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from mlxrun.api.choice import Choice
from mlxrun.errors import MlxrunError
from mlxrun.scheduler.request import Request, TokenEvent

if TYPE_CHECKING:
    from mlxrun.api.prepared import PreparedRequest
    from mlxrun.server.live_requests import LiveRequest
    from mlxrun.server.state import Server
    from mlxrun.text.formats import Delta

log = logging.getLogger(__name__)
Pieces = tuple[Choice, "list[Delta]"]


async def answers(
    server: Server, live: LiveRequest, prepared: PreparedRequest
) -> AsyncGenerator[Pieces, None]:
    """The pieces of all choices as they come; a choice that ends gives its last ones with `finish_reason`.

    Raises what the engine raises; then, and when it is closed, all that still runs is aborted.
    """
    requests = _keyed(prepared.requests, live.key_name)
    choices = [Choice(prepared, index, server.host) for index in range(len(requests))]
    if len(requests) == 1:
        source = _one(server, live, requests[0], choices[0])
    else:
        source = _many(server, live, requests, choices)
    try:
        async with aclosing(source) as pieces:
            async for piece in pieces:
                yield piece
    except MlxrunError as error:
        live.failure = error
        raise
    if server.config.log.prompts:
        for choice in choices:
            log.debug("%s answer %d %r", live.id, choice.index, choice.text)


async def whole(server: Server, live: LiveRequest, prepared: PreparedRequest) -> list[Choice]:
    """All choices, once all have ended."""
    found: dict[int, Choice] = {}
    async with aclosing(answers(server, live, prepared)) as pieces:
        async for choice, _ in pieces:
            found[choice.index] = choice
    return [found[index] for index in range(len(prepared.requests))]


def _keyed(requests: Sequence[Request], key: str) -> Sequence[Request]:
    """Policy `fair` shares among the server's keys where it has some, else among the bodies' users."""
    return [replace(request, key=key) for request in requests] if key else requests


async def _events(server: Server, live: LiveRequest, request: Request) -> AsyncGenerator[TokenEvent, None]:
    live.begin(request.id)
    try:
        async with aclosing(server.client.generate(request)) as events:
            async for event in events:
                yield event
    finally:
        live.ended(request.id)


async def _one(
    server: Server, live: LiveRequest, request: Request, choice: Choice
) -> AsyncGenerator[Pieces, None]:
    async with aclosing(_events(server, live, request)) as events:
        async for event in events:
            live.take(choice.index, event)
            pieces = choice.feed(event)
            if pieces or choice.ended:
                yield choice, pieces
            if choice.ended:
                return


async def _many(
    server: Server, live: LiveRequest, requests: Sequence[Request], choices: Sequence[Choice]
) -> AsyncGenerator[Pieces, None]:
    """One pump a choice. A pump holds one event until it is taken; meanwhile the engine's client merges."""
    ready: deque[tuple[int, TokenEvent | None, BaseException | None]] = deque()
    news = asyncio.Event()
    taken = [asyncio.Event() for _ in requests]

    async def pump(index: int) -> None:
        try:
            async with aclosing(_events(server, live, requests[index])) as events:
                async for event in events:
                    taken[index].clear()
                    ready.append((index, event, None))
                    news.set()
                    await taken[index].wait()
        except Exception as error:
            ready.append((index, None, error))
            news.set()

    pumps = [asyncio.create_task(pump(index)) for index in range(len(requests))]
    left = len(pumps)
    try:
        while left:
            await news.wait()
            news.clear()
            while ready:
                index, event, error = ready.popleft()
                if error is not None:
                    raise error
                assert event is not None
                live.take(index, event)
                pieces = choices[index].feed(event)
                if choices[index].ended:
                    left -= 1
                    pumps[index].cancel()
                if pieces or choices[index].ended:
                    yield choices[index], pieces
                taken[index].set()
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
