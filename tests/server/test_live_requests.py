"""The life of a request: disconnects, timeouts, cancelling, the engine's death."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

import pytest

from mlxrun.core.errors import EngineDead
from mlxrun.core.request import HitKind, Request, TokenEvent
from mlxrun.core.visible_text import FIELDS
from tests.helpers.engine_fakes import Clock
from tests.helpers.raw_clients import ONLY, connect, cut, until
from tests.helpers.server_fakes import (
    Act,
    FakeEngine,
    Reply,
    Serving,
    make_chat_body,
    make_script,
    run_server,
    server_config,
)
from tests.helpers.timers import fire_timers

# -- disconnects ----------------------------------------------------------------------------------------

PREFILL = TokenEvent("", num_computed_tokens=5)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    "before", [(), (PREFILL,), (PREFILL, "some text")], ids=["queued", "prefill", "decode"]
)
async def test_a_disconnected_client_ends_its_request(stream: bool, n: int, before: tuple[Any, ...]) -> None:
    """Queued, prefilling or decoding, streaming or not: aborted, and nothing is left."""
    forever = asyncio.Event()
    async with run_server(surfaces=ONLY, script=make_script(*before, forever.wait)) as s:
        _, writer = await connect(s, make_chat_body(stream=stream, n=n))
        await until(lambda: len(s.engine.running) == n)
        phase = "queued" if not before else "prefill" if len(before) == 1 else "decode"
        await until(lambda: [live.phase for live in s.live] == [phase])
        cut(writer)
        await s.settle()
        assert sorted(s.engine.aborted) == sorted(request.id for request in s.engine.requests)
        assert (await s.get("/health")).status == 200


async def test_a_client_that_closes_in_order_ends_its_request() -> None:
    forever = asyncio.Event()
    async with run_server(surfaces=ONLY, script=make_script("x", forever.wait)) as s:
        reader, writer = await connect(s, make_chat_body(stream=True))
        await reader.readuntil(b"data: ")
        writer.close()
        await s.settle()
        assert len(s.engine.aborted) == 1


async def test_many_clients_disconnect_at_random() -> None:
    """At whatever moment, before the body is complete too: the tables are empty afterwards."""
    rng = random.Random(4)

    async def one(s: Serving) -> None:
        _, writer = await connect(s, make_chat_body(stream=rng.random() < 0.5, n=rng.choice((1, 1, 2))))
        for _ in range(rng.randrange(30)):
            await asyncio.sleep(0)
        cut(writer)

    async with run_server(surfaces=ONLY, script=make_script(PREFILL, "a b c d e f g h" * 5)) as s:
        for _ in range(20):
            await asyncio.gather(*(one(s) for _ in range(10)))
        await s.settle()
        reply = await s.post("/mini", make_chat_body())
        assert reply.json["texts"] == ["a b c d e f g h" * 5]


async def test_a_complete_answer_aborts_nothing() -> None:
    """The twin of the tests above."""
    async with run_server(surfaces=ONLY) as s:
        for stream in (False, True):
            for n in (1, 3):
                await s.post("/mini", make_chat_body(stream=stream, n=n))
        await s.settle()
        assert s.engine.aborted == []


# -- timeouts and cancelling ----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3])
async def test_a_request_that_takes_too_long(n: int) -> None:
    forever = asyncio.Event()
    config = server_config(request_timeout=3600.0)
    async with run_server(config, surfaces=ONLY, script=make_script("ab", forever.wait)) as s:

        async def post(**fields: Any) -> Reply:
            received = asyncio.create_task(s.post("/mini", make_chat_body(n=n, **fields)))
            await until(lambda: sum(live.output_tokens for live in s.live) == 2 * n)
            fire_timers("LiveRequest.fail")
            return await received

        reply = await post()
        assert (reply.status, reply.json["mini"]) == (504, "request_timeout")
        assert "server.request_timeout" in reply.json["text"]
        reply = await post(stream=True)
        assert reply.status == 200
        assert reply.events[-1] == (None, {"error": "request_timeout"})
        await s.settle()
        assert len(set(s.engine.aborted)) == 2 * n


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_request_is_cancelled_by_its_id(stream: bool, n: int) -> None:
    forever = asyncio.Event()
    async with run_server(surfaces=ONLY, script=make_script("ab", forever.wait)) as s:
        received = asyncio.create_task(s.post("/mini", make_chat_body(stream=stream, n=n), x_request_id="it"))
        await until(lambda: len(s.engine.running) == n and next(iter(s.live)).output_tokens == 2 * n)
        reply = await s.post("/v1/requests/it/cancel", b"")
        assert reply.json == {"id": "it", "cancelled": True}
        reply = await received
        if stream:
            assert reply.events[-1] == (None, {"error": "request_cancelled"})
        else:
            assert (reply.status, reply.json["mini"]) == (499, "request_cancelled")
        await s.settle()
        reply = await s.post("/v1/requests/it/cancel", b"")
        assert (reply.status, reply.json["error"]["code"]) == (404, "not_found")


# -- long prompts ---------------------------------------------------------------------------------------


async def test_a_long_prefill_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """After 10 seconds of it and every 30 seconds then, with an estimate; the time in the queue is none."""
    caplog.set_level(logging.INFO, "mlxrun.server.live_requests")
    clock = Clock()

    def pass_time(seconds: float, computed: int) -> Any:
        async def act() -> None:
            await until(lambda: [live.computed_tokens for live in s.live] == [computed])
            clock.now += seconds

        return act

    def report(computed: int) -> TokenEvent:
        return TokenEvent(
            "", num_computed_tokens=computed, num_cached_tokens=4, hit_kind=HitKind.LCP, queue_seconds=100.0
        )

    acts = (report(4), pass_time(109, 4), report(6), pass_time(3, 6), report(8), pass_time(29, 8), report(9))
    acts += (pass_time(2, 9), report(12), pass_time(100, 12), report(20), pass_time(100, 20), "a")
    async with run_server(surfaces=ONLY, script=make_script(*acts), clock=clock) as s:
        assert (await s.post("/mini", make_chat_body(), x_request_id="it")).status == 200
    assert [record.getMessage() for record in caplog.records] == [
        "it prefill 8/20 tokens after 12 s, about 36 s left",
        "it prefill 12/20 tokens after 43 s, about 43 s left",
    ]
    fields = vars(caplog.records[0])[FIELDS]
    assert (fields["request_id"], fields["computed_tokens"], fields["prompt_tokens"]) == ("it", 8, 20)
    assert (fields["prefill_ms"], fields["remaining_ms"]) == (12_000.0, 36_000.0)


# -- the engine's death ---------------------------------------------------------------------------------


async def test_a_key_cancels_only_its_own_requests() -> None:
    """Another key's request is as one that is not there, and runs on."""
    gate = asyncio.Event()
    config = server_config(api_keys={"a": "secret-a", "b": "secret-b"})
    mine, other = {"x_api_key": "secret-a"}, {"x_api_key": "secret-b"}
    async with run_server(config, surfaces=ONLY, script=make_script("a", gate.wait, "b")) as s:
        received = asyncio.create_task(s.post("/mini", make_chat_body(), x_request_id="it", **mine))
        await until(lambda: len(s.live) == 1)
        reply = await s.post("/v1/requests/it/cancel", b"", **other)
        missing = await s.post("/v1/requests/that/cancel", b"", **other)
        assert reply.status == missing.status == 404
        assert reply.body.replace(b"'it'", b"'that'") == missing.body
        assert s.engine.aborted == []
        assert (await s.post("/v1/requests/it/cancel", b"", **mine)).status == 200
        assert (await received).status == 499


async def test_the_death_of_the_engine_ends_all_requests() -> None:
    """Waiters get 503 in their surface's shape, later ones too, and /health says why."""
    forever = asyncio.Event()
    async with run_server(surfaces=ONLY, script=make_script("ab", forever.wait)) as s:
        received = [asyncio.create_task(s.post("/mini", make_chat_body(stream=i % 2 == 1))) for i in range(6)]
        await until(lambda: sum(live.output_tokens for live in s.live) == 12)
        s.engine.die(EngineDead("the device is gone"))
        for i, task in enumerate(received):
            reply = await asyncio.wait_for(task, 60)
            if i % 2:
                assert reply.events[-1] == (None, {"error": "engine_unavailable"})
            else:
                assert (reply.status, reply.json["mini"]) == (503, "engine_unavailable")
        reply = await s.post("/mini", make_chat_body())
        assert (reply.status, reply.json["text"]) == (503, "the device is gone")
        for path in ("/health", "/health/ready", "/health/live"):
            reply = await s.get(path)
            assert reply.status == 503
            assert (reply.json["status"], reply.json["reason"]) == ("dead", "the device is gone")
        assert (await s.get("/v1/status")).json["status"] == "dead"
        await s.settle()


# -- what is known of it --------------------------------------------------------------------------------


async def test_the_status_of_each_phase() -> None:
    """Phase, progress, TTFT, tokens a second, hit kind, by a scripted clock."""
    clock = Clock()
    gates = [asyncio.Event() for _ in range(4)]
    hit = TokenEvent("", num_computed_tokens=8, num_cached_tokens=8, hit_kind=HitKind.PREFIX)
    script = make_script(gates[0].wait, hit, gates[1].wait, "a", gates[2].wait, "bcd", gates[3].wait)
    async with run_server(surfaces=ONLY, script=script, clock=clock) as s:
        received = asyncio.create_task(s.post("/mini", make_chat_body(), x_request_id="it"))
        await until(lambda: len(s.live) == 1)
        row = (await s.get("/v1/status")).json["requests"][0]
        assert (row["id"], row["surface"], row["phase"], row["progress"]) == ("it", "mini", "queued", 0)
        assert (row["ttft"], row["tokens_per_second"], row["hit"]) == (None, None, None)
        (live,) = s.live
        clock.now += 2
        gates[0].set()
        await until(lambda: live.phase == "prefill")
        row = (await s.get("/v1/status")).json["requests"][0]
        assert (row["phase"], row["progress"], row["computed_tokens"]) == ("prefill", 0.4, 8)
        assert (row["hit"], row["cached_tokens"], row["prompt_tokens"]) == ("prefix", 8, 20)
        assert live.describe_progress() == "prefill 8/20"
        clock.now += 1
        gates[1].set()
        await until(lambda: live.phase == "decode")
        clock.now += 1.5
        gates[2].set()
        await until(lambda: live.output_tokens == 4)
        status = (await s.get("/v1/status")).json
        row = status["requests"][0]
        assert (row["phase"], row["ttft"], row["tokens_per_second"]) == ("decode", 3.0, 2.0)
        assert (row["age"], row["output_tokens"], row["progress"]) == (4.5, 4, 1.0)
        background = {"running": 0, "waiting": 0}
        assert status["queue"] == {
            "queued": 0,
            "prefill": 0,
            "decode": 1,
            "running": 1,
            "waiting": 0,
            "background": background,
        }
        gates[3].set()
        assert (await received).status == 200
        assert (await s.get("/v1/status")).json["requests"] == []


async def test_choices_of_one_prompt_count_it_once() -> None:
    gate = asyncio.Event()
    script = make_script(
        TokenEvent("", num_computed_tokens=20, num_cached_tokens=16, hit_kind=HitKind.EXACT), "ab", gate.wait
    )
    async with run_server(surfaces=ONLY, script=script) as s:
        received = asyncio.create_task(s.post("/mini", make_chat_body(n=3)))
        await until(lambda: len(s.live) == 1 and next(iter(s.live)).output_tokens == 6)
        (live,) = s.live
        assert (live.prompt_tokens, live.computed_tokens, live.cached_tokens) == (20, 20, 16)
        gate.set()
        await received


async def test_tokens_of_several_prompts_add_up() -> None:
    """Those that the prefix cache had of each, as in `usage`: metrics, logs and traces have this number."""
    gate, hits = asyncio.Event(), {"a": 16, "b": 9, "c": 0}

    def make_acts(request: Request) -> list[Act]:
        cached = hits[chr(request.prompt[-1])]
        kind = HitKind.PREFIX if cached else HitKind.MISS
        hit = TokenEvent("", (), (), len(request.prompt), cached, kind)
        return [hit, "ab", gate.wait]

    body = {"prompt": [letter * 20 for letter in hits], "n": 2, "max_tokens": 9}
    async with run_server(script=make_acts) as s:
        received = asyncio.create_task(s.post("/v1/completions", body))
        await until(lambda: [live.output_tokens for live in s.live] == [12])
        (live,) = s.live
        assert (live.prompt_tokens, live.computed_tokens, live.cached_tokens) == (63, 63, 25)
        gate.set()
        usage = (await received).json["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == live.cached_tokens


async def test_the_fake_engine_merges_unread_events() -> None:
    """The fake merges as the real client does, so that the tests above mean something."""
    engine = FakeEngine(script=make_script("abcdef"))
    async with run_server(surfaces=ONLY, engine=engine) as s:
        from mlxrun.api.openai.request import prepare_request

        prepared = await prepare_request("/v1/chat/completions", make_chat_body(), s.state.context)
        events = engine.generate(prepared.requests[0])
        first = await anext(events)
        await until(lambda: engine.scripts_done)
        rest = [event async for event in events]
        assert (len(first.tokens), [len(event.tokens) for event in rest]) == (1, [5])
