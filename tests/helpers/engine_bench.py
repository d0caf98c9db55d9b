"""A client and its engine thread over a scripted runner, and ways to wait for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

from mlxrun.config.settings import SchedulerSettings
from mlxrun.core.request import FinishReason, Request
from mlxrun.engine.client import EngineClient
from mlxrun.engine.engine import Engine
from mlxrun.engine.thread import Message
from tests.helpers.engine_fakes import FakeRunner, Gate, compute_answer, make_engine, make_request

BARRIER = make_request("barrier", 1, 4)


class Bench:
    """A client, the parts behind it, and the messages that it sends to its thread."""

    def __init__(self, client: EngineClient, engine: Engine, runner: FakeRunner) -> None:
        self.client = client
        self.engine = engine
        self.runner = runner
        self.sent: list[Message] = []
        put = client._thread.send

        def record(message: Message) -> None:
            self.sent.append(message)
            put(message)

        client._thread.send = record  # type: ignore[method-assign]

    async def answer(self, request: Request) -> tuple[tuple[int, ...], FinishReason | None]:
        """The whole answer."""
        tokens: list[int] = []
        finish = None
        async with aclosing(self.client.generate(request)) as events:
            async for event in events:
                assert finish is None
                tokens += event.tokens
                finish = event.finish
        return tuple(tokens), finish

    async def settle(self) -> None:
        """Wait until all earlier messages are handled, that is until a later request has ended."""
        if isinstance(self.runner.before, Gate):
            self.runner.before.open()
        assert await self.answer(BARRIER) == compute_answer(BARRIER)
        assert self.client._collectors == {}
        assert self.engine.scheduler.requests == ()
        assert self.runner.rows.keys() <= {BARRIER.id}
        assert self.runner.broken == []


@asynccontextmanager
async def bench(
    runner: FakeRunner | None = None, settings: SchedulerSettings | None = None, **options: Any
) -> AsyncIterator[Bench]:
    runner = runner or FakeRunner()
    made: list[Engine] = []

    def build() -> Engine:
        runner.threads.add(threading.get_ident())
        made.append(make_engine(runner, settings, **options))
        return made[0]

    client = await EngineClient.start_with(build)
    try:
        yield Bench(client, made[0], runner)
    finally:
        if isinstance(runner.before, Gate):
            runner.before.open()
        await client.close()
        assert runner.closed
        assert engine_threads() == []


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "mlxrun-engine"]


async def until(true: Callable[[], bool]) -> None:
    """Give the engine thread time; fails after long."""
    for _ in range(60_000):
        if true():
            await asyncio.sleep(0)  # what the thread has handed over is delivered
            return
        await asyncio.sleep(0.001)
    raise AssertionError("nothing happens")


async def after_steps(runner: FakeRunner, gate: Gate, steps: int) -> None:
    """Let so many steps end and their events arrive; the next one is held at the gate."""
    gate.let_pass(steps)
    await until(lambda: gate.waiting > steps)
