"""The engine: one synchronous step after the other. Front ends reach it through engine/client.py.

Knows token ids, not text. Every request that `add` took in ends with exactly one event with `finish` set.
"""

from __future__ import annotations

import logging
from typing import Protocol

from mlxrun.config.settings import EngineSettings
from mlxrun.errors import EngineDead
from mlxrun.model.model_info import LoadedModelInfo
from mlxrun.model.probe import ProbeReport
from mlxrun.scheduler.prefix_cache_interface import NoPrefixCache, PrefixCacheInterface
from mlxrun.scheduler.request import Request, TokenEvent
from mlxrun.scheduler.scheduler import Scheduler
from mlxrun.scheduler.step_plan import StepPlan, StepResult

log = logging.getLogger(__name__)


class Runner(Protocol):
    """What the engine needs of model.runner.ModelRunner; tests put a scripted one here."""

    @property
    def has_pending_snapshots(self) -> bool: ...
    @property
    def awaits_first_tokens(self) -> bool: ...
    def collect(self) -> StepResult: ...
    def execute(self, plan: StepPlan) -> StepResult: ...
    def reset(self) -> None: ...
    def close(self) -> None: ...


class Engine:
    """Scheduler and runner, joined. Not thread-safe: one thread builds, steps and closes it."""

    def __init__(
        self,
        model_info: LoadedModelInfo,
        scheduler: Scheduler,
        runner: Runner,
        settings: EngineSettings,
        probe: ProbeReport | None = None,
        prefix_cache: PrefixCacheInterface | None = None,
    ) -> None:
        """`prefixes`: the scheduler's; copies that the runner made go there."""
        self.model_info = model_info
        self.scheduler = scheduler
        self.probe = probe
        self.prefix_cache: PrefixCacheInterface = prefix_cache or NoPrefixCache()
        self._runner = runner
        self._settings = settings
        self.steps = 0  # since the start
        self.errors = 0  # of these, those that failed
        self._failures_in_a_row = 0  # steps that failed since a token last came out
        self._aborted: list[TokenEvent] = []

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.busy or bool(self._aborted) or self._runner.has_pending_snapshots

    def add(self, request: Request) -> None:
        """Take a request in; Overloaded, PromptTooLong or RequestError if it cannot run."""
        self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        """End a request; its final event comes with the next step. Nothing happens if it has ended."""
        event = self.scheduler.abort(request_id)
        if event is not None:
            self._aborted.append(event)

    def clear_cache(self) -> None:
        """Forget all prefixes that no running request uses."""
        self.prefix_cache.clear()

    def step(self) -> list[TokenEvent]:
        """Schedule, run, update; first tokens that somebody waits for are only read. EngineDead after
        `engine.max_errors` failed steps in a row."""
        self.steps += 1
        only_read = self._runner.awaits_first_tokens and not self.scheduler.freeing
        plan = StepPlan() if only_read else self.scheduler.schedule()
        try:
            result = self._runner.collect() if only_read else self._runner.execute(plan)
        except Exception as error:  # the border: whatever a model does, requests get an answer
            return self._handle_failed_step(plan, error)
        for saved in result.snapshots:
            self.prefix_cache.store_snapshot(saved)
        for request_id in result.invalid_hits:
            self.prefix_cache.invalidate_hit(request_id)
        if result.tokens:  # with decode-ahead, only what comes out shows that a step has worked
            self._failures_in_a_row = 0
        events, self._aborted = self._aborted, []
        return events + self.scheduler.update(plan, result)

    def _handle_failed_step(self, plan: StepPlan, error: Exception) -> list[TokenEvent]:
        self.errors += 1
        self._failures_in_a_row += 1
        log.error("step failed (%d in a row): %s", self._failures_in_a_row, error, exc_info=error)
        self._runner.reset()
        events, self._aborted = self._aborted, []
        if self._failures_in_a_row >= self._settings.max_errors:
            raise EngineDead(f"{self._failures_in_a_row} steps failed in a row: {error}") from error
        return events + self.scheduler.step_failed(plan, error)

    def close(self) -> None:
        """Drop all arrays, on the thread that made them."""
        try:
            self.prefix_cache.shutdown()
        finally:
            self._runner.close()
