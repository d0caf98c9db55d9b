"""Models are loaded when they are needed, and make room for each other. No model serves here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from mlxrun.cluster.models import model_pool
from mlxrun.cluster.models.model_pool import ModelPool
from mlxrun.cluster.models.model_slot import ModelSlot
from mlxrun.core.errors import Draining, ModelLoadError, NotFound, Overloaded, RequestError, TimedOut
from tests.helpers.command_processes import PATIENCE
from tests.helpers.fake_models import FakeModel, FakeModels
from tests.helpers.raw_clients import until


@asynccontextmanager
async def started(models: FakeModels, limit: int = 1, **options: float) -> AsyncIterator[ModelPool]:
    pool = models.make_pool(limit, **options)  # type: ignore[arg-type]
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()
        assert all(life.closed for life in models.lives)


def states(pool: ModelPool) -> list[str]:
    return [slot.state for slot in pool.slots]


async def use(pool: ModelPool, name: str, until_set: asyncio.Event | None = None) -> None:
    slot = pool.find(name)
    await pool.wait_loaded(slot)
    with pool.hold(slot):
        assert slot.state == "ready" and slot.url
        if until_set is not None:
            await until_set.wait()


async def test_a_model_is_loaded_by_its_first_request_only() -> None:
    models = FakeModels()
    async with started(models, limit=2) as pool:
        assert states(pool) == ["unloaded", "unloaded"]
        await asyncio.gather(*(use(pool, "b-alias") for _ in range(5)))
        assert states(pool) == ["unloaded", "ready"] and len(models.lives) == 1
        await use(pool, "a")
        assert states(pool) == ["ready", "ready"]


async def test_requests_in_any_order_need_one_load_of_each_model() -> None:
    """Those of a model that does not fit beside the other wait together."""
    models = FakeModels()
    async with started(models) as pool:
        await asyncio.gather(*(use(pool, "ab"[number % 2]) for number in range(100)))
        assert [slot.loads for slot in pool.slots] == [1, 1]


async def test_models_that_do_not_fit_are_never_in_memory_together() -> None:
    models = FakeModels(names=("a", "b", "c"), sizes={"a": 2, "b": 1, "c": 2})
    async with started(models, limit=3) as pool:
        seen = []

        async def watch() -> None:
            while True:
                seen.append(sum(slot.memory for slot in pool.slots if slot.is_loaded))
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        await asyncio.gather(*(use(pool, "abc"[number % 3]) for number in range(30)))
        watching.cancel()
        assert max(seen) == 3


async def test_the_least_recently_used_idle_model_makes_room() -> None:
    models = FakeModels(names=("a", "b", "c"))
    async with started(models, limit=2) as pool:
        for name in ("a", "b", "a", "c"):
            await use(pool, name)
        assert states(pool) == ["ready", "unloaded", "ready"]


async def test_a_busy_model_makes_room_once_it_is_idle() -> None:
    """It keeps its requests. New ones wait for their turn, which comes."""
    models, done = FakeModels(), asyncio.Event()
    async with started(models) as pool:
        first = asyncio.create_task(use(pool, "a", done))
        await until(lambda: pool.slots[0].running)
        other = asyncio.create_task(use(pool, "b"))
        await until(lambda: states(pool)[0] == "draining")  # after the pool's patience
        late = asyncio.create_task(use(pool, "a"))
        await until(lambda: pool.slots[0].waiting)
        assert pool.slots[0].running == 1 and not first.done() and not other.done()
        done.set()
        await asyncio.gather(first, other, late)
        assert [slot.loads for slot in pool.slots] == [2, 1]


async def test_a_busy_model_is_not_drained_before_it_had_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    models, done = FakeModels(), asyncio.Event()
    async with started(models) as pool:
        pool.patience = 60.0
        busy = asyncio.create_task(use(pool, "a", done))
        await until(lambda: pool.slots[0].running)
        other = asyncio.create_task(use(pool, "b"))
        await asyncio.sleep(0.2)
        await use(pool, "a")  # which is served meanwhile
        assert states(pool) == ["ready", "unloaded"]
        done.set()
        await asyncio.gather(busy, other)


async def test_an_idle_model_is_unloaded_after_its_time() -> None:
    models = FakeModels(keep_alive={"a": 0.05})
    async with started(models, limit=2) as pool:
        await use(pool, "a")
        await use(pool, "b")
        await until(lambda: states(pool) == ["unloaded", "ready"])


async def test_a_model_that_is_being_loaded_is_unloaded_once_its_requests_have_ended() -> None:
    models = FakeModels()
    async with started(models) as pool:
        models.held.clear()
        done = asyncio.Event()
        using = asyncio.create_task(use(pool, "a", done))
        await until(lambda: states(pool)[0] == "loading")
        unloading = asyncio.create_task(pool.unload(pool.slots[0]))
        models.held.set()
        await until(lambda: states(pool)[0] == "draining")
        assert not unloading.done() and pool.slots[0].running == 1
        done.set()
        await asyncio.gather(using, unloading)
        assert states(pool)[0] == "unloaded" and len(models.lives) == 1


async def test_pinned_models_are_loaded_at_start_and_stay() -> None:
    models = FakeModels(pinned=("a",), keep_alive={"a": 0.0})
    async with started(models, limit=2) as pool:
        assert states(pool) == ["ready", "unloaded"]
        await use(pool, "b")
        with pytest.raises(RequestError, match=r"a is pinned \(models.a.pinned\)"):
            await pool.unload(pool.slots[0])
        assert states(pool) == ["ready", "ready"]


async def test_a_pinned_model_that_cannot_be_loaded_ends_the_start() -> None:
    models = FakeModels(pinned=("a",), broken={"a"})
    with pytest.raises(ModelLoadError, match="its files are broken"):
        async with started(models):
            raise AssertionError("it has started")


async def test_a_model_that_cannot_be_loaded_fails_its_requests_alone() -> None:
    models = FakeModels(broken={"a"})
    async with started(models, limit=2) as pool:
        found = await asyncio.gather(*(use(pool, n) for n in "aab"), return_exceptions=True)
        assert [type(each) for each in found] == [ModelLoadError, ModelLoadError, type(None)]
        with pytest.raises(ModelLoadError, match=r"it is tried again in \d s") as again:
            await use(pool, "a")
        assert again.value.retry_after is not None and len(models.lives) == 2
        models.broken.clear()
        pool.slots[0].failed -= 10.0
        await use(pool, "a")
        assert pool.slots[0].error is None


async def test_a_process_that_cannot_be_started_is_not_tried_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where the system has no room for it, or this process may open no more files."""
    models = FakeModels(pinned=("b",))

    async def start(model: FakeModel) -> str:
        raise OSError(24, "Too many open files")

    async with started(models, limit=2) as pool:
        monkeypatch.setattr(FakeModel, "start", start)
        with pytest.raises(ModelLoadError, match="Too many open files"):
            await use(pool, "a")
        with pytest.raises(ModelLoadError, match=r"Too many open files .it is tried again in \d s."):
            await use(pool, "a")
        assert len(models.lives) == 2
    with pytest.raises(ModelLoadError, match="Too many open files"):
        async with started(models):
            raise AssertionError("it has started")


@pytest.mark.parametrize("is_line", [False, True])
async def test_a_request_for_a_model_that_failed_does_not_wait_while_it_is_closed(is_line: bool) -> None:
    models = FakeModels(broken={"a"})
    async with started(models) as pool:
        models.closing.clear()
        first = asyncio.create_task(use(pool, "a"))
        await until(lambda: states(pool)[0] == "unloading")
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(ModelLoadError, match=r"its files are broken .it is tried again in \d s."):
                await pool.wait_loaded(pool.slots[0], is_line=is_line)
        models.closing.set()
        with pytest.raises(ModelLoadError):
            await first


async def test_a_model_that_dies_is_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_pool, "STEADY_SECONDS", 0.0)
    models = FakeModels()
    async with started(models) as pool:
        await use(pool, "a")
        models.lives[0].kill()
        await until(lambda: states(pool)[0] == "unloaded")
        assert pool.slots[0].describe()["error"] == "the model has died: killed"
        await use(pool, "a")
        assert pool.slots[0].loads == 2


async def test_the_first_death_costs_no_pause_and_the_second_does() -> None:
    models = FakeModels()
    async with started(models) as pool:
        for number in range(2):
            await use(pool, "a")
            models.lives[number].kill()
            await until(lambda: states(pool)[0] == "unloaded")
        with pytest.raises(ModelLoadError, match="the model has died: killed .it is tried again in 4 s."):
            await use(pool, "a")


async def test_a_death_is_no_end_of_draining(caplog: pytest.LogCaptureFixture) -> None:
    """Its requests end with it, which looks as if they had been answered."""
    models, done = FakeModels(), asyncio.Event()
    async with started(models) as pool:
        busy = asyncio.create_task(use(pool, "a", done))
        await until(lambda: pool.slots[0].running)
        other = asyncio.create_task(use(pool, "b"))
        await until(lambda: states(pool)[0] == "draining")
        done.set()
        asyncio.get_running_loop().call_later(0.05, models.lives[0].kill)
        await asyncio.gather(busy, other)
        assert "a: the model has died: killed" in caplog.text


async def test_a_pinned_model_that_dies_is_loaded_without_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_pool, "STEADY_SECONDS", 0.0)
    models = FakeModels(pinned=("a",))
    async with started(models) as pool:
        models.lives[0].kill()
        await until(lambda: pool.slots[0].loads == 2)


async def use_one_and_wait_for_another(pool: ModelPool, done: asyncio.Event) -> list[asyncio.Task[None]]:
    """A request that runs on `a` until `done`, and one that waits for `b`."""
    busy = asyncio.create_task(use(pool, "a", done))
    await until(lambda: pool.slots[0].running)
    other = asyncio.create_task(use(pool, "b"))
    await until(lambda: pool.slots[1].waiting)
    return [busy, other]


async def test_requests_that_leave_are_not_waited_for() -> None:
    models, done = FakeModels(), asyncio.Event()
    async with started(models) as pool:
        pool.patience = 60.0
        busy, other = await use_one_and_wait_for_another(pool, done)
        other.cancel()
        await until(lambda: not pool.slots[1].waiting)
        pool.patience = 0.0
        done.set()
        await busy
        await asyncio.sleep(0.2)
        assert states(pool) == ["ready", "unloaded"] and pool.slots[1].loads == 0


async def test_waiting_has_bounds() -> None:
    models = FakeModels()
    async with started(models, max_waiting=2, timeout=0.1) as pool:
        models.held.clear()
        found = await asyncio.gather(*(use(pool, "a") for _ in range(3)), return_exceptions=True)
        assert [type(each) for each in found] == [TimedOut, TimedOut, Overloaded]
        models.held.set()


async def test_a_stop_refuses_who_waits_and_loads_nothing_more() -> None:
    """At once, and clients may retry: another server may answer."""
    models, done = FakeModels(), asyncio.Event()
    async with started(models) as pool:
        busy, other = await use_one_and_wait_for_another(pool, done)
        pool.drain_all()
        for late in (other, use(pool, "b")):
            with pytest.raises(Draining) as refused:
                await asyncio.wait_for(late, 10)
            assert refused.value.retry_after
        done.set()
        await busy
        await asyncio.sleep(0.2)  # longer than the patience for busy models
        assert pool.slots[1].loads == 0 and len(models.lives) == 1


async def test_a_stop_refuses_who_waits_for_a_load_that_has_begun(caplog: pytest.LogCaptureFixture) -> None:
    """The load ends with the server, which is no failure of the model."""
    models = FakeModels()
    async with started(models) as pool:
        models.held.clear()
        waiting = asyncio.create_task(use(pool, "a"))
        await until(lambda: models.lives)
        pool.drain_all()
        with pytest.raises(Draining):
            await asyncio.wait_for(waiting, 10)
        models.broken.add("a")
        models.held.set()
        await until(lambda: states(pool)[0] == "unloaded")
        assert pool.slots[0].error is None and "broken" not in caplog.text


async def test_unloading_waits_for_running_requests() -> None:
    models, done = FakeModels(), asyncio.Event()
    async with started(models) as pool:
        busy = asyncio.create_task(use(pool, "a", done))
        await until(lambda: pool.slots[0].running)
        unloading = asyncio.create_task(pool.unload(pool.slots[0]))
        await until(lambda: states(pool)[0] == "draining")
        assert not unloading.done()
        done.set()
        await asyncio.gather(busy, unloading)
        assert states(pool) == ["unloaded", "unloaded"]


async def test_unknown_names_suggest_the_nearest() -> None:
    async with started(FakeModels(names=("chat", "coder"))) as pool:
        with pytest.raises(
            NotFound, match=r"'chta' is not served here \(did you mean 'chat'\?\); the names are chat, coder$"
        ):
            pool.find("chta")


async def test_an_unknown_name_lists_those_of_the_list_of_models() -> None:
    async with started(FakeModels(names=("chat", "coder"))) as pool:
        slot: ModelSlot = pool.slots[0]
        assert slot.facts is not None
        slot.facts = replace(slot.facts, listed=[{"id": "chat"}, {"id": "tiny-9b"}])
        pool.slots[1].facts = None
        with pytest.raises(NotFound, match="is not served here; the names are chat, tiny-9b, coder$"):
            pool.find("nothing")


async def test_a_time_of_zero_unloads_at_once_and_holds_for_one_life(keep: float = 0.0) -> None:
    """As a request may ask; the next life has the time of the config."""
    async with started(FakeModels()) as pool:
        slot: ModelSlot = pool.slots[0]
        await pool.wait_loaded(slot)
        with pool.hold(slot):
            slot.keep_alive = keep
        await until(lambda: states(pool)[0] == "unloaded")
        assert slot.keep_alive is None


@pytest.mark.parametrize("turns", range(4))
async def test_it_ends_at_any_moment_after_a_request(turns: int) -> None:
    """Also if what decides has just been told of the end of the request, while it waited for a time."""
    models = FakeModels(keep_alive={"a": 3600.0})
    async with started(models) as pool:
        await use(pool, "a")
        await asyncio.sleep(0.1)
        with pool.hold(pool.slots[0]):
            pass
        for _ in range(turns):
            await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE):
            await pool.close()
