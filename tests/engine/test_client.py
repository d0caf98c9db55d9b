"""The asyncio client over a scripted runner: answers, cancellation, endings."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from contextlib import aclosing
from functools import reduce
from typing import Any

import pytest

from mlxrun.core.errors import EngineDead, MlxrunError, Overloaded, PromptTooLong, RequestError
from mlxrun.core.request import FinishReason, HitKind, Request, TokenEvent, TokenLogprob
from mlxrun.core.step_plan import PinnedPrefix
from mlxrun.engine.client import Collector
from mlxrun.engine.scheduler.prefix_cache_interface import NoPrefixCache
from mlxrun.engine.thread import Abort, StopEngine
from tests.helpers.engine_bench import Bench, after_steps, bench, engine_threads, until
from tests.helpers.engine_fakes import (
    FakeRunner,
    Gate,
    compute_answer,
    make_model_info,
    make_request,
    make_settings,
    merge_events,
)

# -- answers --------------------------------------------------------------------------------------------


async def test_many_requests_get_their_own_answers() -> None:
    """Together, with every call of the runner on the one thread that built it."""
    requests = [make_request(f"r{i}", 1 + 3 * i, 1 + i) for i in range(12)]
    async with bench() as b:
        answers = await asyncio.gather(*(b.answer(r) for r in requests))
        assert answers == [compute_answer(r) for r in requests]
        await b.settle()
    assert len(b.runner.threads) == 1
    assert threading.get_ident() not in b.runner.threads
    assert not any(isinstance(message, Abort) for message in b.sent)


async def test_model_info_is_available_after_start() -> None:
    async with bench() as b:
        assert b.client.model_info == b.engine.model_info
        assert b.client.model_info.name == make_model_info().name
        assert b.client.dead_error is None


async def test_a_slow_reader_gets_everything_in_one_event() -> None:
    """Each request has one slot, and no other request waits for its reader."""
    request, gate = make_request("slow", 9, 300), Gate(5)
    async with bench(FakeRunner(before=gate)) as b, aclosing(b.client.generate(request)) as events:
        first = await anext(events)
        collector = b.client._collectors["slow"]
        gate.open()
        for i in range(5):
            other = make_request(f"r{i}", 5, 60)
            assert await b.answer(other) == compute_answer(other)
            assert isinstance(collector._event, TokenEvent)
        await until(lambda: "slow" not in b.client._collectors)
        rest = [event async for event in events]
        assert len(rest) == 1
        assert (first.tokens + rest[0].tokens, rest[0].finish) == compute_answer(request)


class Counted(tuple[int, ...]):
    """Tokens that count how many of them are copied."""

    copied = 0

    def __iter__(self) -> Any:
        Counted.copied += len(self)
        return super().__iter__()

    def __add__(self, other: Any) -> Counted:
        Counted.copied += len(self) + len(other)
        return Counted(tuple(self) + tuple(other))


def _stalled(count: int) -> tuple[TokenEvent, list[TokenEvent]]:
    """The event that a reader gets after this many unread events, and those events."""
    said = [TokenLogprob(-float(i)) for i in range(count)]
    events = [
        TokenEvent("a", Counted((i,)), (said[i],), num_computed_tokens=i // 2, num_cached_tokens=3)
        for i in range(count)
    ]
    events[count // 2] = events[count // 2]._replace(hit_kind=HitKind.LCP)
    events[-1] = events[-1]._replace(finish=FinishReason.LENGTH)
    collector = Collector()
    Counted.copied = 0
    for event in events:
        collector.put(event)
    return asyncio.run(collector.get()), events


def test_events_for_a_stalled_reader_cost_the_same_for_each_token() -> None:
    """Four times the events, four times the copies; merging them one by one takes sixteen times."""
    stalled, merged = {}, {}
    for count in (100, 400):
        got, events = _stalled(count)
        stalled[count] = Counted.copied
        Counted.copied = 0
        one_by_one = reduce(merge_events, events)
        merged[count] = Counted.copied
        assert got == one_by_one
        assert (got.tokens, got.hit_kind, got.finish) == (
            tuple(range(count)),
            HitKind.LCP,
            FinishReason.LENGTH,
        )
        assert len(got.logprobs) == count and (got.num_computed_tokens, got.num_cached_tokens) == (
            (count - 1) // 2,
            3,
        )
    assert stalled[400] == 4 * stalled[100]
    assert merged[400] > 15 * merged[100]


def test_a_slot_is_empty_after_it_was_read() -> None:
    """No event comes twice, and an error that replaces unread events leaves none of them."""
    collector = Collector()
    first, second = (
        TokenEvent("a", (1,), num_computed_tokens=4),
        TokenEvent("a", (2, 3), num_computed_tokens=4),
    )
    collector.put(first)
    assert asyncio.run(collector.get()) == first
    collector.put(second)
    assert asyncio.run(collector.get()) == second
    collector.put(first)
    collector.replace_with_error(error := RequestError("lost"))
    assert asyncio.run(collector.get()) == TokenEvent("", finish=FinishReason.ERROR, error=error)


async def test_events_are_sent_to_the_loop_once_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call_soon_threadsafe per step, however many requests have events."""
    loop = asyncio.get_running_loop()
    trace: list[str] = []
    plain = loop.call_soon_threadsafe

    def traced(call: Callable[..., Any], *args: Any, **options: Any) -> asyncio.Handle:
        if threading.current_thread().name == "mlxrun-engine":
            trace.append(getattr(call, "__name__", ""))
        return plain(call, *args, **options)

    monkeypatch.setattr(loop, "call_soon_threadsafe", traced)
    runner = FakeRunner(before=lambda plan: trace.append("step"))
    requests = [make_request(f"r{i}", 20, 40) for i in range(8)]
    async with bench(runner, make_settings(max_running=8)) as b:
        answers = await asyncio.gather(*(b.answer(r) for r in requests))
        assert answers == [compute_answer(r) for r in requests]
    assert trace.count("step") == len(runner.plans)
    assert trace.pop(0) == "_on_ready"
    assert set(trace) == {"step", "_on_events"}
    assert all(pair != ("_on_events", "_on_events") for pair in zip(trace, trace[1:], strict=False))
    assert 40 < trace.count("_on_events") < 70


# -- the consumer leaves --------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(10))
@pytest.mark.parametrize("where", ["at the engine's", "at its own"])
async def test_cancelling_aborts_within_a_step(where: str, steps: int) -> None:
    """Cancelled at each await point, while the request waits, prefills or decodes: no table keeps
    it, and no more of it is computed than the step under way."""
    gate = Gate()
    runner = FakeRunner(before=gate)
    async with bench(runner, make_settings(prefill_budget=4, prefill_budget_busy=4)) as b:

        async def read() -> None:
            async with aclosing(b.client.generate(make_request("a", 20, 5))) as events:
                async for _ in events:
                    if where == "at its own":
                        await asyncio.Event().wait()

        reader = asyncio.create_task(read())
        await after_steps(runner, gate, steps)
        assert gate.waiting == steps + 1
        reader.cancel()
        await asyncio.wait([reader])
        assert reader.cancelled()
        await b.settle()
        names = [{*plan.decode, *(c.request_id for c in plan.prefill)} for plan in runner.plans]
        assert "a" in names[steps]
        assert not any("a" in named for named in names[steps + 1 :])
        assert [i for i, plan in enumerate(runner.plans) if "a" in plan.free] == [steps + 1]


async def test_a_consumer_that_raises_leaves_nothing() -> None:
    """An error on the reader's side, such as a stop string's parser, ends the request too."""
    async with bench() as b:
        for at in range(5):
            with pytest.raises(KeyError):
                async with aclosing(b.client.generate(make_request(f"r{at}", 9, 50 + at))) as events:
                    async for event in events:
                        if event.tokens or at == 0:
                            raise KeyError
            await b.settle()


async def test_a_generator_that_never_ran_leaves_nothing() -> None:
    """The request is sent by the first `anext`."""
    async with bench() as b:
        events = b.client.generate(make_request("a"))
        await events.aclose()
        task = asyncio.create_task(b.answer(make_request("b")))
        task.cancel()
        await asyncio.wait([task])
        assert b.sent == []
        await b.settle()


async def test_a_consumer_that_stops_at_the_end_sends_no_abort() -> None:
    """Break at `finish`, and break before it while the end lies unread."""
    gate = Gate(1)
    async with bench(FakeRunner(before=gate)) as b:
        events = b.client.generate(make_request("unread"))
        assert (await anext(events)).finish is None
        gate.open()
        await until(lambda: "unread" not in b.client._collectors)
        await events.aclose()
        events = b.client.generate(make_request("read"))
        async for event in events:
            if event.finish:
                break
        await events.aclose()
        await b.settle()
        assert not any(isinstance(message, Abort) for message in b.sent)


async def test_an_id_is_free_once_its_request_has_ended() -> None:
    """Refused while the engine may still speak of it; then the new request gets only its own events."""
    gate = Gate()
    async with bench(FakeRunner(before=gate)) as b:
        first = asyncio.create_task(b.answer(make_request("a", 6, 4)))
        await after_steps(b.runner, gate, 2)
        with pytest.raises(RequestError, match="'a' is already running"):
            await b.answer(make_request("a", 6, 4))
        first.cancel()
        await asyncio.wait([first])
        with pytest.raises(RequestError, match="'a' is already running"):
            await b.answer(make_request("a", 6, 4))
        await b.settle()
        fresh = Request("a", (5, 6, 7), make_request(max_tokens=3).params)
        events = b.client.generate(fresh)
        got = await anext(events)
        while got.finish is None:
            got = merge_events(got, await anext(events))
        assert (got.tokens, got.finish) == compute_answer(fresh)
        # Its consumer is still there; the id is free all the same, and what it does then is no abort.
        again = asyncio.create_task(b.answer(fresh))
        await asyncio.sleep(0)
        await events.aclose()
        assert await again == compute_answer(fresh)


async def test_two_hundred_random_aborts() -> None:
    """During waiting, prefill and decode; those who stay get the right tokens."""
    choose = random.Random(22)
    requests = [make_request(f"r{i}", choose.randint(1, 60), choose.randint(1, 30)) for i in range(260)]
    leaving = {r.id: choose.randint(0, 6) for r in choose.sample(requests, 200)}
    ended: list[str] = []

    async def consume(b: Bench, request: Request) -> None:
        tokens: tuple[int, ...] = ()
        async with aclosing(b.client.generate(request)) as events:
            left = leaving.get(request.id)
            async for event in events:
                tokens += event.tokens
                if left is not None and (left := left - 1) < 0:
                    return
        assert (tokens, event.finish) == compute_answer(request)
        ended.append(request.id)

    async with bench(settings=make_settings(max_queue=1000)) as b:
        tasks = [asyncio.create_task(consume(b, r)) for r in requests]
        for request, task in zip(requests, tasks, strict=True):
            if leaving.get(request.id) == 0:
                await asyncio.sleep(0)
                task.cancel()
        await asyncio.wait(tasks)
        assert [t.exception() for t in tasks if not t.cancelled() and t.exception()] == []
        assert {r.id for r in requests} - set(leaving) <= set(ended)
        await b.settle()
    assert len(b.runner.threads) == 1


# -- errors of one request ------------------------------------------------------------------------------


async def test_refusals_are_raised() -> None:
    """A refusal is raised in place of an event, and leaves nothing behind."""
    gate = Gate()
    runner = FakeRunner(before=gate, refuse={"bad": ValueError("no image")})
    async with bench(runner, make_settings(max_running=1, max_queue=1)) as b:
        first = asyncio.create_task(b.answer(make_request("a")))
        await after_steps(runner, gate, 1)
        waits = asyncio.create_task(b.answer(make_request("bad")))
        await asyncio.sleep(0)
        full = asyncio.create_task(b.answer(make_request("c")))
        long = asyncio.create_task(b.answer(make_request("d", 5000)))
        await asyncio.sleep(0)
        gate.open()
        with pytest.raises(Overloaded):
            await full
        with pytest.raises(PromptTooLong, match="5000 tokens"):
            await long
        with pytest.raises(RequestError, match="no image"):
            await waits
        assert await first == compute_answer(make_request("a"))
        await b.settle()
        assert not any(isinstance(message, Abort) for message in b.sent)


async def test_an_error_comes_after_the_tokens_before_it() -> None:
    """Of four requests one fails in the middle of its answer."""
    requests = [make_request(rid, 6, 12) for rid in "abcd"]
    async with bench(FakeRunner(poison={"c": 12})) as b:
        results = await asyncio.gather(*(b.answer(r) for r in requests), return_exceptions=True)
        assert [r for i, r in enumerate(results) if i != 2] == [
            compute_answer(r) for r in requests if r.id != "c"
        ]
        assert isinstance(results[2], RequestError)
        tokens: tuple[int, ...] = ()
        with pytest.raises(RequestError, match="c cannot be computed"):
            async for event in b.client.generate(requests[2]):
                tokens += event.tokens
        assert tokens == compute_answer(requests[2])[0][:5]
        await b.settle()


# -- the engine ends ------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
async def test_a_dead_engine_fails_all_requests(late: bool) -> None:
    """Waiters get a 5xx at once, later requests too; the thread has ended and computes no more."""
    runner = FakeRunner(late=late)
    async with bench(runner, make_settings(max_running=2)) as b:
        assert await b.answer(make_request("ok")) == compute_answer(make_request("ok"))
        runner.dead = True
        before = len(runner.plans)
        results = await asyncio.gather(
            *(b.answer(make_request(f"r{i}")) for i in range(6)), return_exceptions=True
        )
        assert all(isinstance(error, MlxrunError) and error.http_status >= 500 for error in results)
        assert sum(isinstance(error, EngineDead) for error in results) >= 4
        await until(lambda: engine_threads() == [])
        assert isinstance(b.client.dead_error, EngineDead)
        with pytest.raises(EngineDead, match="3 steps failed in a row"):
            await b.answer(make_request("later"))
        assert len(runner.plans) - before < 12
        assert runner.resets == 3
        assert b.client._collectors == {}


async def test_the_engine_stops_at_exit_without_a_worker_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench() as b:
        assert engine_threads()
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "to_thread", None)
            b.client.stop_at_exit()
        assert not engine_threads()


@pytest.mark.parametrize("cancel", [False, True])
async def test_close_ends_running_requests(cancel: bool) -> None:
    """Everybody gets one end; an answer that is complete stays what it is. Also if `close` itself
    is cancelled."""
    gate = Gate()
    runner = FakeRunner(before=gate)
    async with bench(runner) as b:
        done = b.client.generate(make_request("done", 3, 1))
        first = asyncio.create_task(anext(done))
        await asyncio.sleep(0)
        waiters = [asyncio.create_task(b.answer(make_request(f"r{i}", 30, 90))) for i in range(6)]
        await asyncio.sleep(0)
        await after_steps(runner, gate, 4)
        close = asyncio.create_task(b.client.close())
        await asyncio.sleep(0)
        if cancel:
            close.cancel()
        late = asyncio.create_task(b.answer(make_request("late")))
        await asyncio.sleep(0)
        gate.open()
        await asyncio.wait([close])
        results = await asyncio.gather(*waiters, late, return_exceptions=True)
        assert [type(error) for error in results] == [EngineDead] * 7
        event = await first
        while event.finish is None:
            event = merge_events(event, await anext(done))
        assert (event.tokens, event.finish) == compute_answer(make_request("done", 3, 1))
        with pytest.raises(EngineDead, match="closed"):
            await b.answer(make_request("later"))
        await b.client.close()
        assert b.client._collectors == {}
        assert len([message for message in b.sent if isinstance(message, StopEngine)]) == 2


# -- pinned prefixes ------------------------------------------------------------------------------------


class StoredLater(NoPrefixCache):
    """A prefix cache that has `counts` tokens of a prompt, one number at each look, and pins what it has."""

    def __init__(self, *counts: int) -> None:
        self.left = list(counts)
        self.pinned: list[int] = []

    def count_cached(self, request: Request) -> int:
        return self.left.pop(0) if len(self.left) > 1 else self.left[0]

    def pin_prefix(self, request: Request, stop: int, name: str) -> PinnedPrefix:
        self.pinned.append(self.left[0])
        return PinnedPrefix("5f", name, self.left[0], 1, 0)


@pytest.mark.parametrize(
    ("counts", "pending", "tokens"),
    [((9,), True, 9), ((0, 4, 9), True, 9), ((4,), False, 4)],
    ids=["stored", "stored later", "no more will be stored"],
)
async def test_a_prefix_is_pinned_once_it_is_stored(
    counts: tuple[int, ...], pending: bool, tokens: int
) -> None:
    """A part of it that is stored first is not pinned by itself."""
    async with bench() as b:
        cache = StoredLater(*counts)
        b.engine.scheduler.prefix_cache = cache
        b.runner.has_pending_snapshots = pending
        pinned = await b.client.pin_prefix(make_request("a", 10), 9, "agent")
        assert pinned is not None and (pinned.name, pinned.tokens, cache.pinned) == (
            "agent",
            tokens,
            [tokens],
        )
        b.runner.has_pending_snapshots = False


async def test_a_prefix_that_is_never_stored_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxrun.engine.client.PIN_SECONDS", 0.0)
    async with bench() as b:
        cache = b.engine.scheduler.prefix_cache = StoredLater(3)
        b.runner.has_pending_snapshots = True
        pinned = await b.client.pin_prefix(make_request("a", 10), 9, "agent")
        assert pinned is not None and cache.pinned == [3]
        b.runner.has_pending_snapshots = False
