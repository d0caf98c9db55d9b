"""The place of one of several models: its state, its requests, and when it may be loaded or unloaded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from mlxrun.cluster.models.messages import KeyReport, ModelFacts
from mlxrun.core.errors import EngineDead, MlxrunError
from mlxrun.server.engine_state import ActiveCount

Record = Callable[[KeyReport], None]  # takes what a process reports
MOST_BACKOFF = 300.0  # seconds in which a model that failed to load is not tried again


class ModelWorker(Protocol):
    """One life of a model as the pool sees it."""

    async def start(self) -> str:
        """Load the model, serve, and return the URL. MlxrunError if that fails."""

    async def wait_dead(self) -> str:
        """Wait until it has died, and return why."""

    def start_draining(self) -> None:
        """Have it finish its requests within its own time limit, and end."""

    async def close(self) -> None:
        """End it. This raises nothing."""


@dataclass(slots=True, eq=False)
class ModelSlot:
    """One of the models. `facts`: None if nobody could describe it; `memory`: bytes that it may take;
    `keep_alive`: seconds that it stays loaded without requests, None: until memory is needed. Times
    are those of the event loop."""

    number: int
    name: str
    facts: ModelFacts | None
    make: Callable[[Record], ModelWorker]
    memory: int
    pinned: bool = False
    keep_alive: float | None = None
    state: Literal["unloaded", "loading", "ready", "draining", "unloading"] = "unloaded"
    url: str = ""
    worker: ModelWorker | None = None  # while it takes memory
    error: MlxrunError | None = None  # why it could not be loaded, or died
    failed: float = 0.0
    failures: int = 0  # in a row
    loads: int = 0
    since: float = 0.0  # when it got its state
    used: float = 0.0  # when its last request, no line of a batch, began or ended
    active: ActiveCount = field(default_factory=ActiveCount)  # of its requests
    lines: ActiveCount = field(default_factory=ActiveCount)  # of lines of batches, which are in `active` too
    waiting: dict[asyncio.Task[Any], float] = field(default_factory=dict)  # requests, since when they wait
    waiting_lines: dict[asyncio.Task[Any], float] = field(default_factory=dict)
    to_end: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def listed_names(self) -> list[str]:
        """Its names in /v1/models."""
        return [self.name] if self.facts is None else [str(each["id"]) for each in self.facts.listed]

    @property
    def running(self) -> int:
        """The number of its requests."""
        return self.active.count

    @property
    def is_loaded(self) -> bool:
        """Whether it takes memory."""
        return self.state != "unloaded"

    @property
    def is_urgent(self) -> bool:
        """Whether it is wanted for more than lines of batches, which wait for spare capacity."""
        return self.pinned or bool(self.waiting)

    @property
    def is_busy(self) -> bool:
        """Whether it has requests besides lines of batches, or such as wait and get it as soon as it is
        ready."""
        return bool(self.waiting) or self.running > self.lines.count

    @property
    def oldest(self) -> float:
        """Since when its first waiting request waits; without one, since when it is in its state."""
        return min(self.waiting.values(), default=self.since)

    def is_wanted(self, now: float) -> bool:
        """Whether it should be loaded: for a request or a line, or because it is pinned."""
        return (self.is_urgent or bool(self.waiting_lines)) and self.compute_backoff(now) <= 0

    def compute_backoff(self, now: float) -> float:
        """The seconds in which it is not tried again after a failure; 0 or less: it may be."""
        is_first_death = self.failures == 1 and isinstance(self.error, EngineDead)
        if self.error is None or not self.failures or is_first_death:
            return 0.0
        return self.failed + min(2.0**self.failures, MOST_BACKOFF) - now

    def compute_lifetime(self, now: float) -> float | None:
        """The seconds until it is unloaded if it gets no request; None: it stays."""
        if self.pinned or self.keep_alive is None:
            return None
        return max(self.used, self.since) + self.keep_alive - now

    @property
    def label(self) -> str:
        """What metrics call it."""
        return self.name

    def describe(self) -> dict[str, Any]:
        """Describe the model for /v1/status."""
        found = {
            "model": self.name,
            "state": self.state,
            "running": self.running,
            "waiting": len(self.waiting),
            "lines": {"running": self.lines.count, "waiting": len(self.waiting_lines)},
        }
        found |= {"pinned": self.pinned, "keep_alive": self.keep_alive, "memory": self.memory}
        return found | {"loads": self.loads, **({} if self.error is None else {"error": str(self.error)})}
