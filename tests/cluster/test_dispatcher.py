"""Every line has one result, whatever dies; and lines go where their prefix is."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from mlxrun.cluster.dispatcher import MOST_DEATHS, Dispatcher
from mlxrun.cluster.messages import LineResult, WorkerFacts, WorkerRefused
from mlxrun.cluster.worker_slots import WorkerSlot
from mlxrun.core.errors import EngineDead, InternalError
from tests.helpers.fake_workers import FakeFleet, FakeWorker, answer_all, make_ticket
from tests.helpers.raw_clients import until


@asynccontextmanager
async def started(fleet: FakeFleet, workers: int) -> AsyncIterator[Dispatcher]:
    dispatcher = Dispatcher(fleet.list_makers(workers), backoff=0.0)
    await dispatcher.start()
    try:
        yield dispatcher
    finally:
        await dispatcher.close()


async def test_each_line_is_answered_once_and_groups_stay_together() -> None:
    """Groups of 16 on three workers: hardly any is split, and no worker has more than it should."""
    fleet = FakeFleet()
    async with started(fleet, 3) as dispatcher:
        tickets = [make_ticket(f"{group}-{at}", group << 32) for group in range(12) for at in range(16)]
        results = await answer_all(dispatcher, tickets)
    assert [each.body for each in results if isinstance(each, LineResult)] == [
        {"of": ticket.line.custom_id} for ticket in tickets
    ]
    assert len(fleet.answered) == 192
    homes = [{slot for name, slot in fleet.answered if name.startswith(f"{group}-")} for group in range(12)]
    assert sum(len(home) == 1 for home in homes) >= 9
    assert max(len(seen) for worker in fleet.workers for seen in worker.seen) <= fleet.most
    assert {worker.number for worker in fleet.workers} == {0, 1, 2}


async def test_one_group_feeds_all_workers() -> None:
    """A worker that would idle takes lines of a group that others own."""
    fleet = FakeFleet()
    async with started(fleet, 4) as dispatcher:
        await answer_all(dispatcher, [make_ticket(str(at), 7) for at in range(200)])
    per_slot = [sum(slot == each for _, slot in fleet.answered) for each in range(4)]
    assert sum(per_slot) == 200 and min(per_slot) > 20


async def test_random_kills_lose_and_double_nothing() -> None:
    """Twenty kills at random moments: every line has its own answer, once."""
    fleet, rng = FakeFleet(blameless=True), random.Random(3)
    async with started(fleet, 3) as dispatcher:

        async def kill_some() -> None:
            for _ in range(20):
                for _ in range(rng.randrange(1, 12)):
                    await asyncio.sleep(0)
                rng.choice(fleet.workers[-3:]).kill()

        killing = asyncio.create_task(kill_some())
        tickets = [make_ticket(str(at), at // 10) for at in range(600)]
        results = await answer_all(dispatcher, tickets)
        await killing
    names = [each.body["of"] for each in results if isinstance(each, LineResult) and each.body]
    assert names == [str(at) for at in range(600)]
    assert sum(slot.done for slot in dispatcher.slots) == 600
    assert sum(slot.deaths for slot in dispatcher.slots) >= 5
    begun = [name for worker in fleet.workers for name in set[str]().union(*worker.seen)]
    assert len(begun) > len(set(begun)), "some lines ran again"


async def count_results(dispatcher: Dispatcher, fleet: FakeFleet) -> list[str]:
    """A line goes to a worker that loses it and answers all the same; another answers it too."""
    fleet.held = True
    task = asyncio.create_task(dispatcher.answer(make_ticket("line")))
    first = await wait_for_line(fleet)
    slot = next(each for each in dispatcher.slots if each.has)
    (number,) = slot.has
    slot.worker = None  # so that its late result can be told from that of the next worker
    late = LineResult(number, {"of": "late"}, None, next(iter(slot.has.values())).counts)
    fleet.held = False
    first.kill()
    found = await task
    dispatcher.finish_line(slot, late)
    assert found.body is not None
    return [found.body["of"]] + (["late"] if sum(slot.done for slot in dispatcher.slots) > 1 else [])


async def wait_for_line(fleet: FakeFleet) -> object:
    while True:
        for worker in fleet.workers:
            if worker.lines:
                return worker
        await asyncio.sleep(0)


async def test_a_late_result_of_a_lost_worker_is_ignored() -> None:
    fleet = FakeFleet()
    async with started(fleet, 2) as dispatcher:
        assert await count_results(dispatcher, fleet) == ["line"]


async def test_the_check_sees_a_doubled_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation twin: a dispatcher that takes the result of whoever has had the line."""

    def take_any(self: Dispatcher, slot: WorkerSlot, result: LineResult) -> None:
        slot.done += 1
        if ticket := slot.has.pop(result.number, None):
            ticket.result.set_result(result)

    monkeypatch.setattr(Dispatcher, "finish_line", take_any)
    fleet = FakeFleet()
    async with started(fleet, 2) as dispatcher:
        assert await count_results(dispatcher, fleet) == ["line", "late"]


@pytest.mark.parametrize("workers", [1, 3])
async def test_a_line_that_kills_its_workers_fails_alone(workers: int) -> None:
    """It fails by name at the third death; those that were beside it run alone meanwhile, and none fails."""
    fleet = FakeFleet(deadly={"9"})
    async with started(fleet, workers) as dispatcher:
        results = await answer_all(dispatcher, [make_ticket(str(at), at) for at in range(60)])
    failed = [at for at, each in enumerate(results) if isinstance(each, BaseException)]
    assert failed == [9]
    error = results[9]
    assert isinstance(error, InternalError) and error.code == "worker_died"
    assert f"{MOST_DEATHS} workers died" in str(error)
    assert sum(slot.deaths for slot in dispatcher.slots) == MOST_DEATHS
    assert {"9"} in [seen for worker in fleet.workers for seen in worker.seen]


async def test_deaths_of_machines_are_no_lines_fault() -> None:
    fleet = FakeFleet(deadly={"x"}, blameless=True)
    async with started(fleet, 1) as dispatcher:
        (found,) = await answer_all(dispatcher, [make_ticket("x")])
    assert isinstance(found, EngineDead) and "no worker is left" in str(found)


async def test_idle_workers_get_lines_that_others_have_not_begun() -> None:
    """A worker with eight lines, of which four run, gives the others to one that has just come."""
    fleet = FakeFleet(held=True)
    dispatcher = Dispatcher(fleet.list_makers(2), backoff=0.0)
    late = asyncio.Event()
    make = dispatcher.slots[1].make

    def make_late() -> object:
        worker = make()
        start = worker.start

        async def wait() -> object:
            await late.wait()
            return await start()

        worker.start = wait  # type: ignore[method-assign, assignment]
        return worker

    dispatcher.slots[1].make = make_late  # type: ignore[assignment]
    await dispatcher.start()
    task = asyncio.create_task(answer_all(dispatcher, [make_ticket(str(at)) for at in range(8)]))
    await until(lambda: len(dispatcher.slots[0].has) == 8)
    late.set()
    await until(lambda: dispatcher.slots[1].has)
    fleet.held = False
    for worker in fleet.workers:
        worker.news.set()
    assert len(await task) == 8
    await dispatcher.close()


async def test_refused_workers_are_left_out_and_none_is_an_error() -> None:
    fleet = FakeFleet(refused={1})
    async with started(fleet, 2) as dispatcher:
        await answer_all(dispatcher, [make_ticket(str(at)) for at in range(20)])
        assert dispatcher.slots[1].state == "refused" and "another device" in dispatcher.slots[1].reason
    assert {slot for _, slot in fleet.answered} == {0}
    with pytest.raises(WorkerRefused, match="no worker is left .worker 0: another device"):
        async with started(FakeFleet(refused={0}), 1):
            pass


async def test_a_worker_that_will_come_back_counts_while_its_old_process_is_closed() -> None:
    """The other one is refused meanwhile, which must not end the job."""
    fleet, is_closed, is_loaded = FakeFleet(held=True, refused={1}), asyncio.Event(), asyncio.Event()

    class SlowWorker(FakeWorker):
        async def start(self) -> WorkerFacts:
            if self.number == 1:
                await is_loaded.wait()
            return await super().start()

        async def close(self) -> None:
            if self.number == 0:
                await is_closed.wait()
            await super().close()

    first = SlowWorker(fleet, 0)
    workers = iter((first, FakeWorker(fleet, 0)))
    dispatcher = Dispatcher([lambda: next(workers), lambda: SlowWorker(fleet, 1)], backoff=0.0)
    await dispatcher.start()
    task = asyncio.create_task(answer_all(dispatcher, [make_ticket("a")]))
    await until(lambda: first.lines)
    first.kill()
    await until(lambda: dispatcher.slots[0].deaths)
    is_loaded.set()
    await until(lambda: dispatcher.slots[1].state == "refused")
    fleet.held = False
    is_closed.set()
    (found,) = await task
    assert isinstance(found, LineResult) and found.body == {"of": "a"}
    await dispatcher.close()


async def test_lines_are_not_failed_by_the_end_of_the_last_worker() -> None:
    """They are told that the engine is dead, which ends the run, and is no answer of theirs."""
    dispatcher = Dispatcher(FakeFleet().list_makers(1), backoff=0.0)
    dispatcher._fail(WorkerRefused("another device"))
    with pytest.raises(EngineDead, match="the workers ended: WorkerRefused: another device"):
        await dispatcher.answer(make_ticket("a"))
