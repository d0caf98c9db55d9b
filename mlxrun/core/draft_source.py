"""The interface of what drafts tokens with a model. A source predicts; the draft planner decides for which
rows.

Implementations are in model/speculation/; engine/build.py gives one to the planner. A source that needs more
of the target than tokens, such as hidden states, gets it from the runner.

After a source's first error, CheckedSource closes it and drafts nothing more. No request fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from mlxrun.core.request import Request

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class KnownRow:
    """A row's request and the known tokens of its answer. The tokens only grow until the row is forgotten."""

    request: Request
    output: Sequence[int]

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def num_tokens(self) -> int:
        """The number of known tokens of prompt and answer."""
        return len(self.request.prompt) + len(self.output)

    def list_tokens(self, start: int, stop: int | None = None) -> list[int]:
        """The known tokens at the positions [start, stop)."""
        size, stop = len(self.request.prompt), self.num_tokens if stop is None else stop
        answer = self.output[max(start - size, 0) : max(stop - size, 0)]
        return [*self.request.prompt[start:stop], *answer]


class DraftSource(Protocol):
    """Predicts the next tokens of rows. Its methods are called on the engine's thread, between steps. After
    an error of any method, the source is closed and called no more; no request fails.

    `name`: its name in /v1/status. `cost`: what one more drafted token costs for all rows together, in steps
    of the target. `max_tokens`: the most tokens that it drafts for a row in a step.
    """

    @property
    def name(self) -> str: ...
    @property
    def cost(self) -> float: ...
    @property
    def max_tokens(self) -> int: ...

    def takes(self, request: Request) -> bool:
        """Whether the source can draft for this request at all."""

    def advance(self, rows: Sequence[KnownRow]) -> None:
        """Take in tokens of decoding rows: a bounded number, without waiting for the device. It is called
        each time a step is planned. Tokens newer than the known ones may be in flight."""

    def is_ready(self, row: KnownRow) -> bool:
        """Whether `propose` can draft for the row, because few of its tokens are left to take in. Newer
        tokens may be in flight; `propose` is called once they are known."""

    def propose(self, rows: Sequence[KnownRow], limits: Sequence[int]) -> Sequence[tuple[int, ...]]:
        """For each row, at most `limits` tokens that are expected after its newest one. No row has tokens in
        flight. Waits for the device once."""

    def forget(self, request_id: str) -> None:
        """Drop a row that has ended or was preempted. An unknown id has no effect; an id may come again."""

    def close(self) -> None:
        """Release all arrays of rows. No method is called afterwards."""


class CheckedSource:
    """A DraftSource whose methods never raise. `problem`: why it drafts no more, None while it drafts."""

    def __init__(self, source: DraftSource) -> None:
        self._source = source
        self.name, self.cost, self.max_tokens = source.name, source.cost, source.max_tokens
        self.problem: str | None = None

    def takes(self, request: Request) -> bool:
        return self._ask(lambda source: source.takes(request), False)

    def advance(self, rows: Sequence[KnownRow]) -> None:
        self._ask(lambda source: source.advance(rows), None)

    def is_ready(self, row: KnownRow) -> bool:
        return self._ask(lambda source: source.is_ready(row), False)

    def propose(self, rows: Sequence[KnownRow], limits: Sequence[int]) -> Sequence[tuple[int, ...]]:
        nothing: Sequence[tuple[int, ...]] = [()] * len(rows)
        return self._ask(lambda source: _check_drafts(source.propose(rows, limits), limits), nothing)

    def forget(self, request_id: str) -> None:
        self._ask(lambda source: source.forget(request_id), None)

    def close(self) -> None:
        if self.problem is None:
            self._source.close()

    def _ask(self, call: Callable[[DraftSource], Answer], default: Answer) -> Answer:
        if self.problem is not None:
            return default
        try:
            return call(self._source)
        except Exception as error:  # a model may raise anything, and no request needs its drafts
            self.problem = f"it failed: {type(error).__name__}: {error}"
            log.error("speculation: %s drafts no more: %s", self.name, self.problem, exc_info=error)
            self._release()
            return default

    def _release(self) -> None:
        """Close the source that has failed: nobody tells it any more which rows have ended."""
        try:
            self._source.close()
        except Exception as error:  # as above
            log.warning("speculation: %s cannot be closed: %s", self.name, error)


def _check_drafts(drafts: Sequence[tuple[int, ...]], limits: Sequence[int]) -> Sequence[tuple[int, ...]]:
    """ValueError unless each row has a draft within its limit."""
    if [len(draft) <= limit for draft, limit in zip(drafts, limits, strict=True)].count(False):
        raise ValueError(f"drafts of {[*map(len, drafts)]} tokens, where {[*limits]} were allowed")
    return drafts
