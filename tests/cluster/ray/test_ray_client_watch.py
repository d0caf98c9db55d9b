"""The end of Ray is noticed, and nothing waits for it. No Ray is started."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest

from mlxrun.cluster.messages import RayEnded
from mlxrun.cluster.ray.ray_client import RayWatch, find_unreachable, leave_ray, make_watch
from tests.helpers.command_processes import PATIENCE

ANSWER = b"\0\0\0\4\0\0\0\0\0"  # the empty settings of an HTTP/2 server


@contextmanager
def listen() -> Iterator[tuple[str, int]]:
    """The host and port of what answers as a service of Ray does, until the block ends: in a thread, so that
    each greeting has an answer whatever the test's own loop does."""
    ended = threading.Event()

    def serve() -> None:
        while not ended.is_set():
            connection, _ = server.accept()
            connection.settimeout(PATIENCE)
            with connection, suppress(ConnectionError):
                connection.recv(100)
                connection.sendall(ANSWER)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()
        finally:
            ended.set()
            socket.create_connection(server.getsockname(), PATIENCE).close()
            thread.join(PATIENCE)


async def test_replies_come_while_ray_is_there() -> None:
    with listen() as service:
        watch = RayWatch({"Ray has ended": service}, pause=0.0)
        assert await watch.wait_reply(asyncio.sleep(0.2, "reply")) == "reply"
        assert await watch.run_aside(lambda left, right: left + right, 1, 2) == 3
        assert await watch.run_aside(lambda: 1 / 0) is None
        with pytest.raises(KeyError):
            await watch.wait_reply(fail())
        watch.close()


async def fail() -> None:
    raise KeyError("x")


@pytest.mark.parametrize("first", [True, False])
async def test_no_reply_is_awaited_once_a_service_has_ended(first: bool) -> None:
    """Neither of an actor nor of a function of Ray that blocks, and leaving Ray does not block either."""
    with listen() as other:
        with listen() as service:
            services = {"Ray has ended": service, "the other has ended": other}
            watch = RayWatch(services if first else dict(reversed(services.items())), pause=0.0)
            waiting = asyncio.create_task(watch.wait_reply(asyncio.Event().wait()))
            await asyncio.sleep(0.1)
            assert not waiting.done()
        with pytest.raises(RayEnded, match="^Ray has ended") as ended:
            await asyncio.wait_for(waiting, 60)
        assert ended.value.exit_code == 3
        blocked = threading.Event()
        await asyncio.wait_for(leave_ray(SimpleNamespace(shutdown=blocked.wait), watch), 60)
        blocked.set()


async def test_a_few_missed_answers_are_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["late"] * 4 + [None] + ["late"] * 4 + [None] * 1000)
    monkeypatch.setattr("mlxrun.cluster.ray.ray_client.find_unreachable", lambda host, port: next(answers))
    watch = RayWatch({"Ray has ended": ("127.0.0.1", 1)}, pause=0.0)
    assert await watch.wait_reply(asyncio.sleep(0.1, "reply")) == "reply"
    watch.close()


def test_both_services_of_a_ray_are_watched() -> None:
    node = {"NodeID": "b", "NodeManagerAddress": "10.0.0.2", "NodeManagerPort": 2}
    context = SimpleNamespace(gcs_address="10.0.0.1:6379", get_node_id=lambda: "b")
    ray = SimpleNamespace(nodes=lambda: [{"NodeID": "a"}, node], get_runtime_context=lambda: context)
    watch = make_watch(ray)
    assert list(watch._services.values()) == [("10.0.0.2", 2), ("10.0.0.1", 6379)]


def test_why_an_address_is_out_of_reach() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
    assert "refused" in (find_unreachable(host, port) or "")
