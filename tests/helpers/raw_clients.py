"""Clients on raw connections, which disconnect and read as they like."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

from mlxrun.server.endpoints import admin
from tests.helpers.certificates import make_trusting_context
from tests.helpers.server_fakes import MINI, Serving

ONLY = [MINI, admin.SURFACE]


async def until(true: Any) -> None:
    """Let others run until it holds; fails after long."""
    for _ in range(60_000):
        if true():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("nothing happens")


async def connect(
    s: Serving, body: Any, *, small: bool = False
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A raw connection on which the request was sent. `small`: little room for what is not read, and large
    events."""
    scheme, _, address = s.url.partition("://")
    host, port = address.split(":")
    raw = socket.socket()
    raw.setblocking(False)
    if small:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await asyncio.get_running_loop().sock_connect(raw, (host, int(port)))
    tls = {"ssl": make_trusting_context(), "server_hostname": ""} if scheme == "https" else {}
    reader, writer = await asyncio.open_connection(sock=raw, limit=2**17, **tls)  # type: ignore[arg-type]
    if small:
        writer.transport.pause_reading()
    data = json.dumps(body).encode()
    pad = 10_000 if small else 0
    start = f"POST /mini?pad={pad} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(start.encode() + data)
    await writer.drain()
    return reader, writer


def cut(writer: asyncio.StreamWriter) -> None:
    """The client vanishes: no goodbye."""
    writer.transport.abort()
