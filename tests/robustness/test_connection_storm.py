"""Thousands of connections that are kept, and of clients that say nothing: nobody is locked out, and nothing
of them is left."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest

from mlxrun.server.http import connection
from tests.helpers.server_fakes import Serving, make_chat_body, make_script, run_server, server_config
from tests.helpers.storm_counts import count
from tests.robustness.test_server_fuzz import nothing_left
from tests.robustness.test_server_fuzz_bodies import CHAT

LIMIT = 64
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
WITHIN = 60  # seconds: a hang, on whatever machine


class Caller:
    """A raw connection; `ask` is the status of the answer, 0 if the connection was closed."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, raw: bytes = GET) -> int:
        try:
            async with asyncio.timeout(WITHIN):
                self.writer.write(raw)
                await self.writer.drain()
                head = await self.reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                await self.reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            return 0
        return int(head.split(b" ", 2)[1])


class Callers(list[Caller]):
    """Of one server."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._address = url.removeprefix("http://").split(":")

    async def connect(self, number: int = 1) -> None:
        host, port = self._address
        for _ in range(number):
            self.append(Caller(*await asyncio.open_connection(host, int(port))))
        count("connections", number)


@asynccontextmanager
async def make_callers(s: Serving) -> AsyncIterator[Callers]:
    callers = Callers(s.url)
    try:
        yield callers
    finally:
        for caller in callers:
            caller.writer.transport.abort()


async def ask_all(callers: list[Caller]) -> Counter[int]:
    return Counter([await caller.ask() for caller in callers])


def allow_open_files(number: int) -> None:
    """Let this process open so many, where a library has lowered its limit (mlx-lm does on import)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY not in (soft, hard) and soft < number:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (number, max(hard, number)))
        except (ValueError, OSError):
            pytest.skip(f"at most {hard} files may be open")


@pytest.mark.parametrize(
    ("number", "limit"), [(200, LIMIT), pytest.param(2000, 1024, marks=pytest.mark.sweep)]
)
async def test_connections_that_are_kept(number: int, limit: int) -> None:
    """More than may be open: each new client is served, in place of the one that has waited longest."""
    allow_open_files(2 * number + 500)  # both ends are here
    async with run_server(server_config(max_connections=limit)) as s, make_callers(s) as callers:
        for _ in range(number):
            await callers.connect()
            assert await callers[-1].ask() == 200
        assert await ask_all(callers) == {0: number - limit, 200: limit}
        assert (await s.post(CHAT, make_chat_body())).status == 200
        assert await ask_all(callers[-limit + 2 :]) == {200: limit - 2}
        await nothing_left(s)


async def test_clients_that_say_nothing() -> None:
    """Silent ones, and ones that send half a head, hold no place that another one needs."""
    async with run_server(server_config(max_connections=LIMIT)) as s, make_callers(s) as callers:
        await callers.connect(3 * LIMIT)
        for caller in callers[::2]:
            caller.writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHo")
        for _ in range(20):
            assert (await s.get("/health")).status == 200
        await nothing_left(s)


async def test_a_burst_is_limited_too() -> None:
    """Connections that are accepted in one turn of the loop are counted one by one."""
    async with run_server(server_config(max_connections=4)) as s, make_callers(s) as callers:
        address = urlsplit(s.url).hostname, urlsplit(s.url).port
        sockets = [socket.create_connection(address) for _ in range(40)]  # the loop does not turn meanwhile
        callers += [Caller(*await asyncio.open_connection(sock=each)) for each in sockets]
        statuses = await ask_all(callers)
        assert set(statuses) <= {200, 503, 0} and 1 <= statuses[200] <= 4
        await nothing_left(s)


async def test_who_is_being_answered_keeps_the_connection() -> None:
    """Where all are busy a further client gets 503, and those that are busy their whole answers."""
    go_on = asyncio.Event()
    config = server_config(max_connections=4)
    async with run_server(config, script=make_script("Hello", go_on.wait, " world")) as s:
        received = [asyncio.create_task(s.post(CHAT, make_chat_body())) for _ in range(4)]
        async with asyncio.timeout(WITHIN):
            while len(s.engine.running) < 4:
                await asyncio.sleep(0.001)
        async with make_callers(s) as callers:
            await callers.connect(20)
            assert set(await ask_all(callers)) <= {503, 0}  # 0: it was closed before it had asked
        go_on.set()
        replies = [await each for each in received]
        assert [reply.json["choices"][0]["message"]["content"] for reply in replies] == ["Hello world"] * 4
        await nothing_left(s)


async def test_a_lock_out_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: idle connections keep their places, as they did."""
    monkeypatch.setattr(connection, "close_idle", lambda connections: False)
    async with run_server(server_config(max_connections=LIMIT)) as s, make_callers(s) as callers:
        await callers.connect(LIMIT)
        assert (await s.get("/health")).status == 503
