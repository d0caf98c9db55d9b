"""Clients of the embedded model that vanish at random moments, on all surfaces, and what is left: nothing but
the prefixes that were computed for them.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest

from mlxrun.config.settings import Config, SchedulerSettings, ServerSettings
from mlxrun.engine.client import EngineClient
from mlxrun.model.load.model_info import load_model_info
from tests.helpers.raw_clients import until
from tests.helpers.server_fakes import Serving, run_server
from tests.robustness.test_server_fuzz import empty, nothing_left
from tests.robustness.test_server_fuzz_bodies import CHAT, MESSAGES, RESPONSES

pytestmark = pytest.mark.usefixtures("probed_once")

CHUNK = 32
CONFIG = Config(
    server=ServerSettings(port=0),
    scheduler=SchedulerSettings(chunk=CHUNK, prefill_budget=64, prefill_budget_busy=32, max_running=6),
)
MOMENTS = ("half a body", "sent", "queued", "prefill", "decode", "a byte", "some bytes")
LANES = 12


@asynccontextmanager
async def site() -> AsyncIterator[Serving]:
    client = await EngineClient.start(CONFIG, load_model_info(CONFIG.model, weights=True))
    try:
        async with run_server(CONFIG, engine=client) as s:
            yield s
    finally:
        await client.close()


@dataclass
class Caller:
    """One client: what it asks, and when it vanishes. `computed`: how much of its prompt was done by then."""

    name: str
    path: str
    text: str
    stream: bool
    moment: str
    computed: int = 0

    def body(self, most: int = 40) -> dict[str, Any]:
        if self.path == RESPONSES:
            return {
                "input": self.text,
                "max_output_tokens": max(16, most),
                "stream": self.stream,
                "store": False,
            }
        named = {"model": "claude-x"} if self.path == MESSAGES else {}
        messages = [{"role": "user", "content": self.text}]
        return {"messages": messages, "max_tokens": most, "stream": self.stream, **named}


def callers(seed: int, count: int) -> list[Caller]:
    """Some share the beginning of their prompts."""
    rng = random.Random(seed)
    shared = "You know these numbers: " + " ".join(str(i) for i in range(30))

    def text() -> str:
        words = " ".join(f"word{rng.randrange(1000)}" for _ in range(rng.randrange(5, 90)))
        return f"{shared} {words}" if rng.random() < 0.5 else words

    return [
        Caller(
            f"caller-{seed}-{i}",
            rng.choice((CHAT, MESSAGES, RESPONSES)),
            text(),
            rng.random() < 0.6,
            rng.choice(MOMENTS),
        )
        for i in range(count)
    ]


async def call(s: Serving, caller: Caller) -> bool:
    """Ask, and vanish; whether it was before the answer had ended."""
    host, port = s.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(caller.body()).encode()
    head = f"POST {caller.path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"x-request-id: {caller.name}\r\n"
    raw = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
    writer.write(raw[: -len(data) // 2] if caller.moment == "half a body" else raw)
    await writer.drain()
    await wait_for(s, caller, reader)
    live = s.live.get(caller.name)
    if live is not None:
        caller.computed = live.computed_tokens
    writer.transport.abort()
    return live is not None or caller.moment in ("half a body", "sent")


async def wait_for(s: Serving, caller: Caller, reader: asyncio.StreamReader) -> None:
    """The moment, or the end if it does not come."""
    if caller.moment in ("queued", "prefill", "decode"):
        while True:
            live = s.live.get(caller.name)
            if live is None and reader._buffer:  # type: ignore[attr-defined]
                return  # it has been answered
            if live is not None and live.phase == caller.moment:
                return
            await asyncio.sleep(0.002)
    elif caller.moment == "a byte":
        await reader.read(1)
    elif caller.moment == "some bytes":
        with suppress(asyncio.IncompleteReadError):
            await reader.readexactly(900)


async def storm(s: Serving, todo: list[Caller]) -> Counter[tuple[str, bool]]:
    """All of them, some at a time: how many vanished at which moment, and whether that was early."""
    left, found = iter(todo), Counter[tuple[str, bool]]()

    async def lane() -> None:
        for caller in left:
            async with asyncio.timeout(60):
                early = await call(s, caller)
            found[caller.moment, early] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(LANES):
            group.create_task(lane())
    await s.settle()
    await empty(s.engine)
    return found


async def cached(s: Serving, caller: Caller) -> tuple[int, int]:
    """The prompt again, with a client that stays: tokens found in the cache, and tokens in all."""
    await s.settle()
    reply = await s.post(CHAT, replace(caller, path=CHAT, stream=False).body(most=1))
    assert reply.status == 200
    usage = reply.json["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]


async def footprint(s: Serving) -> tuple[int, int]:
    """Bytes of arrays and number of objects, with an empty cache."""
    await s.engine.clear_cache()
    gc.collect()
    return s.engine.read_stats().describe()["memory"]["active"], len(gc.get_objects())


@pytest.mark.slow
@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.sweep)])
async def test_clients_that_vanish(count: int) -> None:
    """Engine idle, tables empty, memory flat, what was computed is found."""
    async with site() as s:
        await storm(s, callers(1, count // 2))
        before = await footprint(s)
        todo = callers(2, count)
        found = await storm(s, todo)
        for moment in MOMENTS[:5]:
            assert found[moment, True] > count // 50, found
        partly = [caller for caller in todo if caller.computed >= CHUNK]
        assert len(partly) > count // 10
        for caller in partly[-20:]:
            hit, size = await cached(s, caller)
            assert hit >= min(caller.computed // CHUNK * CHUNK, (size - 1) // CHUNK * CHUNK), (
                caller,
                hit,
                size,
            )
        await nothing_left(s)
        after = await footprint(s)
        assert after[0] - before[0] < 1_000_000, (before, after)
        assert after[1] - before[1] < count + 1000, (before, after)


class Brake:
    """Lets the engine take so many steps of a kind that computes prompts; `limit` of None: any number."""

    def __init__(self, engine: Any) -> None:
        self.limit: int | None = None
        self.steps = 0  # that have been let through
        self._news = threading.Condition()
        self._execute = engine.generation.runner.execute
        engine.generation.runner.execute = self._braked

    def _braked(self, plan: Any) -> Any:
        with self._news:
            free = self._news.wait_for(lambda: self.limit is None or self.steps < self.limit, timeout=60)
            assert free, "the test has forgotten this engine"
            self.steps += bool(plan.prefill)
        return self._execute(plan)

    def let(self, steps: int | None) -> None:
        with self._news:
            self.limit = None if steps is None else self.steps + steps
            self._news.notify_all()


async def test_a_client_that_always_drops_gets_done_at_last() -> None:
    """It goes after three steps, five times; each time it comes further, at last it is done."""
    text = " ".join(f"word{i}" for i in range(400))
    caller = Caller("again", CHAT, text, False, "prefill")
    async with site() as s:
        brake = Brake(s.engine._ready.result())
        reached = []
        for _ in range(5):
            brake.let(3)
            received = asyncio.create_task(s.post(CHAT, caller.body(), x_request_id=caller.name))
            await until(lambda: brake.steps == brake.limit)
            live = s.live.get(caller.name)
            assert live is not None and live.phase == "prefill"
            received.cancel()
            await until(lambda: not len(s.live))
            reached.append(live.computed_tokens)
            brake.let(None)
            await empty(s.engine)
        hit, size = await cached(s, caller)
        assert size > reached[-1] + 3 * CHUNK, "the prompt was done before"
        assert all(later - before >= 3 * CHUNK for before, later in pairwise(reached)), reached
        assert hit >= reached[-1] // CHUNK * CHUNK > 15 * CHUNK, (hit, reached)
        await nothing_left(s)
