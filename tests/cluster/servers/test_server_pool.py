"""Workers of a server are kept, replaced and restarted one after the other. No worker serves here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from mlxrun.cluster.messages import RayEnded, WorkerRefused
from mlxrun.cluster.servers.server_pool import MOST_STARTS, ServerPool, ServerSlot
from mlxrun.core.errors import EngineDead, NotReady
from tests.helpers.fake_servers import ServerFleet
from tests.helpers.raw_clients import until


@asynccontextmanager
async def started(fleet: ServerFleet, count: int) -> AsyncIterator[ServerPool]:
    fleet.http = False
    pool = fleet.make_pool(count)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()
        assert all(worker.closed for worker in fleet.workers)


def states(pool: ServerPool) -> list[str]:
    return [slot.state for slot in pool.slots]


async def choose(pool: ServerPool, *tried: ServerSlot) -> int | None:
    slot = await pool.choose((), set(tried))
    return None if slot is None else slot.number


async def test_it_is_ready_with_its_first_worker() -> None:
    """Refused workers are left out, and the state says why."""
    async with started(ServerFleet(refused={0}), 2) as pool:
        await until(lambda: states(pool) == ["refused", "ready"])
        assert await choose(pool) == 1 and await choose(pool, pool.slots[1]) is None
        assert pool.slots[0].describe()["reason"] == "another device"


async def test_no_worker_at_all() -> None:
    """A command whose workers are all refused ends with exit code 2, with dead ones with 3."""
    with pytest.raises(WorkerRefused, match="worker 0: another device; worker 1: another device") as refused:
        async with started(ServerFleet(refused={0, 1}), 2):
            pass
    assert refused.value.exit_code == 2
    fleet = ServerFleet(deadly={0})
    with pytest.raises(EngineDead, match="out of memory"):
        async with started(fleet, 1):
            pass
    assert len(fleet.workers) == MOST_STARTS


async def test_a_dead_worker_is_replaced() -> None:
    fleet = ServerFleet()
    async with started(fleet, 2) as pool:
        await until(lambda: states(pool) == ["ready", "ready"])
        fleet.workers[0].kill()
        await until(lambda: pool.slots[0].deaths == 1 and states(pool) == ["ready", "ready"])
        assert len(fleet.workers) == 3 and fleet.workers[0].closed
        assert pool.dead_error is None


async def test_the_server_dies_with_its_last_worker() -> None:
    fleet = ServerFleet()
    async with started(fleet, 1) as pool:
        fleet.deadly.add(0)
        fleet.workers[0].kill()
        await asyncio.wait_for(pool.wait_until_dead(), 10)
        assert states(pool) == ["lost"] and "out of memory" in str(pool.dead_error)
        with pytest.raises(NotReady):
            await choose(pool)


async def test_a_rolling_restart_waits_for_requests() -> None:
    """One worker after the other; it gets no new requests, and ends once the last one has."""
    fleet = ServerFleet()
    async with started(fleet, 2) as pool:
        await until(lambda: states(pool) == ["ready", "ready"])
        with pool.reserve(pool.slots[0]):
            pool.restart_soon(30.0)
            await until(lambda: states(pool) == ["draining", "ready"])
            pool.restart_soon(30.0)  # a second signal changes nothing
            assert await choose(pool) == 1
            assert not fleet.workers[0].closed and fleet.drained == []
        await until(lambda: not pool.is_restarting)
        assert states(pool) == ["ready", "ready"] and fleet.drained == [0, 1]
        assert len(fleet.workers) == 4 and pool.slots[0].deaths == 0


async def test_a_restart_does_not_wait_for_ever() -> None:
    fleet = ServerFleet()
    async with started(fleet, 1) as pool:
        with pool.reserve(pool.slots[0]):
            pool.restart_soon(0.01)
            await until(lambda: not pool.is_restarting)
        assert len(fleet.workers) == 2 and states(pool) == ["ready"]


async def test_requests_wait_for_the_only_worker() -> None:
    """While it is restarted; a request that comes then is not refused."""
    fleet = ServerFleet()
    async with started(fleet, 1) as pool:
        fleet.held.clear()
        pool.restart_soon(1.0)
        await until(lambda: fleet.workers[0].closed)
        waiting = asyncio.create_task(choose(pool))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        fleet.held.set()
        assert await waiting == 0


async def test_a_worker_that_does_not_come_back_ends_the_restart() -> None:
    fleet = ServerFleet()
    async with started(fleet, 2) as pool:
        await until(lambda: states(pool) == ["ready", "ready"])
        fleet.refused.add(0)
        pool.restart_soon(1.0)
        await until(lambda: not pool.is_restarting)
        assert states(pool) == ["refused", "ready"] and len(fleet.workers) == 3
        assert await choose(pool) == 1


async def test_a_worker_that_dies_while_it_drains() -> None:
    fleet = ServerFleet()
    async with started(fleet, 2) as pool:
        await until(lambda: states(pool) == ["ready", "ready"])
        with pool.reserve(pool.slots[0]):
            pool.restart_soon(30.0)
            await until(lambda: states(pool)[0] == "draining")
            fleet.workers[0].kill()
            await until(lambda: pool.slots[0].deaths == 1)
        await until(lambda: not pool.is_restarting and states(pool) == ["ready", "ready"])


async def test_the_server_ends_with_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker is started any more."""

    async def end(worker: object) -> str:
        raise RayEnded("Ray on this machine has ended")

    monkeypatch.setattr("tests.helpers.fake_servers.FakeServer.wait_dead", end)
    fleet = ServerFleet()
    async with started(fleet, 1) as pool:
        await asyncio.wait_for(pool.wait_until_dead(), 5)
        assert isinstance(pool.dead_error, RayEnded) and states(pool) == ["lost"]
        assert len(fleet.workers) == 1
