"""An engine thread that hangs is given up, with what it was doing; one that is slow is not."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

import pytest

from mlxrun.core.errors import EngineDead
from mlxrun.engine import watchdog
from mlxrun.engine.client import EngineClient
from mlxrun.engine.engine import Engine
from mlxrun.engine.watchdog import BUSY_SHARE, READ_BYTES, TICK, Signs, Watchdog
from mlxrun.model.load.load_progress import LoadProgress
from tests.helpers.command_processes import PATIENCE
from tests.helpers.engine_bench import until
from tests.helpers.engine_fakes import FakeRunner, make_engine, make_request

STILL = Signs((3, 100), 1.5, 20.0, 5000)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watchdog that gives up soon, and whose process does nothing else."""
    monkeypatch.setattr(watchdog, "TICK", 0.01)
    monkeypatch.setattr(watchdog, "LIMIT", 0.3)
    monkeypatch.setattr(watchdog, "read_used_seconds", lambda: 0.0)
    monkeypatch.setattr(watchdog, "read_bytes", lambda: 0)


@pytest.mark.parametrize(
    "now",
    [
        replace(STILL, counted=(4, 100)),
        replace(STILL, counted=(3, 101)),
        replace(STILL, own=1.500001),
        replace(STILL, used=20.0 + BUSY_SHARE * TICK),
        replace(STILL, read=5000 + READ_BYTES),
    ],
)
def test_each_sign_shows_progress(now: Signs) -> None:
    assert now.show_progress(STILL, TICK)


def test_others_of_the_process_are_no_progress() -> None:
    """A loop that answers /health, and a library that tries in vain: its time is the system's."""
    assert not STILL.show_progress(STILL, TICK)
    assert not replace(STILL, used=20.5, read=6000).show_progress(STILL, TICK)
    assert not replace(STILL, own=None).show_progress(replace(STILL, own=None), TICK)


async def test_a_load_that_hangs_is_given_up(quick: None, caplog: pytest.LogCaptureFixture) -> None:
    """And `start` does not wait for its thread. The twin is a load that only takes long."""
    go = threading.Event()

    def build() -> Engine:
        go.wait(100)
        return make_engine(FakeRunner())

    with caplog.at_level(logging.ERROR), pytest.raises(EngineDead) as caught:
        await EngineClient.start_with(build)
    said = "the engine is stuck: no progress for 0 seconds while loading the model (in wait, threading.py:"
    assert str(caught.value).startswith(said)
    assert "the stack of thread mlxrun-engine:" in caplog.text and "in build" in caplog.text
    go.set()


async def test_a_load_that_counts_is_waited_for(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than three times the limit, with progress before each look."""
    counted = threading.Semaphore(0)
    monkeypatch.setattr(watchdog, "read_used_seconds", lambda: 0.0 * counted.acquire(timeout=60))
    monkeypatch.setattr(watchdog, "read_thread_seconds", lambda ident: None)

    def build() -> Engine:
        progress = LoadProgress("loading the weights of m", 1000)
        for _ in range(100):
            progress.add(1)
            counted.release()
            threading.Event().wait(0.01)
        progress.end()
        counted.release(1_000_000)
        return make_engine(FakeRunner())

    client = await EngineClient.start_with(build)
    await client.close()


async def test_a_step_that_hangs_is_given_up(quick: None) -> None:
    go = threading.Event()
    runner = FakeRunner()
    client = await EngineClient.start_with(lambda: make_engine(runner))
    await until(lambda: client.dead_error is None)
    runner.before = lambda plan: go.wait(100)
    with pytest.raises(EngineDead, match="no progress for 0 seconds while computing a step"):
        async for _ in client.generate(make_request("a")):
            pass
    await client.close()
    go.set()


async def test_an_end_that_hangs_is_given_up(quick: None) -> None:
    """Nobody waits for an engine that cannot be closed."""
    runner, go = FakeRunner(), threading.Event()
    client = await EngineClient.start_with(lambda: make_engine(runner))
    runner.close = lambda: go.wait(PATIENCE)  # type: ignore[method-assign, assignment, return-value]
    await client.close()
    assert not go.is_set() and "while closing the engine" in str(client.dead_error)
    go.set()


async def test_an_idle_engine_is_not_watched(quick: None) -> None:
    client = await EngineClient.start_with(lambda: make_engine(FakeRunner()))
    threading.Event().wait(0.5)
    assert client.dead_error is None
    await client.close()


def test_what_is_read_is_named(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    progress, said = LoadProgress("loading the weights of m", 4_000_000_000), list[str]()
    progress.add(1_000_000_000)
    dog, go = Watchdog(lambda text: (said.append(text), go.set())[0]), threading.Event()

    def work() -> None:
        dog.start()
        dog.note("loading the model")
        go.wait(100)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    progress.end()
    assert "while loading the weights of m: 1.0 GB of 4.0 GB (25 %) (in wait" in said[0]
