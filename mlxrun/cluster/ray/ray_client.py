"""An actor of Ray as a worker of any kind: started, described, asked, and ended."""

from __future__ import annotations

import asyncio
import importlib
import logging
import re
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from mlxrun.cluster.messages import RayEnded, WorkerDied, WorkerFacts, WorkerRefused
from mlxrun.cluster.ray.ray_cluster import Placement, is_node_alive
from mlxrun.cluster.ray.ray_watch import RayWatch
from mlxrun.cluster.worker_checks import check_worker
from mlxrun.core.errors import EngineDead, MlxrunError

log = logging.getLogger(__name__)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PROCESS = re.compile(r"The actor is dead because (its [^.\n]+)\.")
_DETAIL = re.compile(r"exit detail: ([^\n]+?)\.(?:\s|$)")
CLOSE_SECONDS = 20.0  # that engines may take to write their prefix caches


@dataclass(slots=True)
class RayCrew:
    """What workers of one model have in common. `first`: the facts that all others are compared with; `here`:
    those of the driver, which the first worker is compared with."""

    ray: Any
    watch: RayWatch
    mixed: bool
    first: WorkerFacts | None = None
    here: Mapping[str, Any] = field(default_factory=dict)


class RayActor:
    """An actor of `actor_class`, made of `spec`; it has the methods `describe` and `close`."""

    def __init__(self, crew: RayCrew, actor_class: type, spec: Any, placement: Placement) -> None:
        self._crew = crew
        self._errors = importlib.import_module("ray.exceptions")
        options = {"max_restarts": 0, "max_concurrency": 64, **placement.options}
        self.actor = crew.ray.remote(actor_class).options(**options).remote(spec)
        self._facts: WorkerFacts | None = None

    async def describe(self) -> WorkerFacts:
        """What the worker is. WorkerRefused if it must not be used."""
        if self._facts is None:
            self._facts = raise_refused(await self.call(self.actor.describe.remote()))
            self._crew.first = self._crew.first or replace(self._facts, **self._crew.here)
            found = check_worker(self._facts, self._crew.first, mixed=self._crew.mixed)
            if found:
                log.warning("worker on %s is accepted by --mixed: %s", self._facts.host, "; ".join(found))
        return self._facts

    async def close(self) -> None:
        """Stop the actor, and end its process; raises nothing."""
        with suppress(WorkerDied, EngineDead, TimeoutError):
            if self._facts is not None:
                await asyncio.wait_for(self.call(self.actor.close.remote()), CLOSE_SECONDS)
        await self._crew.watch.run_aside(self._crew.ray.kill, self.actor)

    async def call(self, reply: Awaitable[Any]) -> Any:
        """The reply of the actor. WorkerDied if there is none, RayEnded if Ray has ended."""
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


def describe_end(text: str) -> str:
    """Why an actor has ended, in Ray's words: of a process, the sentence on its end, else the first and the
    last line. No colours, no guesses."""
    plain = _COLOUR.sub("", text).partition("Some common causes include")[0]
    if found := _PROCESS.search(plain):
        detail = _DETAIL.search(plain)
        return found[1] if detail is None else f"{found[1]}: {detail[1]}"
    lines = [line.strip() for line in plain.splitlines() if line.strip()] or ["no reason is known"]
    return lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"


def raise_refused(found: Any) -> Any:
    """What an actor has returned, unless it is why the worker cannot be used."""
    if isinstance(found, MlxrunError):
        raise WorkerRefused(str(found)) from found
    return found
