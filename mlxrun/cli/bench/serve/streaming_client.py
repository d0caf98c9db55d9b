"""The client of `mlxrun bench serve`: streams chats from OpenAI-compatible servers and records when deltas
come.

It works with any server: tokens are counted by `usage`, or as deltas if the server sends no usage. All times
are seconds of `clock`.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiohttp import ClientSession, StreamReader

CONTENT = ("content", "reasoning_content", "reasoning", "tool_calls")
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Target:
    """A server. `url` ends in /v1 where the API does."""

    name: str
    url: str
    model: str | None = None
    key: str | None = None


@dataclass(slots=True)
class StreamTimes:
    """One request. `deltas`: the times at which content came; `prompt`, `cached`, `output`: tokens; `done`:
    whether it has ended, well or not."""

    sent: float = 0.0
    deltas: list[float] = field(default_factory=list)
    end: float = 0.0
    prompt: int = 0
    cached: int = 0
    output: int = 0
    error: str | None = None
    done: bool = False


@dataclass(frozen=True, slots=True)
class LoadPattern:
    """When requests are sent. `concurrency`: streams at once (closed loop); `rate`: requests a second instead
    (open loop), at random times; `timeout`: seconds of one request; `seed`: of these times and of the
    words."""

    concurrency: int = 16
    rate: float | None = None
    timeout: float = 600.0
    seed: str = "0"


@dataclass(frozen=True, slots=True)
class Connection:
    """An HTTP session with one server, open as long as `connect` lasts."""

    target: Target
    session: ClientSession
    clock: Clock

    async def stream_chat(
        self,
        body: dict[str, Any],
        seen: StreamTimes | None = None,
        on_delta: Callable[[], None] = lambda: None,
    ) -> StreamTimes:
        """Send one request and read its stream into `seen`. Failures are errors of this request. `on_delta`
        is called after every delta and at the end. Cancelling closes the connection."""
        seen = seen or StreamTimes()
        options = {"model": self.target.model, "stream": True, "stream_options": {"include_usage": True}}
        seen.sent = self.clock()
        try:
            async with self.session.post(
                f"{self.target.url}/chat/completions", json=body | options
            ) as response:
                if response.status != 200:
                    text = (await response.text())[:200]
                    seen.error = f"{response.status}: {text}"
                else:
                    await _read_stream(response.content, seen, self.clock, on_delta)
        except Exception as error:  # the border: the server is foreign
            seen.error = f"{type(error).__name__}: {error}"
        seen.end = self.clock()
        seen.output = seen.output or len(seen.deltas)
        if seen.error is None and not seen.deltas:
            seen.error = "the stream ended without content"
        seen.done = True
        on_delta()
        return seen

    async def call(self, path: str) -> tuple[int, float]:
        """Call GET `path` below the server's root. Returns the status, and the seconds that it took."""
        sent = self.clock()
        async with self.session.get(self.target.url.removesuffix("/v1") + path) as response:
            await response.read()
        return response.status, self.clock() - sent


@asynccontextmanager
async def connect(
    target: Target, timeout: float, clock: Clock = time.perf_counter
) -> AsyncIterator[Connection]:
    """Open a session with the server. `timeout`: seconds that one request may take."""
    import aiohttp

    headers = {"Authorization": f"Bearer {target.key}"} if target.key else {}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, headers=headers, timeout=aiohttp.ClientTimeout(total=timeout)
    ) as session:
        yield Connection(target, session, clock)


async def send_all(target: Target, bodies: Sequence[dict[str, Any]], load: LoadPattern) -> list[StreamTimes]:
    """Send all bodies as `load` says, and return the times of each, in order."""
    async with connect(target, load.timeout) as connection:
        if load.rate is not None:
            return await _open_loop(connection.stream_chat, bodies, load.rate, random.Random(load.seed))
        slots = asyncio.Semaphore(load.concurrency)

        async def one(body: dict[str, Any]) -> StreamTimes:
            async with slots:
                return await connection.stream_chat(body)

        return list(await asyncio.gather(*(one(body) for body in bodies)))


async def _open_loop(
    send: Callable[[dict[str, Any]], Any], bodies: Sequence[dict[str, Any]], rate: float, rng: random.Random
) -> list[StreamTimes]:
    """Send requests as a Poisson process of that rate, however long the answers take."""
    tasks = []
    for body in bodies:
        tasks.append(asyncio.create_task(send(body)))
        await asyncio.sleep(rng.expovariate(rate))
    return list(await asyncio.gather(*tasks))


async def find_model(target: Target) -> str:
    """Return the first model that the server lists; "default" if it lists none."""
    async with connect(target, 30) as server, server.session.get(f"{target.url}/models") as response:
        found = await response.json(content_type=None) if response.status == 200 else {}
    models = (found or {}).get("data") or []
    return str(models[0]["id"]) if models else "default"


async def _read_stream(
    stream: StreamReader, seen: StreamTimes, clock: Clock, on_delta: Callable[[], None]
) -> None:
    async for line in stream:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        chunk = json.loads(data)
        if chunk.get("error"):  # some servers send null
            seen.error = str(chunk["error"])[:200]
            return
        usage = chunk.get("usage")
        if usage:
            seen.prompt, seen.output = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
            seen.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        for choice in chunk.get("choices") or ():
            if any((choice.get("delta") or {}).get(key) for key in CONTENT):
                seen.deltas.append(clock())
                on_delta()
    seen.error = "the stream ended before [DONE]"
