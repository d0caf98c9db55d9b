"""Notices that Ray has ended, which Ray does not tell a driver: it would wait for its actors for good.

Two services of Ray have to be there: that of the driver's own machine, and that of the cluster. Both are
asked every few seconds to say hello, as an HTTP/2 server does.
"""

from __future__ import annotations

import asyncio
import atexit
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from mlxrun.cluster.messages import RayEnded

PAUSE = 2.0  # seconds between two questions
MOST_MISSED = 5  # questions in a row without an answer; then the service has ended
REACH_SECONDS = 3.0  # until an address must have answered
# An HTTP/2 server such as Ray's answers this, a client's preface and empty settings, with its own settings.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
_SETTINGS = 4  # type of the frame


def find_unreachable(host: str, port: int) -> str | None:
    """Why no server of Ray's kind answers there; None if one does. Blocks for REACH_SECONDS at most twice."""
    try:
        with socket.create_connection((host.strip("[]"), port), REACH_SECONDS) as connection:
            connection.settimeout(REACH_SECONDS)
            connection.sendall(_HELLO)
            answer = connection.recv(9)
    except (OSError, OverflowError) as error:
        return str(error)
    return None if len(answer) > 3 and answer[3] == _SETTINGS else "what listens there is not Ray"


class RayWatch:
    """Waits for the end of Ray, from the first reply that somebody waits for. `services`: host and port of
    each service, by the sentence that says that it has ended; `pause`: seconds, see PAUSE."""

    def __init__(self, services: Mapping[str, tuple[str, int]], pause: float = PAUSE) -> None:
        self.reason = ""  # why Ray has ended, once it has
        self._services = services
        self._pause = pause
        self._watching: asyncio.Task[None] | None = None

    async def wait_reply(self, reply: Awaitable[Any]) -> Any:
        """The reply of an actor. RayEnded if Ray ends before."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._wait_ended())
        answer = asyncio.ensure_future(reply)
        try:
            await asyncio.wait((answer, self._watching), return_when=asyncio.FIRST_COMPLETED)
            if self._watching.done():
                self._watching.result()
                raise RayEnded(self.reason)
            return answer.result()
        finally:
            answer.cancel()
            answer.add_done_callback(_ignore_error)

    async def _wait_ended(self) -> None:
        missed = dict.fromkeys(self._services, 0)
        while not self.reason:
            await asyncio.sleep(self._pause)
            for sentence, (host, port) in self._services.items():
                found = await asyncio.to_thread(find_unreachable, host, port)
                missed[sentence] = 0 if found is None else missed[sentence] + 1
                if missed[sentence] == MOST_MISSED:
                    self.reason = f"{sentence} ({found})"
                    break

    def close(self) -> None:
        """Stop watching."""
        if self._watching is not None:
            self._watching.cancel()

    async def run_aside(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a function of Ray, which blocks as long as Ray is out of reach; None if Ray ends
        before. Its thread does not keep the process from ending."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        found: list[Any] = []

        def run() -> None:
            with suppress(Exception):
                found.append(function(*arguments))
            with suppress(RuntimeError):  # the loop has been closed meanwhile
                loop.call_soon_threadsafe(done.set)

        threading.Thread(target=run, name="ray-call", daemon=True).start()
        with suppress(RayEnded):
            await self.wait_reply(done.wait())
        return found[0] if found else None


def _ignore_error(reply: asyncio.Future[Any]) -> None:
    """Else asyncio logs the error of a reply that nobody waits for any more."""
    if not reply.cancelled():
        reply.exception()


async def leave_ray(ray: Any, watch: RayWatch) -> None:
    """Leave Ray; one of this process's own ends. If Ray has ended, nothing waits for it."""
    await watch.run_aside(ray.shutdown)
    watch.close()
    if watch.reason:
        atexit.unregister(ray.shutdown)


def make_watch(ray: Any) -> RayWatch:
    """The watch over the Ray that this process is connected to."""
    context = ray.get_runtime_context()
    own = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
    host, _, port = context.gcs_address.rpartition(":")
    return RayWatch(
        {
            "Ray on this machine has ended": (own["NodeManagerAddress"], own["NodeManagerPort"]),
            f"Ray's cluster at {context.gcs_address} has ended": (host, int(port)),
        }
    )
