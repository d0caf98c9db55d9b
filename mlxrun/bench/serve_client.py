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


@dataclass(frozen=True, slots=True)
class Target:
    """A server; `url` ends in /v1 where the API does."""

    name: str
    url: str
    model: str | None = None
    key: str | None = None


@dataclass(slots=True)
class Seen:
    """One request: `pieces` are the times at which text came."""

    sent: float
    pieces: list[float] = field(default_factory=list)
    end: float = 0.0
    prompt: int = 0
    cached: int = 0
    output: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """`concurrency`: streams at once (closed loop); `rate`: requests a second instead (open loop), at times
    drawn from `seed`."""

    concurrency: int = 16
    rate: float | None = None
    timeout: float = 600.0
    seed: str = "0"


async def measure(
    target: Target,
    bodies: Sequence[dict[str, Any]],
    load: Load,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Seen]:
    """Send them all, as the load says; what was seen of each, in order."""
    async with _session(target, load.timeout) as session:
        ask = lambda body: _ask(session, target, body, clock)  # noqa: E731
        if load.rate is not None:
            return await _open_loop(ask, bodies, load.rate, random.Random(load.seed))
        slots = asyncio.Semaphore(load.concurrency)

        async def one(body: dict[str, Any]) -> Seen:
            async with slots:
                return await ask(body)

        return list(await asyncio.gather(*(one(body) for body in bodies)))


async def _open_loop(
    ask: Callable[[dict[str, Any]], Any], bodies: Sequence[dict[str, Any]], rate: float, draw: random.Random
) -> list[Seen]:
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


async def _ask(
    session: ClientSession, target: Target, body: dict[str, Any], clock: Callable[[], float]
) -> Seen:
    """One stream; whatever goes wrong is an error of this request."""
    body = {**body, "model": target.model, "stream": True, "stream_options": {"include_usage": True}}
    seen = Seen(clock())
    try:
        async with session.post(f"{target.url}/chat/completions", json=body) as response:
            if response.status != 200:
                text = (await response.text())[:200]
                seen.error = f"{response.status}: {text}"
            else:
                await _read(response.content, seen, clock)
    except Exception as error:  # the border: the server is foreign
        seen.error = f"{type(error).__name__}: {error}"
    seen.end = clock()
    seen.output = seen.output or len(seen.pieces)
    if seen.error is None and not seen.pieces:
        seen.error = "the stream ended without any text"
    return seen


async def _read(stream: StreamReader, seen: Seen, clock: Callable[[], float]) -> None:
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
    seen.error = "the stream was cut off before [DONE]"
