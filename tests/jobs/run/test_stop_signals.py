"""The first signal ends a job in order, the second at once; in a server, neither ends the process."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from mlxrun.jobs.run.stop_signals import Interrupted, StopSignals


async def test_a_stop_that_is_not_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a job in a server is stopped, the server lives."""
    monkeypatch.setattr("os._exit", lambda code: pytest.fail("the process would end"))
    said: list[str] = []
    stop = StopSignals(said.append, owns_process=False)
    with stop.handle_signals():
        stop.request()
        stop.request()
    assert stop.requested
    assert said and "once more" not in said[0]
    stop._stuck = True
    stop.exit_if_stuck()
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    owner = StopSignals(said.append)
    owner.request()
    owner.request()
    assert ended == [130]


async def test_a_signal_cancels_work_and_nothing_else() -> None:
    """Work under `run` is cancelled and ends with Interrupted; without a signal its result or error comes."""
    said: list[str] = []
    stop = StopSignals(said.append)
    assert await stop.run(asyncio.sleep(0, "result")) == "result"

    async def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await stop.run(fail())
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with stop.handle_signals():
        asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted) as caught:
            await stop.run(work())
    assert ended.is_set() and caught.value.exit_code == 130
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == [signal.SIG_DFL] * 2
    for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
        signal.signal(number, handler)
    assert said == [
        "stopping: no new lines are started, finished lines are kept (press Ctrl-C again to stop immediately)"
    ]
    with pytest.raises(Interrupted):
        stop.check()


async def test_work_that_does_not_end_is_waited_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cleaning up has all the time it needs, but after a signal only some; then the process is to end."""
    monkeypatch.setattr("mlxrun.jobs.run.stop_signals.GRACE", 0.1)
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    said: list[str] = []
    stop = StopSignals(said.append)
    await stop.run_cleanup(asyncio.sleep(0.2))
    stop.exit_if_stuck()
    assert ended == []
    stop.request()
    never = asyncio.Event()
    async with asyncio.timeout(60):
        await stop.run_cleanup(never.wait())  # type: ignore[arg-type]
    never.set()
    stop.exit_if_stuck()
    assert ended == [130] and "killed" in said[-1]


async def test_signals_are_handled_between_the_jobs_of_an_outer_block() -> None:
    said: list[str] = []
    stop = StopSignals(said.append)
    with stop.handle_signals():
        with stop.handle_signals():
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted):
            await stop.run(asyncio.sleep(60))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and len(said) == 1
