"""A draft source that may fail: after its first error it is closed, drafts nothing, and fails no request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from mlxrun.core.draft_source import DraftSource, KnownRow
from mlxrun.core.request import Request

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")


class CheckedSource:
    """Has the members of DraftSource, none of which raises. `problem`: why it drafts no more; None: it
    does."""

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
