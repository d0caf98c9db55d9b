"""The engine's state and its statistics."""

from __future__ import annotations

import asyncio
import json
import time

from mlxrun.server.endpoints import admin
from tests.helpers.raw_clients import until
from tests.helpers.server_fakes import (
    MINI,
    make_chat_body,
    run_server,
)
from tests.server.test_lifecycle import Life
from tests.server.test_request_metrics import metric

ONLY = [MINI, admin.SURFACE]


async def test_the_status_shows_what_the_newest_step_left() -> None:
    """Nobody asks the engine: its numbers have the age of the step that runs, and none while it is idle."""
    async with run_server(surfaces=ONLY) as s:
        shown = (await s.get("/v1/status")).json
        assert (shown["steps"], shown["age"]) == (7, 0.0)
        s.engine.step_ended = time.monotonic() - 60
        s.engine.numbers["steps"] = 8
        shown = (await s.get("/v1/status")).json
        assert shown["steps"] == 8 and 60 <= shown["age"] < 600
        assert 60 <= (await metric(s))["mlxrun_engine_age_seconds"] < 600
        s.engine.step_ended = None
        assert (await s.get("/v1/status")).json["age"] == 0.0


async def test_a_drain_waits_for_requests_whose_body_is_being_read() -> None:
    """A request that was accepted before is served, also if its body is still arriving."""
    life = Life(drain_timeout=60)
    await life.ready()
    host, port = (await life.url()).removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(make_chat_body()).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data[:5])
    await until(lambda: life.view.active)
    life.stop.set()
    await until(lambda: life.view.state.draining)
    await asyncio.sleep(0.02)
    writer.write(data[5:])
    assert b" 200 " in await reader.readline()
    assert await life.task == 0
    writer.close()
