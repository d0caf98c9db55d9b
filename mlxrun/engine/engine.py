"""The engine: a scheduler and a model runner, joined by `step`. Front ends reach it through engine/client.py.

It knows token ids, not text. Every request that `add` accepted gets exactly one event with `finish` set.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Protocol

import numpy as np

from mlxrun.config.settings import EngineSettings
from mlxrun.core.content_ids import compute_digest
from mlxrun.core.errors import EngineDead, MlxrunError, RequestError
from mlxrun.core.request import FinishReason, Request, TokenEvent
from mlxrun.core.step_plan import StepPlan, StepResult
from mlxrun.engine.scheduler.prefix_cache_interface import NoPrefixCache, PrefixCacheInterface
from mlxrun.engine.scheduler.scheduler import Scheduler
from mlxrun.engine.workloads.pooling import PoolingSteps
from mlxrun.engine.workloads.token_selection import TokenSelection
from mlxrun.model.load.model_info import LoadedModelInfo
from mlxrun.model.probe.report import ProbeReport

log = logging.getLogger(__name__)


class Runner(Protocol):
    """The part of model.runner.ModelRunner that the engine needs. Tests use a scripted runner instead."""

    @property
    def has_pending_snapshots(self) -> bool: ...
    @property
    def awaits_first_tokens(self) -> bool: ...
    @property
    def awaits_drafts(self) -> bool: ...
    def collect(self) -> StepResult: ...
    def execute(self, plan: StepPlan) -> StepResult: ...
    def reset(self) -> None: ...
    def close(self) -> None: ...


class Engine:
    """Not thread-safe: one thread builds, steps and closes it. `prefix_cache` is the scheduler's; `pooling`
    computes vectors, None: the model gives none; `selection` leaves out tokens of long prompts, None: all are
    computed; `num_embeddings`: tokens that the model has embeddings for, 0: not known."""

    def __init__(
        self,
        model_info: LoadedModelInfo,
        scheduler: Scheduler,
        runner: Runner,
        settings: EngineSettings,
        probe: ProbeReport | None = None,
        prefix_cache: PrefixCacheInterface | None = None,
        pooling: PoolingSteps | None = None,
        selection: TokenSelection | None = None,
        num_embeddings: int = 0,
    ) -> None:
        self.pooling = pooling
        self.selection = selection
        self.model_info = model_info
        self.scheduler = scheduler
        self.probe = probe
        self.prefix_cache: PrefixCacheInterface = prefix_cache or NoPrefixCache()
        self._runner = runner
        self._settings = settings
        self._num_embeddings = num_embeddings
        self.steps = 0  # since the start
        self.errors = 0  # failed steps since the start
        self._failures_in_a_row = 0  # failed steps since the last token
        self._aborted: list[TokenEvent] = []  # final events that the next step returns
        self._last_plan: StepPlan | None = None  # of the step before; None if the engine was idle then
        self._last_time = 0.0  # when that step ended
        self.held = ExitStack()  # what the engine holds of the process until it is closed

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return self._generates or self._pools or self._selects

    @property
    def _generates(self) -> bool:
        return self.scheduler.busy or bool(self._aborted) or self._runner.has_pending_snapshots

    @property
    def _pools(self) -> bool:
        return self.pooling is not None and self.pooling.queue.busy

    @property
    def _selects(self) -> bool:
        return self.selection is not None and self.selection.busy

    def add(self, request: Request) -> None:
        """Queue a request. Raises Overloaded, PromptTooLong or RequestError if it cannot run."""
        self._check_tokens(request)
        if request.media is not None and self.probe is not None and self.probe.methods.whole_media:
            request = join_media_spans(request)
        if request.media is not None and self._settings.reproducible:
            request = join_digests(request)
        if not request.pooled:
            self._add_prompt(request)
        elif self.pooling is None:
            raise RequestError("this model gives no embeddings and no scores")
        else:
            self.pooling.queue.add(request)

    def _add_prompt(self, request: Request) -> None:
        if self.selection is None:
            return self.scheduler.add(request)
        known = {*self.selection.waiting, *(state.id for state in self.scheduler.requests)}
        if request.id in known:
            raise RequestError(f"a request with id {request.id!r} is already running")
        if self.selection.takes(request):
            self.selection.add(request)
        else:
            self.scheduler.add(request)

    def _check_tokens(self, request: Request) -> None:
        """RequestError for a token without an embedding; those of images get theirs from elsewhere."""
        size = self._num_embeddings
        if not size or not request.prompt or max(request.prompt) < size:
            return
        spans = request.image_spans
        for at, token in enumerate(request.prompt):
            if token >= size and not any(start <= at < stop for start, stop in spans):
                raise RequestError(
                    f"token {at} of the prompt is {token}, and the model has embeddings of {size} tokens: "
                    "its tokenizer knows a special token that the model does not",
                    code="unknown_token",
                )

    def abort(self, request_id: str) -> None:
        """End a request; its final event comes with the next step. Does nothing if it has already ended."""
        event = self.scheduler.abort(request_id)
        if event is None and self.pooling is not None:
            event = self.pooling.queue.abort(request_id)
        if event is None and self.selection is not None:
            event = self.selection.abort(request_id)
        if event is not None:
            self._aborted.append(event)

    def step(self) -> list[TokenEvent]:
        """Run one step of what generates, and compute a slice of the prompts whose tokens are chosen and of
        the texts that wait for a vector. Returns the events of the requests that got further. Raises
        EngineDead after `engine.max_errors` failures of rows or texts in a row."""
        if self.pooling is not None:
            queue, budget = self.pooling.queue, self.scheduler.token_budget
            budget.held_by_texts, budget.wanted_by_texts = queue.held_bytes, queue.wanted_bytes
        is_idle = not (self._pools or self._selects)
        events = self._step_rows() if self._generates or is_idle else []
        if self._selects:
            events += self._select_tokens()
        if self._pools:
            events += self._compute_vectors()
        return events

    def _compute_vectors(self) -> list[TokenEvent]:
        assert self.pooling is not None
        states, budget = self.scheduler.requests, self.scheduler.token_budget
        running = [s for s in states if s.running]
        prompts = any(not s.request.background and s.remaining_prefill for s in states)
        events = self.pooling.step(
            decoding=any(s.decoding for s in states),
            background=not (prompts or self.pooling.queue.has_foreground),
            fits=lambda nbytes: budget.can_start_texts(running, nbytes),
            alone=not running,
            blocked=prompts and not running,
        )
        self._last_time = time.monotonic()  # the slice is no part of the next step
        return events

    def _select_tokens(self) -> list[TokenEvent]:
        assert self.selection is not None
        ready = self.selection.step(decoding=any(s.decoding for s in self.scheduler.requests))
        self._last_time = time.monotonic()  # the slice is no part of the next step
        if ready is not None:
            try:
                self.scheduler.add(ready)
            except MlxrunError as error:
                return [TokenEvent(ready.id, finish=FinishReason.ERROR, error=error)]
        return []

    def _step_rows(self) -> list[TokenEvent]:
        """Schedule, execute, update: run one step, and return the events of the requests that got further.

        `execute` launches a step and returns the tokens of the one before. If those are first tokens only,
        this step just collects them: clients wait for a first token, and no decoding row is delayed by
        reading it before the next launch; or if drafts are about to follow. Raises EngineDead after
        `engine.max_errors` failed steps in a row.
        """
        self.steps += 1
        if self._last_plan is None:
            self._last_time = time.monotonic()
        collect_only = self._runner.awaits_first_tokens and not self.scheduler.has_rows_to_free
        collect_only |= self._runner.awaits_drafts  # also those of a row that has been aborted since
        collect_only |= self.scheduler.drafts.awaits_tokens(self.scheduler.requests)
        are_stored = not self._runner.has_pending_snapshots
        plan = StepPlan() if collect_only else self.scheduler.schedule(are_stored)
        try:
            result = self._runner.collect() if collect_only else self._runner.execute(plan)
        except Exception as error:  # whatever the model raises, each request must get an answer
            return self._handle_failed_step(plan, error)
        self._record_time(plan)
        for scores in filter(self.scheduler.owns_scores, result.scores):
            self.prefix_cache.record_scores(scores)
        for snapshot in result.snapshots:
            self.prefix_cache.store_snapshot(snapshot)
        for request_id in result.invalid_hits:
            self.prefix_cache.invalidate_hit(request_id)
        if result.tokens or result.scores:  # only these prove that a step succeeded: errors come late
            self._failures_in_a_row = 0
        events = self._take_aborted() + self.scheduler.update(plan, result)
        if not self._generates:  # the time until the next step is that of texts, or nobody's
            self._last_plan = None
        return events

    def _record_time(self, plan: StepPlan) -> None:
        """Take in how long the runner took to launch `plan` and to wait for the step before."""
        now = time.monotonic()
        self.scheduler.token_budget.pace.record_step(plan, self._last_plan, now - self._last_time)
        self._last_plan, self._last_time = plan, now

    def _handle_failed_step(self, plan: StepPlan, error: Exception) -> list[TokenEvent]:
        self.errors += 1
        self._failures_in_a_row += 1
        log.error("step failed (%d in a row): %s", self._failures_in_a_row, error, exc_info=error)
        self._runner.reset()
        self._last_plan = None
        aborted = self._take_aborted()
        if self._failures_in_a_row >= self._settings.max_errors:
            raise EngineDead(f"{self._failures_in_a_row} steps failed in a row: {error}") from error
        return aborted + self.scheduler.step_failed(plan, error)

    def _take_aborted(self) -> list[TokenEvent]:
        events, self._aborted = self._aborted, []
        return events

    def close(self) -> None:
        """Release all arrays, on the thread that made them."""
        with self.held:
            try:
                self.prefix_cache.shutdown()
            finally:
                if self.pooling is not None:
                    self.pooling.close()
                if self.selection is not None:
                    self.selection.close()
                self.scheduler.drafts.close()
                self._runner.close()


def join_media_spans(request: Request) -> Request:
    """The request with one span, from its first token to the end of its last image: no chunk ends inside, and
    nothing cached either. RequestError if it wants the logprobs of its prompt, which a span has none of."""
    if request.params.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs are not supported for prompts with images of this model")
    spans, digests = request.image_spans, request.image_digests
    if not spans:  # where its images are is not known
        return replace(request, image_spans=((0, len(request.prompt)),), image_digests=())
    stop = spans[-1][1]
    content = np.array(request.prompt[:stop], np.int64).tobytes()
    digest = compute_digest(*digests, content)
    known = len(digests) == len(spans)
    return replace(request, image_spans=((0, stop),), image_digests=(digest,) if known else ())


def join_digests(request: Request) -> Request:
    """The request with digests that each cover all its images. Images that are encoded together round
    otherwise than each alone, so that the same bytes come of the same images only."""
    every = request.image_digests
    return replace(request, image_digests=tuple(compute_digest(own, *every) for own in every))
