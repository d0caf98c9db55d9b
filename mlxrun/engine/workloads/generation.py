"""Answers: the scheduler decides what a step computes, the model runner computes it."""

from __future__ import annotations

import logging
import time

from mlxrun.core.request import Request, TokenEvent
from mlxrun.core.step_plan import StepPlan
from mlxrun.engine.scheduler.scheduler import Scheduler
from mlxrun.engine.workloads.failure_streak import FailureStreak
from mlxrun.model.pooling.pooling_runner import IdleRunner
from mlxrun.model.run.runner import ModelRunner

log = logging.getLogger(__name__)


Runner = ModelRunner | IdleRunner


class GenerationSteps:
    """Computes answers. `max_errors`: consecutive failed steps after which the engine stops, unless the model
    still computes."""

    def __init__(self, scheduler: Scheduler, runner: Runner, max_errors: int) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.steps = 0  # since the start
        self.errors = 0  # failed steps since the start
        self.prefilled = self.generated = 0  # tokens since the start: computed by prefill; of answers
        self._failures = FailureStreak("steps", max_errors, runner)  # since the last token
        self._has_aborted = False  # since the last step: the runner is to free a row
        self._last_plan: StepPlan | None = None  # of the step before; None if nothing generated then
        self._last_time = 0.0  # when that step ended

    @property
    def is_busy(self) -> bool:
        return self.scheduler.busy or self._has_aborted or self.runner.has_pending_snapshots

    def takes(self, request: Request) -> bool:
        """Whether the request asks for tokens."""
        return not request.pooled and request.recording is None

    def has(self, request_id: str) -> bool:
        """Whether the scheduler has a request with this id."""
        return self.scheduler.has(request_id)

    def add(self, request: Request) -> None:
        """Queue a request with the scheduler. Raises the errors of Scheduler.add."""
        self.scheduler.add(request)

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request now. The runner frees its row in the next step."""
        event = self.scheduler.abort(request_id)
        self._has_aborted |= event is not None
        return event

    def step(self) -> list[TokenEvent]:
        """Run one step: schedule, execute, update. Returns the events of the requests that made progress.

        `execute` launches a step and returns the tokens of the one before. In two cases this step launches
        nothing and only collects these tokens. One is that they are first tokens only: clients wait for them,
        and no decoding row is delayed. The other is that drafts are about to follow. EngineDead after
        `engine.max_errors` consecutive failed steps, if the model computes nothing by itself either.
        """
        self.steps += 1
        self._has_aborted = False
        if self._last_plan is None:
            self._last_time = time.monotonic()
        collect_only = self.runner.awaits_first_tokens and not self.scheduler.has_rows_to_free
        collect_only |= self.runner.awaits_drafts  # also those of a row that has been aborted since
        collect_only |= self.scheduler.drafts.awaits_tokens(self.scheduler.requests)
        are_stored = not self.runner.has_pending_snapshots
        plan = StepPlan() if collect_only else self.scheduler.schedule(are_stored)
        try:
            result = self.runner.collect() if collect_only else self.runner.execute(plan)
        except Exception as error:  # whatever the model raises, each request must get an answer
            return self._handle_failed_step(plan, error)
        self._record_time(plan)
        prefix_cache = self.scheduler.prefix_cache
        for logprobs in filter(self.scheduler.owns_logprobs, result.prompt_logprobs):
            prefix_cache.record_prompt_logprobs(logprobs)
        for snapshot in result.snapshots:
            prefix_cache.store_snapshot(snapshot)
        for request_id in result.invalid_hits:
            prefix_cache.invalidate_hit(request_id)
        # Only these prove that a step succeeded: errors come late.
        if result.tokens or result.prompt_logprobs:
            self._failures.end()
        events = self.scheduler.update(plan, result)
        self.prefilled += sum(chunk.stop - chunk.start for chunk in plan.prefill)
        self.generated += sum(len(event.tokens) for event in events)
        if not self.is_busy:  # the time until the next step is that of texts, or nobody's
            self._last_plan = None
        return events

    def _record_time(self, plan: StepPlan) -> None:
        """Take in how long the runner took to launch `plan` and to wait for the step before."""
        now = time.monotonic()
        self.scheduler.token_budget.pace.record_step(plan, self._last_plan, now - self._last_time)
        self._last_plan, self._last_time = plan, now

    def _handle_failed_step(self, plan: StepPlan, error: Exception) -> list[TokenEvent]:
        self.errors += 1
        log.error("step failed (%d in a row): %s", self._failures.length + 1, error, exc_info=error)
        self.runner.reset()
        self._last_plan = None
        self._failures.add(error)
        return self.scheduler.step_failed(plan, error)

    def exclude_time(self) -> None:
        """Exclude the time since the last step from the time of the next one."""
        self._last_time = time.monotonic()

    def close(self) -> None:
        """Release all arrays, on the thread that made them."""
        self.scheduler.drafts.close()
        self.runner.close()
