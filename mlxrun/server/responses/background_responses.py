"""Responses in the background: each has a task, which goes on when its client disconnects.

It is queued like every other request, with the same priority and time limit. The server's shutdown waits for
it as for others; after server.drain_timeout it fails. Nothing of it survives a restart.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from mlxrun.api.prepared import PreparedRequest
from mlxrun.api.responses.request import ResponseRequest
from mlxrun.core.errors import InternalError
from mlxrun.server.engine_state import ENGINE
from mlxrun.server.live_requests import LIVE_REQUESTS
from mlxrun.server.responses.response_runs import RESPONSES, Events, RunningResponse, encode_events, generate

log = logging.getLogger(__name__)

START_SECONDS = 0.05  # an error of the engine within this time is that of the request which creates it
SURFACE_NAME = "responses"


@dataclass(eq=False)
class BackgroundResponse:
    """One response that is to run. `held`: contexts that are left when it has ended."""

    app: web.Application
    owner: str
    token: str
    request: ResponseRequest
    prepared: PreparedRequest
    held: ExitStack
    _begun: asyncio.Future[RunningResponse] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    _answered: bool = False  # its client knows it: from now on an error is part of the response

    async def start(self) -> RunningResponse:
        """Start the task. Raises what the engine raises at once, such as Overloaded."""
        tasks = self.app[RESPONSES].tasks
        task = asyncio.create_task(self._run())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        try:
            both: set[asyncio.Future[Any]] = {task, self._begun}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await _wait_for_start(task, self._begun.result())
            if task.done():
                task.result()
        finally:
            self._answered = True
        return self._begun.result()

    async def _run(self) -> None:
        app, live_requests = self.app, self.app[LIVE_REQUESTS]
        with (
            self.held,
            app[ENGINE].active.hold(),
            live_requests.open_as(f"resp_{self.token}", self.owner, SURFACE_NAME, self.prepared) as live,
            app[RESPONSES].run(live, self.request, self.token) as run,
        ):
            run.record(encode_events(run.writer.queue()))
            self._begun.set_result(run)
            last = encode_events(await self._generate(run))
            await app[RESPONSES].save(run, last)
            run.record(last)

    async def _generate(self, run: RunningResponse) -> Events:
        async def send(events: Events) -> None:
            run.record(encode_events(events))

        try:
            return await generate(run, send, run.live.started.wait(), lambda: self._answered)
        except Exception as error:  # of the parser, for example: nobody else would get to know it
            if not self._answered:
                raise
            log.exception("the response %s failed", run.body["id"])
            return run.writer.fail(InternalError("the response failed", error))


async def _wait_for_start(task: asyncio.Task[None], run: RunningResponse) -> None:
    """Wait until the engine has begun with it, the task has ended, or some time has passed."""
    started = asyncio.ensure_future(run.live.started.wait())
    try:
        await asyncio.wait({task, started}, timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    finally:
        started.cancel()


async def cancel_background_responses(app: web.Application) -> None:
    """End what still runs. A handler of aiohttp's on_shutdown."""
    tasks = tuple(app[RESPONSES].tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
