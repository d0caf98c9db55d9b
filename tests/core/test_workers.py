"""Worker threads for long texts: bounded, beside short ones, and abandoned with their callers."""

from __future__ import annotations

import asyncio
import threading

import pytest

from mlxrun.core import workers
from mlxrun.core.workers import (
    Abandoned,
    Lane,
    LaneJob,
    check_abandoned,
    end_by,
    finishes_before,
    run_on_text,
)
from tests.helpers.raw_clients import until


async def test_a_lane_runs_few_at_once() -> None:
    running, most, gate, pair = 0, 0, threading.Lock(), threading.Barrier(2)

    def work(number: int) -> int:
        nonlocal running, most
        with gate:
            running += 1
            most = max(most, running)
        pair.wait(60)  # for another one, so that two have to run at once
        with gate:
            running -= 1
        pair.wait(60)
        return number

    lane = Lane("test", 2)
    assert await asyncio.gather(*(lane.run(work, i) for i in range(12))) == list(range(12))
    assert most == 2


async def test_what_waits_is_dropped_with_its_caller() -> None:
    lane, begun, free = Lane("test", 1), [], threading.Event()

    def work(number: int) -> None:
        begun.append(number)
        free.wait(60)

    first = asyncio.create_task(lane.run(work, 1))
    await until(lambda: begun)
    second = asyncio.create_task(lane.run(work, 2))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    free.set()
    await first
    assert await lane.run(lambda: begun) == [1]


async def test_what_runs_ends_where_it_asks() -> None:
    """The cancelled caller returns when the thread is free."""
    lane, begun, ended = Lane("test", 1), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        try:
            while True:
                check_abandoned()
                threading.Event().wait(0.001)
        except Abandoned:
            ended.set()
            raise

    task = asyncio.create_task(lane.run(work))
    await asyncio.to_thread(begun.wait, 60)
    assert not ended.is_set()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
    assert await lane.run(lambda: check_abandoned() or 5) == 5


async def test_a_caller_that_is_cancelled_again_waits_still() -> None:
    """What the thread uses must not be released before it has ended."""
    lane, begun, free = Lane("test", 1), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        free.wait(60)

    task = asyncio.create_task(lane.run(work))
    await asyncio.to_thread(begun.wait, 60)
    for _ in range(5):
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()
    free.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_what_waits_for_something_else_is_ended_by_a_call() -> None:
    lane, begun, end = Lane("test", 1), threading.Event(), threading.Event()

    def work() -> None:
        with end_by(end.set):
            begun.set()
            end.wait(60)

    await_end = asyncio.create_task(lane.run(work))
    await asyncio.to_thread(begun.wait, 60)
    await_end.cancel()
    with pytest.raises(asyncio.CancelledError):
        await await_end
    assert end.is_set()
    with end_by(end.clear):  # outside of a lane nothing ends it
        assert end.is_set()


def test_a_job_that_was_abandoned_before() -> None:
    job, called = LaneJob(), []
    job.abandon()
    with pytest.raises(Abandoned), job.end_by(lambda: called.append(1)):
        raise AssertionError
    assert called == []


async def test_which_of_two_is_first() -> None:
    """The task goes on if it is not; what it was compared with does not."""
    stop = asyncio.Event()
    task, other = asyncio.create_task(stop.wait()), asyncio.create_task(asyncio.sleep(0))
    assert not await finishes_before(task, other) and not task.done()
    stop.set()
    other = asyncio.create_task(asyncio.sleep(600))
    assert await finishes_before(task, other)
    with pytest.raises(asyncio.CancelledError):
        await other


async def test_errors_come_out() -> None:
    def fail() -> None:
        raise ValueError("as it is")

    with pytest.raises(ValueError, match="as it is"):
        await Lane("test", 1).run(fail)


@pytest.mark.parametrize(
    ("size", "name"),
    [(10, "asyncio"), (workers.LONG_TEXT + 1, "long-texts"), (workers.HUGE_TEXT + 1, "huge-texts")],
)
async def test_texts_run_in_the_lane_of_their_size(size: int, name: str) -> None:
    assert (await run_on_text(size, threading.current_thread)).name.startswith(name)
