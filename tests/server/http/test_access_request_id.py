"""The ids of requests."""

from __future__ import annotations

import asyncio

import pytest

from mlxrun.server.endpoints import admin
from tests.helpers.raw_clients import until
from tests.helpers.server_fakes import (
    MINI,
    make_chat_body,
    make_script,
    run_server,
)

ONLY = [MINI, admin.SURFACE]


async def test_every_response_has_a_request_id() -> None:
    async with run_server(surfaces=ONLY) as s:
        seen = set()
        for path in ("/health", "/nope", "/v1/status"):
            seen.add((await s.get(path)).headers["x-request-id"])
        stream = await s.post("/mini", make_chat_body(stream=True))
        seen.add(stream.headers["x-request-id"])
        assert len(seen) == 4
        assert all(rid.startswith("req_") for rid in seen)
        reply = await s.post("/mini", make_chat_body(), x_request_id="mine-1")
        assert reply.headers["x-request-id"] == reply.json["id"] == "mine-1"


@pytest.mark.parametrize("bad", ["a b", "x" * 129, "\u00e9", "a;b", ""])
async def test_an_odd_request_id_is_replaced(bad: str) -> None:
    async with run_server(surfaces=ONLY) as s:
        reply = await s.get("/health", x_request_id=bad)
        assert reply.headers["x-request-id"].startswith("req_")


async def test_the_id_of_a_request_in_flight_is_not_reused() -> None:
    gate = asyncio.Event()
    async with run_server(surfaces=ONLY, script=make_script(gate.wait, "ok")) as s:
        tasks = [
            asyncio.create_task(s.post("/mini", make_chat_body(), x_request_id="same")) for _ in range(2)
        ]
        await until(lambda: len(s.live) == 2)
        gate.set()
        ids = {(await task).headers["x-request-id"] for task in tasks}
        assert len(ids) == 2
        assert "same" in ids
