"""What Ray Serve's proxy does with the answers of two replicas, in the environment `.venv-clients/ray-serve`.

Prints one JSON object. `stream`: the events of an answer that arrived. `unanswered`: status, media type and
body of requests whose replica was killed before it answered. `cut`: the end of a stream whose replica was
killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

PORT = int(sys.argv[1])
BEGAN = Path(sys.argv[2])  # a line for each request that a replica has begun: its process
URL = f"http://127.0.0.1:{PORT}"
EVENTS = 60


@serve.deployment(num_replicas=2, max_ongoing_requests=100, ray_actor_options={"num_cpus": 0.1})
class Replica:
    async def __call__(self, request: Request) -> Response:
        if request.url.path == "/stream":
            return StreamingResponse(self._stream(), media_type="text/event-stream")
        with BEGAN.open("a") as file:
            print(os.getpid(), file=file)
        await asyncio.sleep(10)
        return JSONResponse({"pid": os.getpid()})

    async def _stream(self) -> AsyncIterator[str]:
        yield f"data: {os.getpid()}\n\n"
        for at in range(EVENTS):
            await asyncio.sleep(0.05)
            yield f"data: {at}\n\n"
        yield "data: [DONE]\n\n"


async def read_stream(session: aiohttp.ClientSession, kill_at: int | None = None) -> dict[str, Any]:
    events: list[str] = []
    try:
        async with session.get(f"{URL}/stream") as reply:
            async for line in reply.content:
                if line.startswith(b"data: "):
                    events.append(line.decode()[6:].strip())
                    if len(events) == kill_at:
                        os.kill(int(events[0]), signal.SIGKILL)
    except aiohttp.ClientPayloadError as error:
        return {"events": len(events), "last": events[-1], "error": type(error).__name__}
    return {"events": len(events), "last": events[-1], "error": None}


async def ask(session: aiohttp.ClientSession) -> tuple[int, str, str]:
    async with session.post(f"{URL}/answer", json={}) as reply:
        return reply.status, reply.content_type, await reply.text()


async def lose_replica(session: aiohttp.ClientSession) -> list[tuple[int, str, str]]:
    """The replies to requests of which some were with a replica that was killed before it answered."""
    tasks = [asyncio.create_task(ask(session)) for _ in range(6)]
    while not BEGAN.exists() or len(BEGAN.read_text().splitlines()) < len(tasks):
        await asyncio.sleep(0.1)
    os.kill(int(BEGAN.read_text().split()[0]), signal.SIGKILL)
    return list(await asyncio.gather(*tasks))


async def main() -> None:
    async with aiohttp.ClientSession() as session:
        found: dict[str, Any] = {"stream": await read_stream(session)}
        found["unanswered"] = await lose_replica(session)
        found["cut"] = await read_stream(session, kill_at=20)
    print(json.dumps(found))


if __name__ == "__main__":
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    serve.run(Replica.bind(), name="replicas", route_prefix="/")
    asyncio.run(main())
