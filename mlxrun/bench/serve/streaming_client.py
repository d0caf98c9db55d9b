"""The client of `mlxrun bench serve`: streams chats from OpenAI-compatible servers and notes what came when.

It knows no server: a token is what `usage` counts, or a piece of text where no usage is sent. All times are
seconds of `clock`.
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
    """A server; `url` ends in /v1 where the API does."""

    name: str
    url: str
    model: str | None = None
    key: str | None = None


@dataclass(slots=True)
class StreamTimes:
    """One request: `pieces` are the times at which text came; `done` once it has ended, well or not."""

    sent: float = 0.0
    pieces: list[float] = field(default_factory=list)
    end: float = 0.0
    prompt: int = 0
    cached: int = 0
    output: int = 0
    error: str | None = None
    done: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """`concurrency`: streams at once (closed loop); `rate`: requests a second instead (open loop), at times
    drawn from `seed`, as the words are."""

    concurrency: int = 16
    rate: float | None = None
    timeout: float = 600.0
    seed: str = "0"


@dataclass(frozen=True, slots=True)
class Connection:
    """A way to one server, open as long as `connect` lasts."""

    target: Target
    session: ClientSession
    clock: Clock

    async def ask(
        self, body: dict[str, Any], seen: StreamTimes | None = None, note: Callable[[], None] | None = None
    ) -> StreamTimes:
        """One stream; whatever goes wrong is an error of this request. Who hands in `seen` can watch it grow:
        `note` is called after every piece and at the end. Cancelling closes the connection."""
        seen = seen or StreamTimes()
        note = note or _nobody
        asked = {"model": self.target.model, "stream": True, "stream_options": {"include_usage": True}}
        seen.sent = self.clock()
        try:
            async with self.session.post(
                f"{self.target.url}/chat/completions", json=body | asked
            ) as response:
                if response.status != 200:
                    text = (await response.text())[:200]
                    seen.error = f"{response.status}: {text}"
                else:
                    await _read(response.content, seen, self.clock, note)
        except Exception as error:  # the border: the server is foreign
            seen.error = f"{type(error).__name__}: {error}"
        seen.end = self.clock()
        seen.output = seen.output or len(seen.pieces)
        if seen.error is None and not seen.pieces:
            seen.error = "the stream ended without any text"
        seen.done = True
        note()
        return seen

    async def health(self) -> tuple[int, float]:
        """The status of GET /health, which lies beside /v1, and the seconds that it took."""
        sent = self.clock()
        async with self.session.get(f"{self.target.url.removesuffix('/v1')}/health") as response:
            await response.read()
        return response.status, self.clock() - sent


def _nobody() -> None:
    """Nobody watches."""


@asynccontextmanager
async def connect(
    target: Target, timeout: float, clock: Clock = time.perf_counter
) -> AsyncIterator[Connection]:
    """A line to the server; `timeout`: seconds that one request may take."""
    async with _session(target, timeout) as session:
        yield Connection(target, session, clock)


async def measure(
    target: Target, bodies: Sequence[dict[str, Any]], load: Load, clock: Clock = time.perf_counter
) -> list[StreamTimes]:
    """Send them all, as the load says; what was seen of each, in order."""
    async with connect(target, load.timeout, clock) as line:
        if load.rate is not None:
            return await _open_loop(line.ask, bodies, load.rate, random.Random(load.seed))
        slots = asyncio.Semaphore(load.concurrency)

        async def one(body: dict[str, Any]) -> StreamTimes:
            async with slots:
                return await line.ask(body)

        return list(await asyncio.gather(*(one(body) for body in bodies)))


async def _open_loop(
    ask: Callable[[dict[str, Any]], Any], bodies: Sequence[dict[str, Any]], rate: float, draw: random.Random
) -> list[StreamTimes]:
    """Requests come when they come (a Poisson process), however long the answers take."""
    tasks = []
    for body in bodies:
        tasks.append(asyncio.create_task(ask(body)))
        await asyncio.sleep(draw.expovariate(rate))
    return list(await asyncio.gather(*tasks))


@asynccontextmanager
async def _session(target: Target, timeout: float) -> AsyncIterator[ClientSession]:
    import aiohttp

    headers = {"Authorization": f"Bearer {target.key}"} if target.key else {}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, headers=headers, timeout=aiohttp.ClientTimeout(total=timeout)
    ) as session:
        yield session


async def model_of(target: Target) -> str:
    """The first model that the server names; what it is called if it names none."""
    async with _session(target, 30) as session, session.get(f"{target.url}/models") as response:
        found = await response.json(content_type=None) if response.status == 200 else {}
    models = (found or {}).get("data") or []
    return str(models[0]["id"]) if models else "default"


async def _read(stream: StreamReader, seen: StreamTimes, clock: Clock, note: Callable[[], None]) -> None:
    async for line in stream:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        chunk = json.loads(data)
        if "error" in chunk:
            seen.error = str(chunk["error"])[:200]
            return
        usage = chunk.get("usage")
        if usage:
            seen.prompt, seen.output = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
            seen.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        for choice in chunk.get("choices") or ():
            if any((choice.get("delta") or {}).get(key) for key in CONTENT):
                seen.pieces.append(clock())
                note()
    seen.error = "the stream was cut off before [DONE]"
