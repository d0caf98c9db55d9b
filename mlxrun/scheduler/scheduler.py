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
from mlxrun.scheduler.preemption import choose, urgency
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

CHUNK = 512  # tokens, where the config and the device do not say


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
        prefixes: PrefixCacheInterface | None = None,
        whole_chunks: bool = False,
        pace: StepCosts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.limits = limits
        self.memory = limits.memory
        self._prefixes: PrefixCacheInterface = prefixes or NoPrefixCache()
        self._whole_chunks = whole_chunks
        self._chunk = settings.chunk or CHUNK
        self._clock = clock
        self._line = WaitingQueue(settings, clock)
        pace = pace or StepCosts()
        self._sampling = 0 if self._prefixes.stops or whole_chunks else pace.sampling
        room = partial(TokenBudget, settings, self._chunk, self.memory, whole_chunks=whole_chunks, pace=pace)
        self._room = room(self._prefixes)
        self._bare = room(NoPrefixCache())  # what there would be room for if the prefix cache held nothing
        self._entries: dict[str, RequestState] = {}  # the one owner table, in order of arrival
        self._free: list[str] = []  # rows that the runner drops at the next step
        self._keep: list[SnapshotRequest] = []  # what the prefix cache wants of them
        self._arrivals = 0

    # -- what the engine's users do -------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Take a request in. Overloaded if the queue is full, PromptTooLong if it could never run."""
        if request.id in self._entries:
            raise RequestError(f"a request with id {request.id!r} is under way")
        if request.params.max_tokens < 1:
            raise RequestError("max_tokens must be at least 1", param="max_tokens")
        if len(request.answered) >= request.params.max_tokens:
            raise RequestError("the answer is complete already", param="max_tokens")
        limit = self.limits.longest(request, self._room.least)
        alike = [e for e in self._entries.values() if e.request.background == request.background]
        waiting = sum(not e.running for e in alike)
        if waiting >= self.settings.max_queue:  # last: what can never run is not to be sent again
            raise Overloaded(f"{waiting} requests wait (scheduler.max_queue): try again later")
        stops = request.boundaries if self._prefixes.stops else ()
        output = list(request.answered)
        self._entries[request.id] = RequestState(request, self._arrivals, self._clock(), limit, output, stops)
        self._arrivals += 1
        self._prefixes.open(request)

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request now; None if it has ended already."""
        entry = self._entries.get(request_id)
        return None if entry is None else self._finish(entry, FinishReason.ABORT)

    @property
    def busy(self) -> bool:
        return bool(self._entries or self._free)

    @property
    def freeing(self) -> bool:
        """Whether rows are to be dropped with the next plan."""
        return bool(self._free)

    @property
    def entries(self) -> Sequence[RequestState]:
        """All unfinished requests, by arrival."""
        return tuple(self._entries.values())

    # -- the step -----------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """The next step: every row that decodes, and prompt chunks within the budget."""
        clear = self._make_room()
        order = self._line.order(self._entries.values(), self.freeing)
        admit = self._admit(order)
        decode = [e for e in self._entries.values() if e.decoding and not e.exhausted]
        self._keep_exhausted()
        order = [e for e in order if e.prefill_left]
        running = [e for e in self._entries.values() if e.running]
        served, shared = self._line.turn([e for e in order if e.running], self._chunk)
        depth = served[0].computed if served else 0
        budget = self._room.budget(running, len(decode), len(order), 0 if self._whole_chunks else depth)
        prefill, save = self._hand_out(served, min(budget, self._chunk) if shared else budget)
        for entry in decode:
            entry.decode()
        free, keep, self._free, self._keep = self._free, self._keep, [], []
        ids = tuple(e.id for e in decode)
        return StepPlan(tuple(free), admit, ids, tuple(prefill), clear, tuple(keep), tuple(save))

    def update(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Take in what became known: one event for each request that has news."""
        prefilled = [(self._entries[c.request_id], c) for c in plan.prefill if c.request_id in self._entries]
        events = {entry.id: entry.event(chunk.stop) for entry, chunk in prefilled}
        for rid, sampled in result.tokens.items():
            if rid in self._entries and self._entries[rid].pending:  # else it is of another with this id
                events[rid] = self._take(self._entries[rid], sampled)
        for rid, error in result.errors.items():
            if rid in self._entries:
                events[rid] = self._finish(self._entries[rid], FinishReason.ERROR, _as_mlxrun_error(error))
        return list(events.values())

    def step_failed(self, plan: StepPlan, error: Exception) -> list[TokenEvent]:
        """A step raised and every row is lost. A request that was alone in it fails; of several each must
        first get through a step alone, so that the culprit is found and the others keep their answers.

        A device's errors show a step late: no request is alone beside a row that was freed in this very step.
        """
        running = [e for e in self._entries.values() if e.running]
        for entry in self._entries.values():
            entry.filled = entry.pending = 0
        events: list[TokenEvent] = []
        if len(running) == 1 and not plan.free:
            events = [self._finish(running[0], FinishReason.ERROR, _as_mlxrun_error(error))]
        else:
            for entry in running:
                entry.suspect = True
                self._preempt(entry)
        self._free.clear()
        self._keep.clear()
        return events

    # -- who runs -------------------------------------------------------------------------------------

    def _admit(self, order: list[RequestState]) -> tuple[Admission, ...]:
        """Start waiting entries in that order while rows and memory last. Nobody overtakes, but those whose
        prompt begins with what another is computing wait for that. Background rows give way to the others."""
        running = [e for e in self._entries.values() if e.running]
        admitted: list[Admission] = []
        for entry in (e for e in order if not e.running):
            if running and not entry.suspect and self._prefixes.held(entry.id):
                continue
            if not self._may_run(entry, running, self._room) and not self._give_way(entry, running):
                break
            entry.running = True
            running.append(entry)
            hit = self._prefixes.find(entry.id, entry.output, entry.known - 1)
            entry.resume(hit, self._sampling)
            admitted.append(Admission(entry.request, tuple(entry.output), hit))
        return tuple(admitted)

    def _may_run(self, entry: RequestState, running: Sequence[RequestState], room: TokenBudget) -> bool:
        """Whether there is a row and memory for it; background rows fill half of the rows beside others."""
        if not running:
            return True
        behind = sum(e.request.background for e in running)
        if entry.request.background and len(running) > behind and 2 * behind >= self.settings.max_running:
            return False
        return len(running) < self.settings.max_running and room.admits(running, entry)

    def _give_way(self, entry: RequestState, running: list[RequestState]) -> bool:
        """Take rows of background requests for one that is not, as few as let it in; whether it may run."""
        behind = [e for e in self._by_urgency(running) if e.request.background]
        live = [e for e in running if not e.request.background]
        # What the cache keeps for these rows it can give up once they are gone, so it does not count yet.
        if entry.request.background or not behind or not self._may_run(entry, live, self._bare):
            return False
        victims = choose(behind, lambda rows: self._may_run(entry, [*live, *rows], self._bare))
        for victim in victims:
            running.remove(victim)
            self._preempt(victim)
        left = [e for e in behind if e.running]
        while left and not self._may_run(entry, running, self._room):
            running.remove(left[-1])
            self._preempt(left.pop())
        return self._may_run(entry, running, self._room)

    def _by_urgency(self, entries: Sequence[RequestState]) -> list[RequestState]:
        now = self._clock()
        return sorted(entries, key=lambda e: urgency(e, self._line.overdue(e, now)))

    def _hand_out(
        self, order: list[RequestState], budget: int
    ) -> tuple[list[PrefillChunk], list[SnapshotRequest]]:
        """Chunks of running entries, in that order, as many as the budget allows; see Line.turn for who may
        pass the head of the line.

        Only the first is cut to fit the budget: scraps of prompts would cost more forwards than they save.
        """
        chunks: list[PrefillChunk] = []
        saves: list[SnapshotRequest] = []
        for entry in order:
            while entry.prefill_left and budget > 0:
                start = entry.computed
                most = self._chunk if self._whole_chunks or chunks else budget
                stop = entry.next_stop(self._chunk, most)
                if stop - start > budget and chunks:  # the first always goes: an image may exceed the budget
                    return chunks, saves
                chunks.append(PrefillChunk(entry.id, start, stop))
                budget -= stop - start
                self._line.served(entry, stop - start)
                entry.advance(stop)
                saves += self._prefixes.due(entry.id, start, stop, entry.target)
                if self._prefixes.lasting and stop % self._chunk == 0:
                    break
        return chunks, saves

    def _make_room(self) -> bool:
        """Before rows outgrow the memory: give the pool back, then preempt the least urgent row."""
        running = [e for e in self._entries.values() if e.running]
        if len(running) < 2 or self._room.holds(running):
            return False
        running = self._by_urgency(running)
        while len(running) > 1 and not self._room.holds(running):
            self._preempt(running.pop())
        return True

    def _preempt(self, entry: RequestState) -> None:
        """The row is dropped; prompt and answer so far are computed again once it is admitted again. A token
        under way still counts, so that a state that is kept of the row now is one that it can go on from."""
        self._release(entry, entry.output)
        entry.reset()

    def _release(self, entry: RequestState, output: Sequence[int]) -> None:
        self._free.append(entry.id)
        self._keep += self._prefixes.release(entry.id, output, entry.filled)
        entry.filled = 0

    def _keep_exhausted(self) -> None:
        """Rows whose last token is under way leave the decode batch before they are freed."""
        for entry in self._entries.values():
            if entry.decoding and entry.exhausted and entry.filled:
                self._keep += self._prefixes.release(entry.id, entry.output, entry.filled)
                entry.filled = 0

    # -- what came out --------------------------------------------------------------------------------

    def _take(self, entry: RequestState, sampled: SampledToken) -> TokenEvent:
        entry.pending -= 1
        if sampled.token in entry.request.params.stop_ids:
            return self._finish(entry, FinishReason.STOP, stop=sampled.token)
        entry.output.append(sampled.token)
        done = entry.room == 0
        if done:
            self._drop(entry, entry.output)
        elif entry.suspect:  # it got through alone: back in line, so that the next suspect is alone too
            entry.suspect = False
            self._preempt(entry)
        logprobs = () if sampled.logprob is None else (sampled.logprob,)
        finish = FinishReason.LENGTH if done else None
        return entry.event(entry.known, tokens=(sampled.token,), logprobs=logprobs, finish=finish)

    def _finish(
        self,
        entry: RequestState,
        reason: FinishReason,
        error: MlxrunError | None = None,
        stop: int | None = None,
    ) -> TokenEvent:
        """`stop`: the token that ended the answer; it is in the row's cache, but not part of the answer."""
        ran = entry.decoding or stop is not None or len(entry.output) > len(entry.request.answered)
        event = entry.event(entry.known if ran else entry.computed, finish=reason, error=error)
        self._drop(entry, entry.output if stop is None else [*entry.output, stop])
        return event

    def _drop(self, entry: RequestState, output: Sequence[int]) -> None:
        del self._entries[entry.id]
        if entry.running:
            self._release(entry, output)
        self._prefixes.close(entry.id)


def _as_mlxrun_error(error: Exception) -> MlxrunError:
    """What the runner raised, as something that a front end can show."""
    if isinstance(error, MlxrunError):
        return error
    text = f"the model failed on this request: {type(error).__name__}: {error}"
    wrapped = RequestError(text, code="model_error")
    wrapped.http_status = 500
    wrapped.__cause__ = error
    return wrapped
