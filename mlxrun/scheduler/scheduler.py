"""Who runs next. `schedule()` hands out a step, `update()` takes its result; the runner computes between.

No phases: each entry's `computed` chases its tokens and every step hands out a budget of prompt tokens;
every row that decodes is in every step. Pure and deterministic: the same adds, aborts, results and clock
give the same plans. Every request ends with exactly one event that has `finish` set.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from mlxrun.config.settings import SchedulerSettings
from mlxrun.errors import MlxrunError, Overloaded, RequestError
from mlxrun.scheduler.memory_budget import RequestLimits
from mlxrun.scheduler.preemption import choose_victims, rank_urgency
from mlxrun.scheduler.prefix_cache_interface import NoPrefixCache, PrefixCacheInterface
from mlxrun.scheduler.request import FinishReason, Request, TokenEvent
from mlxrun.scheduler.request_state import RequestState
from mlxrun.scheduler.step_plan import (
    Admission,
    PrefillChunk,
    SampledToken,
    SnapshotRequest,
    StepPlan,
    StepResult,
)
from mlxrun.scheduler.token_budget import StepCosts, TokenBudget
from mlxrun.scheduler.waiting_queue import WaitingQueue

DEFAULT_CHUNK = 512  # tokens, where the config and the device do not say


class Scheduler:
    """Owns every request from `add` to its final event.

    `whole_chunks`: chunks end on the grid only, so that a prompt is always cut the same way. `pace`: what the
    device makes of a step.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        limits: RequestLimits,
        *,
        prefix_cache: PrefixCacheInterface | None = None,
        aligned_chunks: bool = False,
        costs: StepCosts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.limits = limits
        self.memory = limits.memory
        self._prefix_cache: PrefixCacheInterface = prefix_cache or NoPrefixCache()
        self._aligned_chunks = aligned_chunks
        self._chunk = settings.chunk or DEFAULT_CHUNK
        self._clock = clock
        self._waiting_queue = WaitingQueue(settings, clock)
        costs = costs or StepCosts()
        self._max_sampling_chunk = 0 if self._prefix_cache.needs_boundary_stops or aligned_chunks else costs.max_sampling_chunk
        room = partial(TokenBudget, settings, self._chunk, self.memory, aligned_chunks=aligned_chunks, costs=costs)
        self._token_budget = room(self._prefix_cache)
        self._budget_without_cache = room(NoPrefixCache())  # what there would be room for if the prefix cache held nothing
        self._requests: dict[str, RequestState] = {}  # the one owner table, in order of arrival
        self._rows_to_free: list[str] = []  # rows that the runner drops at the next step
        self._final_snapshots: list[SnapshotRequest] = []  # what the prefix cache wants of them
        self._arrivals = 0

    # -- what the engine's users do -------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Take a request in. Overloaded if the queue is full, PromptTooLong if it could never run."""
        if request.id in self._requests:
            raise RequestError(f"a request with id {request.id!r} is under way")
        if request.params.max_tokens < 1:
            raise RequestError("max_tokens must be at least 1", param="max_tokens")
        if len(request.prior_output) >= request.params.max_tokens:
            raise RequestError("the answer is complete already", param="max_tokens")
        limit = self.limits.compute_max_length(request, self._token_budget.min_chunk)
        alike = [e for e in self._requests.values() if e.request.background == request.background]
        waiting = sum(not e.running for e in alike)
        if waiting >= self.settings.max_queue:  # last: what can never run is not to be sent again
            raise Overloaded(f"{waiting} requests wait (scheduler.max_queue): try again later")
        stops = request.boundaries if self._prefix_cache.needs_boundary_stops else ()
        output = list(request.prior_output)
        self._requests[request.id] = RequestState(request, self._arrivals, self._clock(), limit, output, stops)
        self._arrivals += 1
        self._prefix_cache.track(request)

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request now; None if it has ended already."""
        entry = self._requests.get(request_id)
        return None if entry is None else self._finish(entry, FinishReason.ABORT)

    @property
    def busy(self) -> bool:
        return bool(self._requests or self._rows_to_free)

    @property
    def freeing(self) -> bool:
        """Whether rows are to be dropped with the next plan."""
        return bool(self._rows_to_free)

    @property
    def requests(self) -> Sequence[RequestState]:
        """All unfinished requests, by arrival."""
        return tuple(self._requests.values())

    # -- the step -----------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """The next step: every row that decodes, and prompt chunks within the budget."""
        clear = self._preempt_for_memory()
        order = self._waiting_queue.order_requests(self._requests.values(), self.freeing)
        admit = self._admit(order)
        decode = [e for e in self._requests.values() if e.decoding and not e.exhausted]
        self._snapshot_exhausted()
        order = [e for e in order if e.remaining_prefill]
        running = [e for e in self._requests.values() if e.running]
        served, shared = self._waiting_queue.pick_for_step([e for e in order if e.running], self._chunk)
        depth = served[0].num_computed_tokens if served else 0
        budget = self._token_budget.compute_prefill_budget(running, len(decode), len(order), 0 if self._aligned_chunks else depth)
        prefill, save = self._schedule_prefill(served, min(budget, self._chunk) if shared else budget)
        for entry in decode:
            entry.record_decode()
        free, keep, self._rows_to_free, self._final_snapshots = self._rows_to_free, self._final_snapshots, [], []
        ids = tuple(e.id for e in decode)
        return StepPlan(tuple(free), admit, ids, tuple(prefill), clear, tuple(keep), tuple(save))

    def update(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Take in what became known: one event for each request that has news."""
        prefilled = [(self._requests[c.request_id], c) for c in plan.prefill if c.request_id in self._requests]
        events = {entry.id: entry.make_event(chunk.stop) for entry, chunk in prefilled}
        for rid, sampled in result.tokens.items():
            if rid in self._requests and self._requests[rid].num_in_flight:  # else it is of another with this id
                events[rid] = self._append_token(self._requests[rid], sampled)
        for rid, error in result.errors.items():
            if rid in self._requests:
                events[rid] = self._finish(self._requests[rid], FinishReason.ERROR, _as_mlxrun_error(error))
        return list(events.values())

    def step_failed(self, plan: StepPlan, error: Exception) -> list[TokenEvent]:
        """A step raised and every row is lost. A request that was alone in it fails; of several each must
        first get through a step alone, so that the culprit is found and the others keep their answers.

        A device's errors show a step late: no request is alone beside a row that was freed in this very step.
        """
        running = [e for e in self._requests.values() if e.running]
        for entry in self._requests.values():
            entry.kv_length = entry.num_in_flight = 0
        events: list[TokenEvent] = []
        if len(running) == 1 and not plan.free:
            events = [self._finish(running[0], FinishReason.ERROR, _as_mlxrun_error(error))]
        else:
            for entry in running:
                entry.suspect = True
                self._preempt(entry)
        self._rows_to_free.clear()
        self._final_snapshots.clear()
        return events

    # -- who runs -------------------------------------------------------------------------------------

    def _admit(self, order: list[RequestState]) -> tuple[Admission, ...]:
        """Start waiting entries in that order while rows and memory last. Nobody overtakes, but those whose
        prompt begins with what another is computing wait for that. Background rows give way to the others."""
        running = [e for e in self._requests.values() if e.running]
        admitted: list[Admission] = []
        for entry in (e for e in order if not e.running):
            if running and not entry.suspect and self._prefix_cache.should_wait_for_prefix(entry.id):
                continue
            if not self._can_run(entry, running, self._token_budget) and not self._preempt_background(entry, running):
                break
            entry.running = True
            running.append(entry)
            hit = self._prefix_cache.lookup(entry.id, entry.output, entry.num_tokens - 1)
            entry.start_running(hit, self._max_sampling_chunk)
            admitted.append(Admission(entry.request, tuple(entry.output), hit))
        return tuple(admitted)

    def _can_run(self, entry: RequestState, running: Sequence[RequestState], room: TokenBudget) -> bool:
        """Whether there is a row and memory for it; background rows fill half of the rows beside others."""
        if not running:
            return True
        behind = sum(e.request.background for e in running)
        if entry.request.background and len(running) > behind and 2 * behind >= self.settings.max_running:
            return False
        return len(running) < self.settings.max_running and room.can_admit(running, entry)

    def _preempt_background(self, entry: RequestState, running: list[RequestState]) -> bool:
        """Take rows of background requests for one that is not, as few as let it in; whether it may run."""
        behind = [e for e in self._sort_by_urgency(running) if e.request.background]
        live = [e for e in running if not e.request.background]
        # What the cache keeps for these rows it can give up once they are gone, so it does not count yet.
        if entry.request.background or not behind or not self._can_run(entry, live, self._budget_without_cache):
            return False
        victims = choose_victims(behind, lambda rows: self._can_run(entry, [*live, *rows], self._budget_without_cache))
        for victim in victims:
            running.remove(victim)
            self._preempt(victim)
        left = [e for e in behind if e.running]
        while left and not self._can_run(entry, running, self._token_budget):
            running.remove(left[-1])
            self._preempt(left.pop())
        return self._can_run(entry, running, self._token_budget)

    def _sort_by_urgency(self, entries: Sequence[RequestState]) -> list[RequestState]:
        now = self._clock()
        return sorted(entries, key=lambda e: rank_urgency(e, self._waiting_queue.is_overdue(e, now)))

    def _schedule_prefill(
        self, order: list[RequestState], budget: int
    ) -> tuple[list[PrefillChunk], list[SnapshotRequest]]:
        """Chunks of running entries, in that order, as many as the budget allows; see Line.turn for who may
        pass the head of the line.

        Only the first is cut to fit the budget: scraps of prompts would cost more forwards than they save.
        """
        chunks: list[PrefillChunk] = []
        saves: list[SnapshotRequest] = []
        for entry in order:
            while entry.remaining_prefill and budget > 0:
                start = entry.num_computed_tokens
                most = self._chunk if self._aligned_chunks or chunks else budget
                stop = entry.find_chunk_end(self._chunk, most)
                if stop - start > budget and chunks:  # the first always goes: an image may exceed the budget
                    return chunks, saves
                chunks.append(PrefillChunk(entry.id, start, stop))
                budget -= stop - start
                self._waiting_queue.record_served(entry, stop - start)
                entry.record_prefill(stop)
                saves += self._prefix_cache.plan_snapshots(entry.id, start, stop, entry.prefill_target)
                if self._prefix_cache.survives_restart and stop % self._chunk == 0:
                    break
        return chunks, saves

    def _preempt_for_memory(self) -> bool:
        """Before rows outgrow the memory: give the pool back, then preempt the least urgent row."""
        running = [e for e in self._requests.values() if e.running]
        if len(running) < 2 or self._token_budget.fits_next_step(running):
            return False
        running = self._sort_by_urgency(running)
        while len(running) > 1 and not self._token_budget.fits_next_step(running):
            self._preempt(running.pop())
        return True

    def _preempt(self, entry: RequestState) -> None:
        """The row is dropped; prompt and answer so far are computed again once it is admitted again. A token
        under way still counts, so that a state that is kept of the row now is one that it can go on from."""
        self._free_row(entry, entry.output)
        entry.reset()

    def _free_row(self, entry: RequestState, output: Sequence[int]) -> None:
        self._rows_to_free.append(entry.id)
        self._final_snapshots += self._prefix_cache.plan_final_snapshots(entry.id, output, entry.kv_length)
        entry.kv_length = 0

    def _snapshot_exhausted(self) -> None:
        """Rows whose last token is under way leave the decode batch before they are freed."""
        for entry in self._requests.values():
            if entry.decoding and entry.exhausted and entry.kv_length:
                self._final_snapshots += self._prefix_cache.plan_final_snapshots(entry.id, entry.output, entry.kv_length)
                entry.kv_length = 0

    # -- what came out --------------------------------------------------------------------------------

    def _append_token(self, entry: RequestState, sampled: SampledToken) -> TokenEvent:
        entry.num_in_flight -= 1
        if sampled.token in entry.request.params.stop_ids:
            return self._finish(entry, FinishReason.STOP, stop=sampled.token)
        entry.output.append(sampled.token)
        done = entry.remaining_output == 0
        if done:
            self._remove(entry, entry.output)
        elif entry.suspect:  # it got through alone: back in line, so that the next suspect is alone too
            entry.suspect = False
            self._preempt(entry)
        logprobs = () if sampled.logprob is None else (sampled.logprob,)
        finish = FinishReason.LENGTH if done else None
        return entry.make_event(entry.num_tokens, tokens=(sampled.token,), logprobs=logprobs, finish=finish)

    def _finish(
        self,
        entry: RequestState,
        reason: FinishReason,
        error: MlxrunError | None = None,
        stop: int | None = None,
    ) -> TokenEvent:
        """`stop`: the token that ended the answer; it is in the row's cache, but not part of the answer."""
        ran = entry.decoding or stop is not None or len(entry.output) > len(entry.request.prior_output)
        event = entry.make_event(entry.num_tokens if ran else entry.num_computed_tokens, finish=reason, error=error)
        self._remove(entry, entry.output if stop is None else [*entry.output, stop])
        return event

    def _remove(self, entry: RequestState, output: Sequence[int]) -> None:
        del self._requests[entry.id]
        if entry.running:
            self._free_row(entry, output)
        self._prefix_cache.forget(entry.id)


def _as_mlxrun_error(error: Exception) -> MlxrunError:
    """What the runner raised, as something that a front end can show."""
    if isinstance(error, MlxrunError):
        return error
    text = f"the model failed on this request: {type(error).__name__}: {error}"
    wrapped = RequestError(text, code="model_error")
    wrapped.http_status = 500
    wrapped.__cause__ = error
    return wrapped
