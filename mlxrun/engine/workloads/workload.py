"""A kind of work that an engine does: answers, vectors of texts, the choice of tokens."""

from __future__ import annotations

from typing import Protocol

from mlxrun.core.request import Request, TokenEvent


class Workload(Protocol):
    """Called on the engine's thread only. Each request that `add` took gets exactly one event with `finish`
    set, from `step` or from `abort`, unless another workload gets the request."""

    @property
    def is_busy(self) -> bool:
        """Whether `step` has anything to do."""
        ...

    def takes(self, request: Request) -> bool:
        """Whether it computes requests of this kind."""
        ...

    def has(self, request_id: str) -> bool:
        """Whether it has an unfinished request of this id."""
        ...

    def add(self, request: Request) -> None:
        """Queue a request that it takes; no other one has its id. Overloaded, PromptTooLong or RequestError
        if it cannot run."""
        ...

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request now. Returns its final event, or None if it is not here."""
        ...

    def step(self) -> list[TokenEvent]:
        """Compute a slice. Returns the events of the requests that got further. EngineDead after too many
        failures in a row."""
        ...

    def close(self) -> None:
        """Release all arrays, on the thread that made them."""
        ...
