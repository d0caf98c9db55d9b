"""An actor of Ray as a worker of any kind, and the watch over Ray itself.

Ray does not tell a driver that it has ended: the driver would wait for its actors for good. Two services of
Ray must run: the one of the driver's machine, and the one of the cluster. Every few seconds, both get a
greeting that an HTTP/2 server answers.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib
import logging
import re
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from mlxrun.cluster.messages import RayEnded, WorkerDied, WorkerFacts, WorkerRefused, check_worker
from mlxrun.core.errors import EngineDead, MlxrunError
from mlxrun.core.workers import ignore_error

PAUSE = 2.0  # seconds between two questions
MOST_MISSED = 5  # questions in a row without an answer; then the service has ended
REACH_SECONDS = 3.0  # until an address must have answered
# An HTTP/2 server such as Ray's answers this, a client's preface and empty settings, with its own settings.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
_SETTINGS = 4  # type of the frame

log = logging.getLogger(__name__)


def find_unreachable(host: str, port: int) -> str | None:
    """Return why no server of Ray's kind answers there; None if one does. This blocks for at most twice
    REACH_SECONDS."""
    try:
        with socket.create_connection((host.strip("[]"), port), REACH_SECONDS) as connection:
            connection.settimeout(REACH_SECONDS)
            connection.sendall(_HELLO)
            answer = connection.recv(9)
    except (OSError, OverflowError) as error:
        return str(error)
    return None if len(answer) > 3 and answer[3] == _SETTINGS else "what listens there is not Ray"


class RayWatch:
    """Waits for the end of Ray, beginning with the first reply that somebody waits for. `services`: host and
    port of each service, by the sentence that says that it has ended; `pause`: seconds, see PAUSE."""

    def __init__(self, services: Mapping[str, tuple[str, int]], pause: float = PAUSE) -> None:
        self.reason = ""  # why Ray has ended, once it has
        self._services = services
        self._pause = pause
        self._watching: asyncio.Task[None] | None = None

    async def wait_reply(self, reply: Awaitable[Any]) -> Any:
        """Wait for the reply of an actor. RayEnded if Ray ends before."""
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
            answer.add_done_callback(ignore_error)

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
        """Return the result of a function of Ray, which blocks as long as Ray is out of reach. None if it
        fails, or if Ray ends before. Its thread does not keep the process from ending."""
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


async def leave_ray(ray: Any, watch: RayWatch) -> None:
    """Leave Ray; a Ray that this process has started ends. If Ray has ended already, nothing waits for it."""
    await watch.run_aside(ray.shutdown)
    watch.close()
    if watch.reason:
        atexit.unregister(ray.shutdown)


def make_watch(ray: Any) -> RayWatch:
    """Make the watch over the Ray to which this process is connected."""
    context = ray.get_runtime_context()
    own = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
    host, _, port = context.gcs_address.rpartition(":")
    return RayWatch(
        {
            "Ray on this machine has ended": (own["NodeManagerAddress"], own["NodeManagerPort"]),
            f"Ray's cluster at {context.gcs_address} has ended": (host, int(port)),
        }
    )


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PROCESS = re.compile(r"The actor is dead because (its [^.\n]+)\.")
_DETAIL = re.compile(r"exit detail: ([^\n]+?)\.(?:\s|$)")
CLOSE_SECONDS = 20.0  # that engines may take to write their prefix caches


@dataclass(slots=True)
class RayCrew:
    """What the workers of one model share. `first`: the facts with which all others are compared; `here`:
    those of the driver, with which the first worker is compared."""

    ray: Any
    watch: RayWatch
    mixed: bool
    first: WorkerFacts | None = None
    here: Mapping[str, Any] = field(default_factory=dict)


class RayActor:
    """An actor of `actor_class`, made of `spec`. It has the methods `describe` and `close`. `options`: those
    of Ray, from `place_workers`."""

    def __init__(self, crew: RayCrew, actor_class: type, spec: Any, options: Mapping[str, Any]) -> None:
        self._crew = crew
        self._errors = importlib.import_module("ray.exceptions")
        remote = crew.ray.remote(actor_class).options(max_restarts=0, max_concurrency=64, **options)
        self.actor = remote.remote(spec)
        self._facts: WorkerFacts | None = None

    async def describe(self) -> WorkerFacts:
        """Describe the worker. WorkerRefused if it must not be used."""
        if self._facts is None:
            self._facts = raise_refused(await self.ask("describe"))
            self._crew.first = self._crew.first or replace(self._facts, **self._crew.here)
            found = check_worker(self._facts, self._crew.first, mixed=self._crew.mixed)
            if found:
                log.warning("worker on %s is accepted by --mixed: %s", self._facts.host, "; ".join(found))
        return self._facts

    async def close(self) -> None:
        """Stop the actor, and end its process. This raises nothing."""
        with suppress(WorkerDied, EngineDead, TimeoutError):
            if self._facts is not None:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self.ask("close")
        await self._crew.watch.run_aside(self._crew.ray.kill, self.actor)

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the actor, and return its result. It raises what `call` raises."""
        return await self.call(getattr(self.actor, method).remote(*arguments))

    async def call(self, reply: Awaitable[Any]) -> Any:
        """Wait for the reply of the actor. WorkerDied if there is none, WorkerRefused if the actor cannot be
        made, EngineDead if its method fails, RayEnded if Ray has ended."""
        try:
            return await self._crew.watch.wait_reply(reply)
        except self._errors.RayTaskError as error:  # a bug, and no line's fault
            raise EngineDead(f"a worker failed: {type(error.cause).__name__}: {error.cause}") from error
        except self._errors.RayError as error:
            reason = describe_end(str(error))
            if self._facts is None and "creation task" in reason:  # it would be the same at every try
                raise WorkerRefused(
                    f"a worker cannot run mlxrun: {reason}. Install the same version of mlxrun with all it "
                    "needs on all machines"
                ) from error
            node = "" if self._facts is None else self._facts.node
            gone = bool(node) and not await self._crew.watch.run_aside(is_node_alive, self._crew.ray, node)
            if self._crew.watch.reason:
                raise RayEnded(self._crew.watch.reason) from error
            raise WorkerDied(reason, blameless=gone) from error


def is_node_alive(ray: Any, node: str) -> bool:
    """Whether a node takes part in the cluster. True if that cannot be found out."""
    with suppress(Exception):
        return any(each["NodeID"] == node and each["Alive"] for each in ray.nodes())
    return True


def describe_end(text: str) -> str:
    """Describe why an actor has ended, in Ray's words: the sentence on its process's end, else the first and
    the last line. Colours and guesses are left out."""
    plain = _COLOUR.sub("", text).partition("Some common causes include")[0]
    if found := _PROCESS.search(plain):
        detail = _DETAIL.search(plain)
        return found[1] if detail is None else f"{found[1]}: {detail[1]}"
    lines = [line.strip() for line in plain.splitlines() if line.strip()] or ["no reason is known"]
    return lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"


def raise_refused(found: Any) -> Any:
    """Return an actor's result. If the result is an error, raise it as WorkerRefused."""
    if isinstance(found, MlxrunError):
        raise WorkerRefused(str(found)) from found
    return found
