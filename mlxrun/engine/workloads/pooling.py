"""The texts of an engine: which of them share a forward, and their vectors (embeddings, scores) in slices.

PoolingQueue is pure and deterministic, like the scheduler, and looks at lengths only. Requests of clients go
before background ones. Within either, the next batch has the oldest waiting request and others that are about
as long. Each request gets exactly one event with `finish` set.

PoolingSteps computes the batches between the steps of the engine. A slice computes a part of one batch, and
takes about `scheduler.step_ms`. So rows wait no longer for it than for a chunk of a prompt. Background
requests run only while nobody else has a prompt.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from mlxrun.core.errors import (
    InternalError,
    MlxrunError,
    OutOfMemory,
    Overloaded,
    PromptTooLong,
    RequestError,
)
from mlxrun.core.memory_budget import MemoryBudget
from mlxrun.core.request import FinishReason, Request, TokenEvent
from mlxrun.core.step_plan import MAX_ROWS, MIN_CHUNK, PoolingBatch
from mlxrun.engine.scheduler.prefill_pace import MeasuredPace
from mlxrun.engine.scheduler.scheduler import Scheduler
from mlxrun.engine.scheduler.token_budget import TextMemory
from mlxrun.engine.workloads.failure_streak import FailureStreak
from mlxrun.model.pooling.pooling_runner import PoolingRunner

log = logging.getLogger(__name__)
LOOKED_AT = 1024  # waiting requests among which those of similar length are looked for
MIN_FILLED = 0.5  # of the tokens of a padded batch, those that are no padding


class PoolingQueue(TextMemory):
    """Chooses the texts of each batch.

    `max_tokens`: of a text; `max_queue`: waiting requests of clients, and as many in the background;
    `max_rows`: texts in a batch; `max_padding`: tokens of padding that a text may add to its batch, None for
    no limit but `MIN_FILLED`; `memory`: what texts take; `slice_tokens`: tokens of a forward, 0: all of the
    batch.
    """

    def __init__(
        self,
        max_tokens: int,
        max_queue: int,
        max_rows: int = MAX_ROWS,
        max_padding: int | None = None,
        memory: MemoryBudget | None = None,
        slice_tokens: int = 0,
    ) -> None:
        self._memory = memory or MemoryBudget()
        self._slice_tokens = slice_tokens
        self.wanted_bytes = 0  # of the oldest text of a client, if it waits for memory
        self._max_tokens = max_tokens
        self._max_queue = max_queue
        self._max_rows = max_rows
        self._max_padding = max_padding
        self._waiting: dict[str, Request] = {}  # by arrival
        self._alone: set[str] = set()  # ids of requests whose batch failed: each is tried by itself
        self._batches: dict[bool, PoolingBatch] = {}  # under way, at most one in the background and one not
        self._aborted: set[str] = set()  # ids of rows of these whose requests have ended
        self.finished = 0  # since the start

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._batches)

    @property
    def has_foreground(self) -> bool:
        """Whether a request of a client is unfinished."""
        return False in self._batches or any(not request.background for request in self._waiting.values())

    @property
    def held_bytes(self) -> int:
        """Memory of the batches under way, in bytes."""
        return sum(batch.nbytes for batch in self._batches.values())

    def has(self, request_id: str) -> bool:
        """Whether a request waits or is in a batch under way."""
        return request_id in self._waiting or request_id in self._list_rows()

    def count(self) -> dict[str, int]:
        """The numbers of running and waiting requests, and of those finished since the start."""
        running = sum(len(batch.requests) for batch in self._batches.values())
        return {"running": running, "waiting": len(self._waiting), "finished": self.finished}

    def add(self, request: Request) -> None:
        """Queue a request with a new id. Overloaded if the queue is full; PromptTooLong, OutOfMemory or
        RequestError if it cannot run."""
        if not request.prompt:
            raise RequestError("the prompt is empty")
        if len(request.prompt) > self._max_tokens:
            size = len(request.prompt)
            raise PromptTooLong(f"the text has {size} tokens; the model takes {self._max_tokens}")
        self._check_memory(len(request.prompt))
        if sum(r.background == request.background for r in self._waiting.values()) >= self._max_queue:
            raise Overloaded(
                f"the queue is full ({self._max_queue} texts waiting, scheduler.max_queue): try again later"
            )
        self._waiting[request.id] = request

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request now. Returns its final event, or None if it has already ended."""
        if self._waiting.pop(request_id, None) is not None:
            self.wanted_bytes = 0  # it may have been the one that waited for memory
        elif request_id in self._list_rows() - self._aborted:
            self._aborted.add(request_id)
        else:
            return None
        self._alone.discard(request_id)
        return TokenEvent(request_id, finish=FinishReason.ABORT)

    def _check_memory(self, tokens: int) -> None:
        memory, needed = self._memory, self._count_bytes(1, tokens)
        if memory.limit and memory.weights + needed > memory.limit:
            sizes = [f"{size / 1e6:,.1f} MB" for size in (memory.weights, needed, memory.limit)]
            raise OutOfMemory(
                f"the text can never fit in memory: weights {sizes[0]} + {tokens} tokens {sizes[1]} "
                f"> limit {sizes[2]}"
            )

    def _count_bytes(self, rows: int, length: int) -> int:
        return self._memory.compute_batch_bytes(rows, length, self._slice_tokens)

    def choose(
        self,
        max_tokens: int,
        background: bool,
        fits: Callable[[int], bool] = lambda nbytes: True,
        *,
        alone: bool = False,
        blocked: bool = False,
    ) -> PoolingBatch | None:
        """The next batch: the one under way, or a new one. A new batch has at most `max_tokens` tokens,
        padding included, but at least one text. `background`: whether background requests may run now;
        `fits`: whether so many bytes of memory are left. `alone`: whether no row runs, so that one text
        always fits; `blocked`: whether a prompt waits for the memory of texts, so that a background batch
        under way goes first."""
        self.wanted_bytes = 0
        for batch in tuple(self._batches.values()):
            if all(request.id in self._aborted for request in batch.requests):
                self._end(batch)
        if blocked and True in self._batches:
            return self._batches[True]
        for of_background in (False, True) if background else (False,):
            if of_background in self._batches:
                return self._batches[of_background]
            waiting = [r for r in self._waiting.values() if r.background == of_background][:LOOKED_AT]
            if waiting:
                made = self._make_batch(waiting, max_tokens, fits, alone and not self._batches)
                if made is None:
                    self.wanted_bytes = self.wanted_bytes or self._count_bytes(1, len(waiting[0].prompt))
                    continue
                for request in made.requests:
                    del self._waiting[request.id]
                self._batches[of_background] = made
                return made
        return self._batches.get(True) if self.wanted_bytes else None  # that gives its memory back

    def _make_batch(
        self, waiting: Sequence[Request], max_tokens: int, fits: Callable[[int], bool], alone: bool
    ) -> PoolingBatch | None:
        """The oldest text with others, or by itself if they do not fit in memory; None if it does not, unless
        nothing else is `alone` in memory."""
        for requests in (self._pick_similar(waiting, max_tokens), (waiting[0],)):
            batch = PoolingBatch(requests)
            batch.nbytes = self._count_bytes(len(requests), batch.length)
            if fits(batch.nbytes) or (alone and len(requests) == 1):
                return batch
        return None

    def _pick_similar(self, waiting: Sequence[Request], max_tokens: int) -> tuple[Request, ...]:
        """The oldest request and those next to it by length, that with the least padding first; in the order
        of their lengths."""
        if self._max_rows == 1 or waiting[0].id in self._alone:
            return (waiting[0],)
        by_length = sorted((r for r in waiting if r.id not in self._alone), key=lambda r: len(r.prompt))
        lengths = [len(request.prompt) for request in by_length]
        start = by_length.index(waiting[0])
        stop = start + 1
        total = lengths[start]
        while stop - start < min(self._max_rows, len(lengths)):
            rows, longest = stop - start, lengths[stop - 1]
            shorter = longest - lengths[start - 1] if start > 0 else None
            longer = rows * (lengths[stop] - longest) if stop < len(lengths) else None
            take_longer = shorter is None or (longer is not None and longer <= shorter)
            padding = longer if take_longer else shorter
            added = stop if take_longer else start - 1
            total += lengths[added]
            padded = max(longest, lengths[added]) * (rows + 1)
            if padded > max_tokens or total < MIN_FILLED * padded:
                break
            if self._max_padding is not None and padding is not None and padding > self._max_padding:
                break
            start, stop = min(start, added), max(stop, added + 1)
        return tuple(by_length[start:stop])

    def finish(self, batch: PoolingBatch, vectors: Sequence[bytes]) -> list[TokenEvent]:
        """The events of a batch, each with the vector of its row. Aborted rows get none."""
        unfinished = self._end(batch)
        self.finished += len(unfinished)
        return [
            TokenEvent(
                request.id,
                num_computed_tokens=len(request.prompt),
                finish=FinishReason.STOP,
                vector=vector,
            )
            for request, vector in zip(batch.requests, vectors, strict=True)
            if request.id in unfinished
        ]

    def fail(self, batch: PoolingBatch, error: Exception) -> list[TokenEvent]:
        """The events of a batch that raised. A text that was alone fails. Several are tried again one by one,
        which finds the failing one."""
        unfinished = self._end(batch)
        left = [request for request in batch.requests if request.id in unfinished]
        if len(batch.requests) == 1:
            if not isinstance(error, MlxrunError):
                error = InternalError(f"the model failed on this text: {type(error).__name__}", error)
            return [TokenEvent(r.id, finish=FinishReason.ERROR, error=error) for r in left]
        self._alone |= unfinished
        self._waiting = {request.id: request for request in left} | self._waiting
        return []

    def _list_rows(self) -> set[str]:
        return {request.id for batch in self._batches.values() for request in batch.requests}

    def _end(self, batch: PoolingBatch) -> set[str]:
        """The ids of the batch's requests that were not aborted; none of its rows runs any more."""
        ids = {request.id for request in batch.requests}
        del self._batches[batch.requests[0].background]
        unfinished = ids - self._aborted
        self._aborted -= ids
        self._alone -= ids
        return unfinished


class PoolingSteps(PoolingQueue):
    """Computes vectors. `max_errors`: consecutive failed slices after which the engine stops, unless the
    model still computes. Texts share the memory of the scheduler's rows."""

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
        self._failures = FailureStreak("batches of texts", max_errors, runner)

    def takes(self, request: Request) -> bool:
        """Whether the request asks for a vector."""
        return request.pooled

    def step(self) -> list[TokenEvent]:
        """Compute a slice beside the rows of the scheduler. Returns the events of the requests that ended.
        EngineDead after `max_errors` consecutive failed slices, if the model computes nothing without a
        request either."""
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
        self._failures.end()
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
        log.error("a batch of %d texts failed: %s", len(batch.requests), error, exc_info=error)
        self._failures.add(error)
        return self.fail(batch, error)

    def close(self) -> None:
        """Release all arrays, on the thread that made them."""
        self.runner.close()
