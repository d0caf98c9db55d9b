"""Servers and clients that are suspended (SIGSTOP) in the middle of requests, and go on: every answer is that
of an undisturbed one, and no time limit counts the time in between."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command_processes import (
    PATIENCE,
    ROOT,
    RunningCommand,
    run_serve,
    start_program,
    suspend,
    wait_until,
)
from tests.helpers.storm_counts import count, make_rng

SITE = """
import asyncio
from mlxrun.core import processes
from mlxrun.server import lifecycle
from mlxrun.server.http import json_bodies
json_bodies.BODY_TIMEOUT = lifecycle.KEEPALIVE_SECONDS = 2.0
{twin}
from mlxrun.cli.signal_loop import run_async
from tests.helpers.server_fakes import MINI, run_server

async def serve():
    async with run_server(surfaces=[MINI]) as site:
        print(site.url, flush=True)
        await asyncio.Event().wait()

run_async(serve())
"""
BODY = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
HEAD = b"POST /mini HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
REQUEST = HEAD + b"%d\r\n\r\n" % len(BODY) + BODY
# A watchdog that would give up the engine if it counted the time of a suspension.
WATCHDOG = "from mlxrun.engine import watchdog; watchdog.TICK, watchdog.LIMIT = 0.1, 1.0"


def read_status(connection: socket.socket) -> int:
    """The status of one answer, read to its end; 0 if the connection was closed."""
    connection.settimeout(60)
    data = b""
    try:
        while not data.endswith(b"}"):
            data += connection.recv(65536) or b"}"
    except ConnectionError:
        return 0
    return int(data.split(b" ", 2)[1]) if b" " in data else 0


TWINS = {"": (200, 200, 200), "processes.GAP = float('inf')": (504, 200, 200)}


def test_time_limits_stand_still() -> None:
    """Of a body of which half has come, and of an idle connection; a new one is taken as well. The twin
    counts the time; both servers are suspended at once."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path))}
    with ExitStack() as opened:

        def connect(site: subprocess.Popen[str]) -> socket.socket:
            return opened.enter_context(socket.create_connection((host[site], port[site]), PATIENCE))

        sites, host, port = [], {}, {}
        for twin in TWINS:
            command = [sys.executable, "-c", SITE.format(twin=twin)]
            sites.append(opened.enter_context(start_program(command, env=environment)))
        for site in sites:
            assert site.stdout is not None
            host[site], _, number = site.stdout.readline().strip().removeprefix("http://").partition(":")
            port[site] = int(number)
        connections = []
        for site in sites:
            half, idle = connect(site), connect(site)
            idle.sendall(REQUEST)
            assert read_status(idle) == 200
            half.sendall(REQUEST[:-9])
            connections.append([half, idle])
        time.sleep(0.3)
        for site in sites:
            os.kill(site.pid, signal.SIGSTOP)
        for site, three in zip(sites, connections, strict=True):
            three.append(connect(site))
            for connection, data in zip(three, (REQUEST[-9:], REQUEST, REQUEST), strict=True):
                connection.sendall(data)
        time.sleep(3.2)
        for site in sites:
            os.kill(site.pid, signal.SIGCONT)
            count("suspensions")
        assert [tuple(map(read_status, three)) for three in connections] == [*TWINS.values()]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCommand]:
    with run_serve(tmp_path_factory.mktemp("serve"), before=WATCHDOG) as running:
        yield running


def make_body(seed: int, **more: Any) -> dict[str, Any]:
    text = "Once upon a time, " + "and then " * (seed % 7 * 20)
    return {"prompt": text, "seed": seed, "temperature": 1.0, "max_tokens": 60, "stream": True, **more}


def read_stream(server: RunningCommand, body: dict[str, Any]) -> list[Any]:
    """What `merge_events` makes of its answer."""
    with closing(http.client.HTTPConnection(*server.address, timeout=240)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        return merge_events(response.read().decode())


def merge_events(text: str) -> list[Any]:
    """The text of a stream, and why it ended; it has to be complete."""
    events = [block.removeprefix("data: ") for block in text.split("\n\n") if block.startswith("data: ")]
    assert events[-1] == "[DONE]", events[-1:]
    choices = [json.loads(each)["choices"][0] for each in events[:-1]]
    return ["".join(each["text"] for each in choices), choices[-1]["finish_reason"]]


def read_all(
    server: RunningCommand, bodies: list[dict[str, Any]]
) -> tuple[list[Any], list[threading.Thread]]:
    """All streams at once: where their results will be, and the threads that read them."""
    found: list[Any] = [None] * len(bodies)

    def read(at: int) -> None:
        found[at] = read_stream(server, bodies[at])

    threads = [threading.Thread(target=read, args=(at,)) for at in range(len(bodies))]
    for thread in threads:
        thread.start()
    return found, threads


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(1, 16))])
def test_streams_go_on(server: RunningCommand, seed: int, night: int) -> None:
    """Of a server that is suspended again and again, once for longer than its watchdog waits."""
    rng = make_rng(seed, night)
    bodies = [make_body(rng.randrange(1000)) for _ in range(4 if seed == 0 else 20)]
    wanted = [read_stream(server, body) for body in bodies]
    found, threads = read_all(server, bodies)
    suspend([server.process.pid], 1.5)
    while any(thread.is_alive() for thread in threads):
        time.sleep(rng.random() * 0.05)
        suspend([server.process.pid], rng.random() * 0.1)
    assert found == wanted
    count("streams over suspensions", len(bodies))


CLIENT = """
import json, pathlib, socket, sys
host, port, body, target = sys.argv[1:]
raw = socket.socket()
raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
raw.connect((host, int(port)))
body = body.encode()
raw.sendall(b"POST /v1/completions HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n"
            b"Content-Type: application/json\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(body) + body)
data = b""
while part := raw.recv(4096):
    data += part
    pathlib.Path(target).touch()
pathlib.Path(target).write_bytes(data)
"""


@contextmanager
def start_client(
    server: RunningCommand, body: dict[str, Any], target: Path
) -> Iterator[subprocess.Popen[str]]:
    """A client in a process of its own, with little room for what it does not read."""
    host, port = server.address
    command = [sys.executable, "-c", CLIENT, host, str(port), json.dumps(body), str(target)]
    with start_program(command) as process:
        wait_until(target.exists)
        yield process


def count_live(server: RunningCommand) -> int:
    with closing(http.client.HTTPConnection(*server.address, timeout=60)) as connection:
        connection.request("GET", "/v1/status")
        return len(json.loads(connection.getresponse().read())["requests"])


@pytest.mark.slow
def test_clients_that_are_suspended(server: RunningCommand, tmp_path: Path) -> None:
    """They hold up nobody. One that goes on gets all of its answer; nothing is left of one that is killed."""
    slow = make_body(3, max_tokens=300, logprobs=5)
    bodies = [make_body(seed) for seed in range(4)]
    wanted, wanted_slow = [read_stream(server, body) for body in bodies], read_stream(server, slow)
    with ExitStack() as opened:
        started = [start_client(server, slow, tmp_path / name) for name in ("goes on", "is killed")]
        clients = [opened.enter_context(each) for each in started]
        for client in clients:
            os.kill(client.pid, signal.SIGSTOP)
        count("suspensions", len(clients))
        found, threads = read_all(server, bodies)
        for thread in threads:
            thread.join(PATIENCE)
        assert found == wanted
        clients[1].kill()
        clients[1].wait()
        os.kill(clients[0].pid, signal.SIGCONT)
        assert clients[0].wait(PATIENCE) == 0
    text = (tmp_path / "goes on").read_bytes().decode()
    assert merge_events(read_chunks(text.partition("\r\n\r\n")[2])) == wanted_slow
    wait_until(lambda: count_live(server) == 0)


def read_chunks(text: str) -> str:
    """The content of a chunked body of ASCII."""
    parts = []
    while (size := int(text.partition("\r\n")[0], 16)) > 0:
        start = text.index("\r\n") + 2
        parts.append(text[start : start + size])
        text = text[start + size + 2 :]
    return "".join(parts)
