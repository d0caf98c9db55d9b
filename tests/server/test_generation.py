"""The server before the real EngineClient: over a scripted runner, and over the embedded model."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest

from mlxrun.config.settings import CacheSettings, Config, ModelSettings, SchedulerSettings, ServerSettings
from mlxrun.core.errors import Cancelled, EngineDead
from mlxrun.engine.client import EngineClient
from mlxrun.engine.engine import Engine
from mlxrun.server.endpoints import admin
from tests.helpers.engine_bench import after_steps, bench
from tests.helpers.engine_fakes import FakeRunner, Gate, compute_answer, make_engine, make_request
from tests.helpers.raw_clients import connect, cut, until
from tests.helpers.server_fakes import MINI, make_chat_body, run_server
from tests.helpers.tokenizers import FakeModelInfo

pytestmark = pytest.mark.usefixtures("probed_once")

ONLY = [MINI, admin.SURFACE]


# -- the client -----------------------------------------------------------------------------------------


async def test_a_request_is_failed_from_outside() -> None:
    """What has come is still read; then the error; the row is free within a step."""
    gate = Gate()
    async with bench(FakeRunner(before=gate)) as b:
        request = make_request("a", 4, 50)
        events = b.client.generate(request)
        first = asyncio.create_task(anext(events))
        await after_steps(b.runner, gate, 4)
        got = await first
        await after_steps(b.runner, gate, 2)
        b.client.fail("a", Cancelled("enough"))
        await after_steps(b.runner, gate, 3)
        tokens = list(got.tokens)
        with pytest.raises(Cancelled, match="enough"):
            async for event in events:
                tokens += event.tokens
        assert tuple(tokens) == compute_answer(request)[0][: len(tokens)]
        assert tokens
        await b.settle()


async def test_failing_or_aborting_an_unknown_request_does_nothing() -> None:
    async with bench() as b:
        b.client.fail("nobody", Cancelled("x"))
        b.client.abort("nobody")
        assert b.sent == []
        request = make_request("a", 4, 4)
        assert await b.answer(request) == compute_answer(request)
        b.client.fail("a", Cancelled("x"))
        assert await b.answer(request) == compute_answer(request)
        await b.settle()


async def test_an_error_is_not_lost_in_what_comes_after_it() -> None:
    """Events that the engine sends before it hears of the abort do not overwrite the reason."""
    gate = Gate()
    async with bench(FakeRunner(before=gate)) as b:
        events = b.client.generate(make_request("a", 4, 50))
        task = asyncio.create_task(anext(events))
        await after_steps(b.runner, gate, 4)
        await task
        put, b.client._thread.send = b.client._thread.send, lambda message: None  # type: ignore[method-assign]
        b.client.fail("a", Cancelled("enough"))  # the thread does not hear of it
        await after_steps(b.runner, gate, 3)
        b.client._thread.send = put  # type: ignore[method-assign]
        with pytest.raises(Cancelled):
            async for _ in events:
                pass
        b.client.abort("a")
        await b.settle()


async def test_the_engine_is_queried_between_two_steps() -> None:
    """On its own thread, also while it is idle."""
    async with bench() as b:
        threads: list[int] = []
        await b.client._call_engine(lambda engine: threads.append(threading.get_ident()))
        assert threads == list(b.runner.threads)
        with pytest.raises(KeyError):
            await b.client._call_engine(lambda engine: {}["nothing"])
        await b.settle()


async def test_queries_to_a_dead_engine_raise() -> None:
    gate = Gate()
    runner = FakeRunner(dead=True, before=gate)
    engine = await EngineClient.start_with(lambda: make_engine(runner, max_errors=1))
    died = asyncio.create_task(engine.wait_until_dead())
    task = asyncio.create_task(anext(engine.generate(make_request("a"))))
    await until(lambda: gate.waiting == 1)
    received = asyncio.create_task(engine.clear_cache())
    await asyncio.sleep(0)
    assert not died.done()
    gate.open()
    for waiting in (task, received):
        with pytest.raises(EngineDead):
            await waiting
    assert "steps failed in a row" in str(await died)
    with pytest.raises(EngineDead):
        await engine.clear_cache()
    await engine.close()


async def test_queries_to_a_closed_engine_raise() -> None:
    async with bench() as b:
        pass
    with pytest.raises(EngineDead, match="closed"):
        await b.client.clear_cache()


# -- the server over it ---------------------------------------------------------------------------------


def engine_of(runner: FakeRunner, **options: Any) -> Engine:
    """An engine whose host has a tokenizer, so that its tokens are text."""
    engine = make_engine(runner, **options)
    host = FakeModelInfo()
    engine.model_info = dataclasses.replace(
        engine.model_info, tokenizer=host.tokenizer, chat_template=host.chat_template, context_length=1000
    )
    return engine


async def test_the_event_loop_is_never_blocked() -> None:
    """While long prompts are prefilled and bodies come in, /health answers, and soon. The engine is held
    at a gate; a health check that waited for it would never end."""
    gate = Gate()
    runner = FakeRunner(before=gate)
    client = await EngineClient.start_with(lambda: engine_of(runner))
    try:
        async with run_server(surfaces=ONLY, engine=client) as s:
            received = [asyncio.create_task(s.post("/mini", make_chat_body(max_tokens=3))) for _ in range(4)]
            await until(lambda: gate.waiting == 1)
            for _ in range(20):
                assert (await s.get("/health")).status == 200
            assert (await s.get("/metrics")).status == 200
            assert not any(task.done() for task in received)
            gate.open()
            assert [(await task).status for task in received] == [200] * 4
            await s.settle()
    finally:
        gate.open()
        await client.close()


async def test_bodies_are_prepared_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that takes for ever holds up its own request only."""
    gate = threading.Event()
    from mlxrun.api.openai import request as openai

    original = openai.build_chat_prompt

    def slow(*args: Any, **kwargs: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        gate.wait(60)
        return original(*args, **kwargs)

    monkeypatch.setattr(openai, "build_chat_prompt", slow)
    async with run_server(surfaces=ONLY) as s:
        received = asyncio.create_task(s.post("/mini", make_chat_body()))
        await until(lambda: s.active)
        for _ in range(20):
            assert (await s.get("/health")).status == 200
        gate.set()
        assert (await received).status == 200


async def test_an_engine_that_dies_in_a_step() -> None:
    """Through the real client and thread, waiters of all kinds."""
    gate = Gate()
    runner = FakeRunner(before=gate)
    client = await EngineClient.start_with(lambda: engine_of(runner, max_errors=1))
    try:
        async with run_server(surfaces=ONLY, engine=client) as s:
            received = [
                asyncio.create_task(s.post("/mini", make_chat_body(max_tokens=100, stream=stream)))
                for stream in (False, True)
            ]
            await until(lambda: len(s.live) == 2)
            gate.let_pass(4)
            await until(lambda: gate.waiting == 5)
            runner.dead = True
            gate.open()
            whole, stream = [await task for task in received]
            assert (whole.status, whole.json["mini"]) == (503, "engine_unavailable")
            assert stream.status == 503 or stream.events[-1][1] == {"error": "engine_unavailable"}
            assert (await s.get("/health")).status == 503
            await s.settle()
    finally:
        gate.open()
        await client.close()


async def test_clients_disconnect_from_a_server_with_a_real_engine_client() -> None:
    """Rows and tables of the engine are empty afterwards."""
    runner = FakeRunner(sleep=0.0005)
    made: list[Engine] = []

    def build() -> Engine:
        made.append(engine_of(runner))
        return made[0]

    client = await EngineClient.start_with(build)
    try:
        async with run_server(surfaces=ONLY, engine=client) as s:

            async def one(number: int) -> None:
                _, writer = await connect(
                    s, make_chat_body(max_tokens=200, stream=number % 2 == 0, n=1 + number % 3)
                )
                await asyncio.sleep(number * 0.001)
                cut(writer)

            for _ in range(4):
                await asyncio.gather(*(one(number) for number in range(12)))
            await s.settle()
            await until(lambda: made[0].scheduler.requests == ())
            await until(lambda: client._collectors == {})
            reply = await s.post("/mini", make_chat_body(max_tokens=5))
            assert reply.status == 200
            await until(lambda: not runner.rows)
            assert runner.broken == []
    finally:
        await client.close()


# -- the embedded model ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedded() -> Any:
    from mlxrun.model.load.model_info import load_model_info

    return load_model_info(ModelSettings(), weights=True)


async def real(host: Any, cache: CacheSettings) -> EngineClient:
    return await EngineClient.start(Config(cache=cache, scheduler=SchedulerSettings(chunk=32)), host)


@pytest.mark.parametrize("backend", ["memory", "disk"])
async def test_the_cache_is_cleared(embedded: Any, tmp_path: Path, backend: Any) -> None:
    """A request finds what an earlier one computed, until the cache is cleared; on disk too."""
    path = str(tmp_path / "cache") if backend == "disk" else None
    client = await real(embedded, CacheSettings(backend=backend, disk_path=path))
    try:
        async with run_server(Config(server=ServerSettings(port=0)), surfaces=ONLY, engine=client) as s:
            body = make_chat_body(
                messages=[{"role": "user", "content": "What is 2 + 3? " * 12}], max_tokens=2
            )

            async def ask() -> int:
                before = client.read_cache_counters()["tokens"]
                assert (await s.post("/mini", body)).status == 200
                return client.read_cache_counters()["tokens"] - before

            assert await ask() == 0
            assert await ask() > 32
            held = (await s.get("/v1/cache")).json
            assert held["entries"] > 0
            reply = (await s.request("DELETE", "/v1/cache")).json
            assert reply["freed"]["entries"] == held["entries"]
            assert (reply["cache"]["entries"], reply["cache"]["memory_bytes"]) == (0, 0)
            await until(lambda: client.read_cache_counters()["disk_bytes"] == 0)
            assert await ask() == 0
            assert await ask() > 32
    finally:
        await client.close()


async def test_the_status_of_a_real_engine(embedded: Any) -> None:
    client = await real(embedded, CacheSettings())
    try:
        async with run_server(surfaces=ONLY, engine=client) as s:
            assert (await s.post("/mini", make_chat_body())).status == 200
            status = (await s.get("/v1/status")).json
            assert status["load_check"]["decode"] == "ragged"
            assert all(check["passed"] for check in status["load_check"]["checks"])
            assert status["memory"]["active"] > 1_000_000
            assert status["memory"]["limit"] > status["memory"]["active"]
            assert status["steps"] > 0
            assert status["cache"]["miss"] == 1
    finally:
        await client.close()
