"""Decides what each step computes: `schedule` plans it, the runner executes it, `update` takes its result.

There are no phases: the `num_computed_tokens` of each request catches up with its tokens. A step decodes all
decoding rows, and computes prompt tokens within a budget. The scheduler is pure and deterministic: the same
calls and clock give the same plans. Each request gets exactly one event with `finish` set.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from mlxrun.config.settings import SchedulerSettings, SpeculationSettings
from mlxrun.core.errors import Overloaded, is_out_of_memory, wrap_model_error
from mlxrun.core.memory_budget import RequestLimits
from mlxrun.core.request import FinishReason, Request, TokenEvent
from mlxrun.core.step_plan import (
    DEFAULT_CHUNK,
    Admission,
    PromptLogprobs,
    SampledToken,
    SnapshotRequest,
    StepCosts,
    StepPlan,
    StepResult,
)
from mlxrun.engine.scheduler.draft_planner import DraftPlanner
from mlxrun.engine.scheduler.preemption import Preemption, RowLimit
from mlxrun.engine.scheduler.prefix_cache_interface import NoPrefixCache, PrefixCacheInterface
from mlxrun.engine.scheduler.request_state import RequestState
from mlxrun.engine.scheduler.token_budget import PrefillPlanner, TokenBudget
from mlxrun.engine.scheduler.waiting_queue import LONG_TOKENS, WaitingQueue

# Steps in which others get first tokens while images wait. A short prompt takes two: a chunk, a decode step.
MAX_PUT_OFF = 2


class Scheduler:
    """Owns every request from `add` to its final event.

    `aligned_chunks`: chunks end on the chunk grid only, so that a prompt is always split in the same way.
    `regenerates`: a preempted request generates its output again, since computing it as a prompt rounds
    differently; its events continue. `costs`: what the parts of a step cost on this device. `drafts`: plans
    drafts; None: nothing drafts.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        limits: RequestLimits,
        *,
        prefix_cache: PrefixCacheInterface | None = None,
        aligned_chunks: bool = False,
        regenerates: bool = False,
        costs: StepCosts | None = None,
        drafts: DraftPlanner | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits, self.settings, self._clock = limits, settings, clock
        chunk = settings.chunk or DEFAULT_CHUNK
        cache, costs = prefix_cache or NoPrefixCache(), costs or StepCosts()
        self.prefix_cache, self._regenerates = cache, regenerates
        can_sample_in_chunks = not (cache.stops_at_cache_positions or aligned_chunks)
        self._sampling_costs = costs if can_sample_in_chunks else None
        min_chunk = chunk if aligned_chunks else min(chunk, costs.min_chunk)
        self.token_budget = TokenBudget(settings, chunk, min_chunk, limits.memory, cache, costs)
        self.drafts = drafts or DraftPlanner(SpeculationSettings())
        queue = self._waiting_queue = WaitingQueue(settings, clock)
        self._row_limit = RowLimit(settings.max_running)
        self._preemption = Preemption(self._row_limit, self.token_budget, queue)
        self._prefill_planner = PrefillPlanner(queue, self.token_budget, cache, chunk, aligned_chunks)
        self._requests: dict[str, RequestState] = {}  # all unfinished requests, in order of arrival
        self._rows_to_free: list[str] = []  # the runner frees them in the next step
        self._final_snapshots: list[SnapshotRequest] = []  # to take of them before that
        self._found: list[RequestState] = []  # they need no row: the prefix cache knew their logprobs
        self._num_arrivals = 0
        self._num_put_off = 0  # steps in a row without images, since others waited
        self._held_prompts = False  # by the last step, which computed first tokens only
        self.num_preemptions = 0  # since the start

    # -- requests come and go -------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request with a new id. Overloaded if the queue is full; PromptTooLong or RequestError if it
        cannot run."""
        max_length = self.limits.compute_max_length(request, self.token_budget.min_chunk)
        num_waiting = len(self._requests)
        if num_waiting >= self.settings.max_queue:  # else there is nothing to count
            same = (s for s in self.requests if s.request.background == request.background)
            num_waiting = sum(not s.running for s in same)
        if num_waiting >= self.settings.max_queue:  # checked last: a client retries after Overloaded
            raise Overloaded(
                f"the queue is full ({num_waiting} waiting, scheduler.max_queue): try again later"
            )
        state = RequestState(request, self._num_arrivals, self._clock(), max_length, self._regenerates)
        if self.prefix_cache.stops_at_cache_positions:
            state.cache_positions = request.all_cache_positions
        self._requests[request.id] = state
        self._num_arrivals += 1
        self.prefix_cache.track(request)

    def has(self, request_id: str) -> bool:
        """Whether a request with this id is unfinished."""
        return request_id in self._requests

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request now. Returns its final event, or None if it has already ended."""
        state = self._requests.get(request_id)
        return None if state is None else self._finish(state, FinishReason.ABORT)

    @property
    def busy(self) -> bool:
        return bool(self._requests or self._rows_to_free)

    @property
    def has_rows_to_free(self) -> bool:
        """Whether the next plan frees rows."""
        return bool(self._rows_to_free)

    @property
    def requests(self) -> Sequence[RequestState]:
        """All unfinished requests, by arrival."""
        return tuple(self._requests.values())

    @property
    def _running(self) -> list[RequestState]:
        return [s for s in self._requests.values() if s.running]

    # -- the step -----------------------------------------------------------------------------------

    def schedule(self, snapshots_are_stored: bool = True) -> StepPlan:
        """Plan the next step: one token for every decoding row, and prompt chunks within the token budget.

        If nothing runs, a request waits a step or two until the snapshots of earlier rows are stored. It may
        continue the answer of one of them.
        """
        clear_pool = self._preemption.preempt_for_memory(self._running, self.preempt)
        queue = self._waiting_queue.order_requests(self._requests.values(), self.has_rows_to_free)
        is_stored = snapshots_are_stored and not self._final_snapshots
        admitted = self.admit(queue) if is_stored or self._running else ()
        running = self._running
        rows = [s for s in running if s.decoding]
        decoding = [s for s in rows if not s.exhausted]
        if len(decoding) < len(rows):
            self._snapshot_exhausted(rows)
        queue = [s for s in queue if not s.running or s.remaining_prefill]
        self._held_prompts = self._holds_prompts(decoding, queue)
        queue = [] if self._held_prompts else queue
        chunks, snapshots, blocked = self._prefill_planner.plan_chunks(queue, running, len(decoding))
        encode = self._choose_encoding(blocked, bool(chunks) or any(not s.output for s in decoding))
        self.drafts.plan(decoding, running, self.token_budget.fits_next_step)
        for state in decoding:
            state.record_decode()
        freed, last = tuple(self._rows_to_free), tuple(self._final_snapshots)
        self._rows_to_free, self._final_snapshots = [], []
        ids, drafts = tuple(s.id for s in decoding), {s.id: s.draft for s in decoding if s.draft}
        seconds = self.token_budget.pace.image_seconds
        return StepPlan(
            freed, admitted, ids, tuple(chunks), clear_pool, last, tuple(snapshots), drafts, encode, seconds
        )

    def _holds_prompts(self, decoding: Sequence[RequestState], queue: Sequence[RequestState]) -> bool:
        """Whether a step leaves out prompts, all long, since its rows get their first tokens. Those come at
        its end."""
        left = [s.remaining_prefill for s in queue if s.running]
        is_fresh = bool(decoding) and not any(s.output or s.num_in_flight for s in decoding)
        return is_fresh and not self._held_prompts and min(left, default=0) > LONG_TOKENS

    def _choose_encoding(self, blocked: Sequence[str], others_wait: bool) -> tuple[str, ...]:
        """The requests whose images the step encodes. It encodes none if others wait for their first tokens,
        except after `MAX_PUT_OFF` such steps."""
        if blocked:
            is_put_off = others_wait and self._num_put_off < MAX_PUT_OFF
            self._num_put_off = self._num_put_off + 1 if is_put_off else 0
            return () if is_put_off else tuple(blocked)
        return ()

    def update(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Take in the result of a step. Returns one event for each request that made progress or ended."""
        self._row_limit.record_success()
        self.token_budget.shared_tokens = result.shared_tokens
        for logprobs in filter(self.owns_logprobs, result.prompt_logprobs):
            self._requests[logprobs.request_id].prompt_logprobs.add(logprobs.start, logprobs.logprobs)
        ids = [c.request_id for c in plan.prefill] + [s.request_id for s in result.prompt_logprobs]
        states = [*map(self._requests.get, ids), *self._found]
        moved = {s.id: s for s in states if s is not None and self._requests.get(s.id) is s}
        events = dict.fromkeys(moved, TokenEvent(""))
        for rid, ready in result.ready.items():
            if rid in self._requests:
                self._requests[rid].num_ready = ready
        for rid, sampled in result.tokens.items():
            state = self._requests.get(rid)
            if state and state.num_in_flight:  # otherwise the token belongs to an ended request with this id
                events[rid] = self._append_tokens(state, sampled)
                moved.pop(rid, None)
        for rid, error in result.errors.items():
            state = self._requests.get(rid)
            if state and (state.running or state.num_in_flight):  # as above
                events[rid] = self._finish(state, FinishReason.ERROR, error)
                moved.pop(rid, None)
        admitted = {admission.request.id for admission in plan.admit}.difference(moved)
        new = [s for s in self._running if s.id in admitted] if admitted else []
        for state in [*moved.values(), *new]:
            if state.needs_nothing:  # a hit may leave a new row nothing to compute
                events[state.id] = self._finish(state, FinishReason.LENGTH)
            elif state.id in moved:
                events[state.id] = state.make_event(state.num_computed_tokens)
        self._found.clear()
        return list(events.values())

    def owns_logprobs(self, logprobs: PromptLogprobs) -> bool:
        """Whether the request with this id launched these logprobs. Otherwise they belong to an ended
        request."""
        state = self._requests.get(logprobs.request_id)
        return state is not None and state.prompt_logprobs.owns(logprobs.start)

    def step_failed(self, plan: StepPlan, error: Exception) -> list[TokenEvent]:
        """Handle a step that raised: all rows are lost. A request that was alone in the step fails. Several
        become suspects, and each must complete a step alone, which finds the failing one. After a shortage of
        memory, fewer run together.

        A device reports errors a step late. So a request is not alone if a row was freed in the same step, or
        will be freed in the next one.
        """
        running = self._running
        for state in self._requests.values():
            state.kv_length = state.num_in_flight = state.prompt_logprobs.launched = 0
        self.token_budget.shared_tokens = 0
        is_alone = len(running) == 1 and not plan.free and not self._rows_to_free
        if is_out_of_memory(error) and not is_alone:
            self._row_limit.record_shortage(len(running))
        events = [self._finish(running[0], FinishReason.ERROR, error)] if is_alone else []
        for state in self._running:
            state.suspect = True
            self.preempt(state)
        self._rows_to_free.clear()
        self._final_snapshots.clear()
        return events

    # -- admission and preemption ---------------------------------------------------------------------

    def admit(self, queue: Sequence[RequestState]) -> tuple[Admission, ...]:
        """Start waiting requests in the order of the queue while there are rows and memory. A request whose
        prompt begins with what another one is computing is passed over until that is in the prefix cache."""
        running = self._running
        admitted: list[Admission] = []
        waiting = [s for s in queue if not s.running]
        for state in waiting:
            if running and not state.suspect and self.prefix_cache.should_wait_for_prefix(state.id):
                continue
            if not self._preemption.make_room(state, running, self.preempt):
                break
            if state.hit_kind is None:
                state.queue_seconds = self._clock() - state.arrival_time
            if not state.prompt_logprobs.complete:
                start = state.prompt_logprobs.next_position
                state.prompt_logprobs.add(start, self.prefix_cache.find_prompt_logprobs(state.id, start))
            if state.needs_nothing:
                state.record_found()
                self._found.append(state)
                continue
            state.running = True
            running.append(state)
            limit = state.prompt_logprobs.limit_hit(state.num_tokens - 1)
            hit = self.prefix_cache.lookup(state.id, state.output, limit)
            costs, lone = self._sampling_costs, len(waiting) == 1
            most = costs.get_max_sampling_chunk(state.request, hit is not None, lone) if costs else 0
            state.start_running(hit, most)
            admitted.append(Admission(state.request, tuple(state.output), hit))
        return tuple(admitted)

    def preempt(self, state: RequestState) -> None:
        """Free the row. Its tokens are computed again once it is admitted again. A token in flight is still
        appended when it arrives. The request then continues from the final snapshot of the row, unless all of
        its output is generated again."""
        self.num_preemptions += 1
        self._free_row(state, state.output)
        state.reset()

    def _free_row(self, state: RequestState, output: Sequence[int]) -> None:
        self._rows_to_free.append(state.id)
        self._take_final_snapshots(state, output)
        self.drafts.forget(state)
        self.token_budget.record_leaving(state)

    def _take_final_snapshots(self, state: RequestState, output: Sequence[int]) -> None:
        self._final_snapshots += self.prefix_cache.plan_final_snapshots(state.id, output, state.kv_length)
        state.kv_length = 0

    def _snapshot_exhausted(self, decoding: Sequence[RequestState]) -> None:
        """Snapshot rows whose last token is in flight: they leave the decode batch before they are freed."""
        for state in decoding:
            if state.exhausted and state.kv_length and not state.needs_nothing:
                self._take_final_snapshots(state, state.output)

    def _append_tokens(self, state: RequestState, found: Sequence[SampledToken]) -> TokenEvent:
        taken, stop = state.append_tokens(found)
        tokens = tuple([sampled.token for sampled in taken])
        self.drafts.record(state, tokens, len(found) - 1)
        sent = len(tokens) - state.record_sent()
        tokens, logprobs = tokens[sent:], tuple([each.logprob for each in taken[sent:] if each.logprob])
        if stop is not None:
            fields: dict[str, Any] = {"stop_id": stop.token, "stop_logprob": stop.logprob}
            return self._finish(state, FinishReason.STOP, tokens=tokens, logprobs=logprobs, **fields)
        finish = None
        if state.remaining_output == 0:
            finish = FinishReason.LENGTH
            self._remove(state, state.output)
        elif state.suspect:  # it completed a step alone; preempted, so that the next suspect is alone too
            state.suspect = False
            self.preempt(state)
        return state.make_event(state.num_tokens, tokens, logprobs, finish)

    def _finish(
        self, state: RequestState, why: FinishReason, error: Exception | None = None, **fields: Any
    ) -> TokenEvent:
        """`fields`: others of the event. A stop id is in the row's cache, but not part of the answer."""
        stop = fields.get("stop_id")
        has_sampled = stop is not None or len(state.output) > len(state.request.prior_output)
        is_computed = state.decoding or has_sampled or state.needs_nothing
        computed = state.num_tokens if is_computed else state.num_computed_tokens
        event = state.make_event(computed, finish=why)
        event = event._replace(error=None if error is None else wrap_model_error(error), **fields)
        self._remove(state, state.output if stop is None else [*state.output, stop])
        return event

    def _remove(self, state: RequestState, output: Sequence[int]) -> None:
        del self._requests[state.id]
        if state.running:
            self._free_row(state, output)
        self.prefix_cache.forget(state.id)
