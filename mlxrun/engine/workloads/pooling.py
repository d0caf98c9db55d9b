"""Vectors of texts (embeddings, scores) in slices between the steps of the engine.

A slice computes a part of one batch of texts, and takes about `scheduler.step_ms`: what generates waits no
longer for it than for a chunk of a prompt. Background requests run where nobody else has a prompt.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from mlxrun.core.errors import EngineDead
from mlxrun.core.pooling_batch import PoolingBatch
from mlxrun.core.request import Request, TokenEvent
from mlxrun.core.step_costs import MIN_CHUNK
from mlxrun.engine.scheduler.prefill_pace import MeasuredPace
from mlxrun.engine.scheduler.scheduler import Scheduler
from mlxrun.engine.workloads.pooling_queue import PoolingQueue
from mlxrun.model.pooling.pooling_runner import PoolingRunner

log = logging.getLogger(__name__)


class PoolingSteps(PoolingQueue):
    """`max_errors`: failed slices in a row after which the engine stops. Texts share the memory of the
    scheduler's rows."""

    def __init__(
        self,
        runner: PoolingRunner,
        scheduler: Scheduler,
        max_errors: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        settings = scheduler.settings
        most = 0 if runner.takes_whole_texts else max(settings.prefill_budget, settings.chunk or 0)
        sizes = runner.max_tokens, settings.max_queue, runner.max_rows, runner.max_padding
        super().__init__(*sizes, scheduler.limits.memory, most)
        self.runner = runner
        self._scheduler = scheduler
        scheduler.token_budget.texts = self
        self._pace = MeasuredPace()
        self._clock = clock
        self._max_errors = max_errors
        self._failures_in_a_row = 0

    def takes(self, request: Request) -> bool:
        """All that ask for a vector."""
        return request.pooled

    def step(self) -> list[TokenEvent]:
        """Compute a slice beside the rows of the scheduler. Returns the events of the requests that ended
        with it. EngineDead after `max_errors` failed slices in a row."""
        states, budget = self._scheduler.requests, self._scheduler.token_budget
        running = [s for s in states if s.running]
        prompts = any(not s.request.background and s.remaining_prefill for s in states)
        limit = self._limit_tokens(decoding=any(s.decoding for s in states))
        batch = self.choose(
            limit,
            background=not (prompts or self.has_foreground),
            fits=lambda nbytes: budget.can_start_texts(running, nbytes),
            alone=not running,
            blocked=prompts and not running,
        )
        if batch is None:
            return []
        started, before = self._clock(), batch.computed
        try:
            vectors = self.runner.advance(batch, limit)
        except Exception as error:  # whatever the model raises, each request must get an answer
            return self._handle_failure(batch, error)
        self._failures_in_a_row = 0
        self._pace.record((batch.computed - before) * len(batch.requests), self._clock() - started)
        return [] if vectors is None else self.finish(batch, vectors)

    def _limit_tokens(self, decoding: bool) -> int:
        """Tokens of the next slice, padding included."""
        settings, pace = self._scheduler.settings, self._pace.compute()
        most = (settings.prefill_budget_busy if decoding else None) or settings.prefill_budget
        if not settings.step_ms:
            return most
        fits = MIN_CHUNK if pace is None else int(pace * settings.step_ms / 1000)
        return max(min(most, fits), MIN_CHUNK)

    def _handle_failure(self, batch: PoolingBatch, error: Exception) -> list[TokenEvent]:
        self._failures_in_a_row += 1
        log.error("a batch of %d texts failed: %s", len(batch.requests), error, exc_info=error)
        events = self.fail(batch, error)
        if self._failures_in_a_row >= self._max_errors:
            raise EngineDead(
                f"{self._failures_in_a_row} batches of texts failed in a row: {error}"
            ) from error
        return events

    def close(self) -> None:
        """Release all arrays, on the thread that made them."""
        self.runner.close()
