"""Vectors of texts (embeddings, scores) in slices between the steps of the engine.

A slice computes a part of one batch of texts, and takes about `scheduler.step_ms`: what generates waits no
longer for it than for a chunk of a prompt. Background requests run where nobody else has a prompt.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from mlxrun.config.settings import SchedulerSettings
from mlxrun.core.errors import EngineDead
from mlxrun.core.memory_budget import MemoryBudget
from mlxrun.core.pooling_batch import PoolingBatch
from mlxrun.core.request import Request, TokenEvent
from mlxrun.core.step_costs import MIN_CHUNK
from mlxrun.engine.scheduler.prefill_pace import MeasuredPace
from mlxrun.engine.scheduler.scheduler import Scheduler
from mlxrun.engine.workloads.pooling_queue import PoolingQueue
from mlxrun.model.pooling.pooling_runner import PoolingCheck

log = logging.getLogger(__name__)


class VectorRunner(Protocol):
    """The part of model.pooling.pooling_runner.PoolingRunner that the engine needs."""

    @property
    def max_rows(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def max_padding(self) -> int | None: ...
    @property
    def takes_whole_texts(self) -> bool: ...
    @property
    def checks(self) -> Sequence[PoolingCheck]: ...
    def advance(self, batch: PoolingBatch, tokens: int) -> Sequence[bytes] | None: ...
    def close(self) -> None: ...


class PoolingSteps:
    """`max_errors`: failed slices in a row after which the engine stops. `memory`: what texts take, as caches
    and in a forward, beside the rows of `scheduler`, with which they share it."""

    def __init__(
        self,
        runner: VectorRunner,
        settings: SchedulerSettings,
        max_errors: int,
        clock: Callable[[], float] = time.monotonic,
        memory: MemoryBudget | None = None,
        scheduler: Scheduler | None = None,
    ) -> None:
        most = 0 if runner.takes_whole_texts else max(settings.prefill_budget, settings.chunk or 0)
        self.queue = PoolingQueue(
            runner.max_tokens, settings.max_queue, runner.max_rows, runner.max_padding, memory, most
        )
        self._scheduler = scheduler
        if scheduler is not None:
            scheduler.token_budget.texts = self.queue
        self._runner = runner
        self._seconds = (settings.step_ms or 0) / 1000
        self._idle_tokens = settings.prefill_budget
        self._busy_tokens = settings.prefill_budget_busy or settings.prefill_budget
        self._pace = MeasuredPace()
        self._clock = clock
        self._max_errors = max_errors
        self._failures_in_a_row = 0

    @property
    def checks(self) -> Sequence[PoolingCheck]:
        """What was compared when the model was loaded."""
        return self._runner.checks

    @property
    def max_rows(self) -> int:
        """Texts that are computed together at most."""
        return self._runner.max_rows

    @property
    def is_busy(self) -> bool:
        return self.queue.busy

    def takes(self, request: Request) -> bool:
        """All that ask for a vector."""
        return request.pooled

    def has(self, request_id: str) -> bool:
        """Whether its vector is not computed yet."""
        return self.queue.has(request_id)

    def add(self, request: Request) -> None:
        """Queue a text; see PoolingQueue.add."""
        self.queue.add(request)

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request now. Returns its final event, or None if it is not here."""
        return self.queue.abort(request_id)

    def step(self) -> list[TokenEvent]:
        """Compute a slice beside the rows of the scheduler; see compute_slice."""
        assert self._scheduler is not None
        states, budget = self._scheduler.requests, self._scheduler.token_budget
        running = [s for s in states if s.running]
        prompts = any(not s.request.background and s.remaining_prefill for s in states)
        return self.compute_slice(
            decoding=any(s.decoding for s in states),
            background=not (prompts or self.queue.has_foreground),
            fits=lambda nbytes: budget.can_start_texts(running, nbytes),
            alone=not running,
            blocked=prompts and not running,
        )

    def compute_slice(
        self,
        *,
        decoding: bool,
        background: bool,
        fits: Callable[[int], bool] = lambda nbytes: True,
        alone: bool = False,
        blocked: bool = False,
    ) -> list[TokenEvent]:
        """Compute a slice, and return the events of the requests that ended with it. `decoding`: whether rows
        decode meanwhile; the others: see PoolingQueue.choose. EngineDead after `max_errors` failed slices in
        a row."""
        limit = self._limit_tokens(self._busy_tokens if decoding else self._idle_tokens)
        batch = self.queue.choose(limit, background, fits, alone=alone, blocked=blocked)
        if batch is None:
            return []
        started, before = self._clock(), batch.computed
        try:
            vectors = self._runner.advance(batch, limit)
        except Exception as error:  # whatever the model raises, each request must get an answer
            return self._handle_failure(batch, error)
        self._failures_in_a_row = 0
        self._pace.record((batch.computed - before) * len(batch.requests), self._clock() - started)
        return [] if vectors is None else self.queue.finish(batch, vectors)

    def _limit_tokens(self, most: int) -> int:
        """Tokens of the next slice, padding included."""
        pace = self._pace.compute()
        if not self._seconds:
            return most
        return max(min(most, MIN_CHUNK if pace is None else int(pace * self._seconds)), MIN_CHUNK)

    def _handle_failure(self, batch: PoolingBatch, error: Exception) -> list[TokenEvent]:
        self._failures_in_a_row += 1
        log.error("a batch of %d texts failed: %s", len(batch.requests), error, exc_info=error)
        events = self.queue.fail(batch, error)
        if self._failures_in_a_row >= self._max_errors:
            raise EngineDead(
                f"{self._failures_in_a_row} batches of texts failed in a row: {error}"
            ) from error
        return events

    def close(self) -> None:
        """Release all arrays, on the thread that made them."""
        self._runner.close()
