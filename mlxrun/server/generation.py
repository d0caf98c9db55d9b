"""Turns a live request into the deltas of its choices, which are generated at the same time.

Only this module of the server turns token events into deltas; see api/choice.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from mlxrun.api.choice import Choice
from mlxrun.api.parsers.delta import Delta
from mlxrun.core.errors import MlxrunError
from mlxrun.core.request import Request, TokenEvent
from mlxrun.server.live_requests import LiveRequest

log = logging.getLogger(__name__)
ChoiceDeltas = tuple[Choice, list[Delta]]
ChoiceEvents = AsyncGenerator[tuple[Choice, TokenEvent], None]


async def stream_deltas(live: LiveRequest) -> AsyncGenerator[ChoiceDeltas, None]:
    """Yield the deltas of all choices as they come. A choice that has ended has its `finish_reason` set.

    Raises the engine's errors. Then, and when the generator is closed, all that still runs is aborted.
    """
    requests: Sequence[Request] = live.prepared.requests
    if live.key_name:  # policy `fair` shares among the server's keys, or else among the bodies' users
        requests = [replace(request, fairness_key=live.key_name) for request in requests]
    choices = [Choice(live.prepared, index, live.engine.model) for index in range(len(requests))]
    live.choices = choices
    sources = [_read_events(live, *pair) for pair in zip(requests, choices, strict=True)]
    unfinished = len(choices)
    try:
        async with aclosing(sources[0] if len(sources) == 1 else _merge(sources)) as events:
            async for choice, event in events:
                live.record(choice.index, event)
                deltas = choice.feed(event)
                if deltas or choice.ended:
                    yield choice, deltas
                if choice.ended:
                    unfinished -= 1
                if not unfinished:
                    break
    except MlxrunError as error:
        live.error = error
        raise
    if live.config.log.prompts:
        for choice in choices:
            log.debug("%s answer %d %r", live.id, choice.index, choice.text)


async def collect_choices(live: LiveRequest) -> list[Choice]:
    """Wait until all choices have ended, and return them. Raises the engine's errors."""
    found: dict[int, Choice] = {}
    async with aclosing(stream_deltas(live)) as stream:
        async for choice, _ in stream:
            found[choice.index] = choice
    return [found[index] for index in sorted(found)]


async def _read_events(live: LiveRequest, request: Request, choice: Choice) -> ChoiceEvents:
    """The engine's events for one choice, until the choice has ended."""
    with live.run_choice(request.id):
        async with aclosing(live.engine.client.generate(request)) as events:
            async for event in events:
                yield choice, event
                if choice.ended:
                    return


async def _merge(sources: Sequence[ChoiceEvents]) -> ChoiceEvents:
    """The events of all sources as they come. A source is read on only when its last event was processed;
    meanwhile the engine's client merges its events. The caller closes this once all choices have ended."""
    ready: asyncio.Queue[tuple[Choice, TokenEvent, asyncio.Event] | Exception] = asyncio.Queue()

    async def pump(source: ChoiceEvents) -> None:
        processed = asyncio.Event()
        try:
            async with aclosing(source):
                async for choice, event in source:
                    processed.clear()
                    ready.put_nowait((choice, event, processed))
                    await processed.wait()
        except Exception as error:
            ready.put_nowait(error)

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    try:
        while True:
            item = await ready.get()
            if isinstance(item, Exception):
                raise item
            choice, event, processed = item
            yield choice, event
            processed.set()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
