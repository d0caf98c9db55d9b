"""Bytes that are not an HTTP request, and connections above the limit."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web

from mlxrun.server import lifecycle
from mlxrun.server.endpoints import admin, openai
from mlxrun.server.http.surface import Endpoint, Surface
from tests.helpers.raw_clients import connect, cut, until
from tests.helpers.server_fakes import MINI, Serving, make_chat_body, make_script, run_server, server_config
from tests.robustness.test_server_fuzz_wire import WIRE, send

ONLY = [MINI, admin.SURFACE]
NO_HTTP = (
    "a huge chunk",
    "two lengths",
    "a negative length",
    "no host",
    "a version to come",
    "bytes",
    "TLS",
    "a header without colon",
    "a header of 100 kB",
    "5,000 headers",
    "a path of bytes",
    "a long path",
    "a method that is none",
    "no chunk",
)


@pytest.mark.parametrize("name", NO_HTTP)
async def test_an_unreadable_request_is_answered_in_json(name: str) -> None:
    """The parser's refusals look like all others, in one short line, and close the connection."""
    async with run_server(surfaces=[openai.SURFACE]) as s:
        host, port = s.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(WIRE[name][0])
        raw = await asyncio.wait_for(reader.read(), 60)  # to its end: the server closes
        writer.close()
        head, _, body = raw.partition(b"\r\n\r\n")
        lines = head.decode().lower().split("\r\n")
        assert " 400 " in lines[0] and "content-type: application/json" in lines
        assert sum(line.startswith("x-request-id: req_") for line in lines) == 1
        assert sum(line.startswith("server: mlxrun/") for line in lines) == 1
        error = json.loads(body)["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", None)
        assert len(error["message"]) < 300 and "\n" not in error["message"]


async def test_the_error_has_the_reason() -> None:
    async with run_server(surfaces=[openai.SURFACE]) as s:
        found = {}
        for name in ("two lengths", "a long path", "a method that is none"):
            body = (await send(s, WIRE[name][0], over=False))[1].partition(b"\r\n\r\n")[2]
            found[name] = json.loads(body)["error"]
        assert {error["code"] for error in found.values()} == {"invalid_request"}
        start = "the HTTP request cannot be read: "
        assert all(error["message"].startswith(start) for error in found.values())
        assert len({error["message"] for error in found.values()}) == 3
        assert "8190" in found["a long path"]["message"]


async def test_a_good_request_before_a_bad_one_is_answered() -> None:
    """The twin: what came before on the same connection is as it would be alone."""
    async with run_server(surfaces=ONLY) as s:
        host, port = s.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        good = await asyncio.wait_for(reader.readuntil(b"}"), 60)
        writer.write(b"G@T / HTTP/1.1\r\n\r\n")
        bad = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        assert good.startswith(b"HTTP/1.1 200 ") and b'"status":"ok"' in good
        assert b" 400 " in bad.partition(b"\r\n")[0] and b'"error"' in bad


async def test_a_connection_above_the_limit() -> None:
    """While none is idle: tests/robustness/test_connection_storm.py has those that are."""
    answered = asyncio.Event()
    async with run_server(
        server_config(max_connections=2), surfaces=ONLY, script=make_script("Hello", answered.wait)
    ) as s:
        opened = [await connect(s, make_chat_body()) for _ in range(2)]
        await until(lambda: len(s.engine.running) == 2)
        reader, writer = await connect(s, make_chat_body())
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 1" in answer
        assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["code"] == "overloaded"
        writer.close()
        cut(opened[0][1])
        answered.set()
        for _ in range(6000):
            reader, writer = await connect(s, make_chat_body())
            line = await reader.readline()
            writer.close()
            if b" 200 " in line:
                break
            await asyncio.sleep(0.01)
        else:
            raise AssertionError("a closed connection still counts")
        cut(opened[1][1])


SIZE = 12_000_000  # bytes: more than the buffers of sockets hold


async def _send_much(request: web.Request) -> web.Response:
    return web.Response(body=b"x" * SIZE)


LARGE = Surface("large", (Endpoint("GET", "/large", _send_much, "A large body", engine=False),))


async def _ask_much(s: Serving) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client that has sent its request, and takes no more than it reads."""
    reader, writer = await asyncio.open_connection(*s.url.removeprefix("http://").split(":"))
    writer.write(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return reader, writer


async def test_a_client_that_takes_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such clients would keep out all others, as their connections are neither closed nor idle."""
    monkeypatch.setattr(lifecycle, "KEEPALIVE_SECONDS", 0.1)
    async with run_server(server_config(max_connections=1), surfaces=[LARGE]) as s:
        _, writer = await _ask_much(s)
        for _ in range(600):
            if (await s.get("/health")).status == 200:
                break
            await asyncio.sleep(0.05)
        else:
            raise AssertionError("its connection still counts")
        writer.close()


async def test_a_client_that_takes_little_at_once_gets_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: it takes longer than a connection may be idle."""
    monkeypatch.setattr(lifecycle, "KEEPALIVE_SECONDS", 1.0)
    async with run_server(surfaces=[LARGE]) as s:
        reader, writer = await _ask_much(s)
        taken = 0
        while taken < SIZE:
            part = await reader.read(1 << 21)
            assert part, "it was disconnected"
            taken += len(part)
            await asyncio.sleep(0.06)
        writer.close()


async def test_an_unknown_expectation_is_refused_in_json() -> None:
    """aiohttp refuses it before the middleware; the connection is closed, as the body is not read."""
    async with run_server(surfaces=ONLY) as s:
        reply = await s.post("/mini", make_chat_body(), Expect="x" * 500)
        assert reply.status == 417 and reply.headers["Connection"] == "close"
        assert reply.json["mini"] == "invalid_request" and len(reply.json["text"]) < 300
        assert reply.json["id"] == reply.headers["x-request-id"]
        assert (await s.post("/mini", make_chat_body(), Expect="100-continue")).status == 200
