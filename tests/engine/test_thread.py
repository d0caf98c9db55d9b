"""The engine's thread: it loads, ends with the engine, and outlives the loop that made it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import cast

import pytest

from mlxrun.core.errors import EngineDead, MlxrunError, ModelLoadError
from mlxrun.core.request import Request, TokenEvent
from mlxrun.engine import thread
from mlxrun.engine.client import EngineClient
from mlxrun.engine.engine import Engine
from mlxrun.engine.thread import EngineStats, StopEngine, collect_stats
from mlxrun.model.load_check.recheck import Recheck
from mlxrun.model.load_check.report import LoadCheckReport
from mlxrun.model.run.compute_methods import ComputeMethods
from tests.helpers.engine_bench import after_steps, bench, engine_threads, until
from tests.helpers.engine_fakes import FakeRunner, Gate, make_engine, make_request


async def test_an_error_outside_a_step_ends_the_engine_too() -> None:
    """A bug in mlxrun, or a device that cannot be reset, leaves no request waiting."""

    class Stuck(FakeRunner):
        def reset(self) -> None:
            raise OSError("the device does not answer")

    async with bench(Stuck(dead=True)) as b:
        with pytest.raises(EngineDead, match="OSError: the device does not answer") as caught:
            await b.answer(make_request("a"))
        assert isinstance(caught.value.__cause__, OSError)
        with pytest.raises(EngineDead):
            await b.answer(make_request("b"))


@pytest.mark.parametrize("error", [ModelLoadError("no such model"), RuntimeError("odd weights")])
async def test_a_failed_load_is_raised_by_start(error: Exception) -> None:
    """An MlxrunError as it is, others as EngineDead with the cause; the thread has ended."""

    def build() -> Engine:
        raise error

    with pytest.raises(MlxrunError, match=str(error)) as caught:
        await EngineClient.start_with(build)
    assert caught.value is error or caught.value.__cause__ is error
    assert engine_threads() == []


class FakeRecheck:
    """What is left to compare. It gives way `interruptions` times, then finds `report`."""

    delay = 0.0

    def __init__(self, report: LoadCheckReport, interruptions: int) -> None:
        self.report, self.interruptions = report, interruptions
        self.runs = list[bool]()
        self.done = threading.Event()

    def run(self, is_wanted: Callable[[], bool]) -> LoadCheckReport | None:
        self.runs.append(is_wanted())
        if len(self.runs) <= self.interruptions:
            return None
        self.done.set()
        return self.report


async def test_an_idle_engine_compares_its_model_again() -> None:
    """Until that is done; then it waits for requests only. Its numbers have the new report."""
    runner = FakeRunner()
    engine = make_engine(runner)
    engine.load_check = LoadCheckReport(ComputeMethods(), (), kept=True)
    check = FakeRecheck(replace(engine.load_check, surprise="it differs", kept=False), 3)
    engine.recheck = cast(Recheck, check)
    client = await EngineClient.start_with(lambda: engine)
    try:
        await asyncio.to_thread(check.done.wait, 60)
        await until(
            lambda: client.read_stats().load_check != LoadCheckReport(ComputeMethods(), (), kept=True)
        )
        found = client.read_stats().load_check
        assert found is not None and (found.kept, found.surprise) == (False, "it differs")
        assert len(check.runs) == 4 and engine.recheck is None
        async with aclosing(client.generate(make_request("a"))) as events:
            assert [event async for event in events][-1].finish is not None
    finally:
        await client.close()
    assert len(check.runs) == 4


async def test_a_message_is_seen_by_what_is_compared() -> None:
    """So that a request waits for one forward only, and the end of the engine too."""
    engine = make_engine(FakeRunner())
    engine.load_check = LoadCheckReport(ComputeMethods(), (), kept=True)
    started, seen = threading.Event(), threading.Event()

    class Waiting(FakeRecheck):
        def run(self, is_wanted: Callable[[], bool]) -> LoadCheckReport | None:
            started.set()
            while not is_wanted():
                time.sleep(0.001)
            seen.set()
            return None

    engine.recheck = cast(Recheck, Waiting(engine.load_check, 0))
    client = await EngineClient.start_with(lambda: engine)
    await asyncio.to_thread(started.wait, 60)
    await client.close()
    assert seen.is_set() and engine_threads() == []


async def test_an_idle_engine_prepares_for_requests() -> None:
    """Piece by piece: a request waits for one of them. Then the model is compared."""
    prepared, begun, go = list[int](), threading.Event(), threading.Semaphore(0)

    def prepare() -> Iterator[None]:
        for number in range(4):
            begun.set()
            go.acquire(timeout=60)
            prepared.append(number)
            yield

    engine = make_engine(FakeRunner(), preparation=prepare())
    engine.load_check = LoadCheckReport(ComputeMethods(), (), kept=True)
    check = FakeRecheck(engine.load_check, 0)
    engine.recheck = cast(Recheck, check)
    client = await EngineClient.start_with(lambda: engine)
    try:
        await until(begun.is_set)
        answer = asyncio.create_task(collect_events(client, make_request("a")))
        await asyncio.sleep(0.05)
        assert not answer.done()
        go.release()
        assert (await answer)[-1].finish is not None
        assert prepared == [0] and check.runs == []
        go.release(3)
        await asyncio.to_thread(check.done.wait, 60)
        assert prepared == [0, 1, 2, 3] and engine.idle_delay is None
    finally:
        go.release(4)
        await client.close()


def test_what_cannot_be_prepared_is_left(caplog: pytest.LogCaptureFixture) -> None:
    def prepare() -> Iterator[None]:
        yield
        raise RuntimeError("out of memory")

    engine = make_engine(FakeRunner(), preparation=prepare())
    assert engine.idle_delay == 0
    engine.prepare()
    assert engine.idle_delay is None and "not prepared for prompts: out of memory" in caplog.text
    engine.prepare()
    engine.close()


def test_a_closed_engine_leaves_what_it_was_to_prepare() -> None:
    """It holds the model."""
    engine = make_engine(FakeRunner(), preparation=iter([None]))
    engine.close()
    assert engine.idle_delay is None


async def collect_events(client: EngineClient, request: Request) -> list[TokenEvent]:
    async with aclosing(client.generate(request)) as events:
        return [event async for event in events]


async def test_start_can_be_cancelled() -> None:
    """What is being loaded is closed; no thread stays."""
    runner, go = FakeRunner(), threading.Event()

    def build() -> Engine:
        go.wait(60)
        return make_engine(runner)

    start = asyncio.create_task(EngineClient.start_with(build))
    await until(lambda: engine_threads() != [])
    start.cancel()
    await asyncio.sleep(0)
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert engine_threads() == []
    assert runner.closed


def test_a_loop_that_is_gone_does_not_stop_the_thread() -> None:
    """A front end that dies without `close` leaves a thread that still ends when told."""
    runner, gate = FakeRunner(), Gate()
    runner.before = gate
    clients: list[EngineClient] = []

    async def use() -> None:
        client = await EngineClient.start_with(lambda: make_engine(runner))
        clients.append(client)
        asyncio.create_task(anext(client.generate(make_request("a", 5, 3))))  # noqa: RUF006
        await until(lambda: gate.waiting == 1)

    asyncio.run(use())
    gate.open()
    clients[0]._thread.send(StopEngine())
    clients[0]._thread._thread.join(60)
    assert not clients[0]._thread._thread.is_alive()
    assert runner.closed


async def test_numbers_are_published_after_each_step() -> None:
    """They can be read while a step runs, and are those of an idle engine once it has ended."""
    gate = Gate()
    async with bench(FakeRunner(before=gate)) as b:
        first = b.client.read_stats()
        assert (first.counts["steps"], first.busy) == (0, False)
        task = asyncio.create_task(b.answer(make_request("a", 10, 4)))
        await after_steps(b.runner, gate, 2)  # the third step is held
        running = b.client.read_stats()
        assert (running.counts["steps"], running.counts["running"], running.busy) == (2, 1, True)
        gate.open()
        await task
        await b.settle()
        await until(lambda: not b.client.read_stats().busy)
        last = b.client.read_stats()
        assert last.counts["running"] == 0 and last.counts["steps"] > 2 and last.compute_age() == 0.0


async def test_numbers_are_collected_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """And once more after messages."""
    collected: list[EngineStats] = []

    def collect(engine: Engine) -> EngineStats:
        collected.append(collect_stats(engine))
        return collected[-1]

    monkeypatch.setattr(thread, "collect_stats", collect)
    async with bench() as b:
        await b.answer(make_request("a", 10, 8))
        await until(lambda: not b.client.read_stats().busy)
        assert len(collected) <= 1 + len(b.sent) + b.engine.generation.steps > 8


async def test_a_dead_engine_shows_its_last_numbers() -> None:
    async with bench(FakeRunner(dead=True), max_errors=1) as b:
        with pytest.raises(EngineDead):
            await b.answer(make_request("a"))
        assert b.client.read_stats().counts["steps"] == 0  # after which the failed step began


async def test_a_first_step_is_seen_while_it_runs() -> None:
    """The numbers say that there is work as soon as a request has come."""
    gate = Gate()
    async with bench(FakeRunner(before=gate)) as b:
        task = asyncio.create_task(b.answer(make_request("a", 10, 2)))
        await until(lambda: gate.waiting == 1)
        stats = b.client.read_stats()
        assert stats.busy and stats.counts["waiting"] == 1 and stats.compute_age() > 0
        gate.open()
        await task
