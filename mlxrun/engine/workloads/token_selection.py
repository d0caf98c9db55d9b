"""Long prompts whose tokens a draft model chooses before they are scheduled (sparse prefill).

One prompt is read at a time, in slices between the steps of the engine. So rows wait no longer for a slice
than for a chunk of a prompt. A request whose tokens cannot be chosen goes on with all of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from mlxrun.config.settings import PrefillSettings
from mlxrun.core.errors import MlxrunError, Overloaded
from mlxrun.core.request import FinishReason, Request, TokenEvent
from mlxrun.core.step_plan import DEFAULT_CHUNK, MIN_CHUNK
from mlxrun.engine.scheduler.prefill_pace import MeasuredPace, fit_chunks
from mlxrun.engine.scheduler.scheduler import Scheduler
from mlxrun.model.sparse.prompt_selector import PromptSelector

log = logging.getLogger(__name__)
REMEMBERED = 8  # prompts whose chosen tokens are kept: other answers to the same prompt


@dataclass(slots=True)
class SelectionCounts:
    """Counts since the start: prompts with tokens left out, the tokens of these prompts, and those left
    out."""

    prompts: int = 0
    tokens: int = 0
    left_out: int = 0


def leave_out(request: Request, positions: tuple[int, ...]) -> Request:
    """The request with only those tokens of its prompt that are at these positions."""
    kept = tuple(request.prompt[at] for at in positions)
    left_out = frozenset(request.prompt).difference(kept)
    return replace(request, prompt=kept, positions=positions, left_out=left_out, cache_positions=())


class TokenSelection:
    """Chooses tokens of prompts, and gives these requests to `scheduler`. Tokens that its prefix cache has
    need not be computed."""

    def __init__(
        self,
        selector: PromptSelector,
        settings: PrefillSettings,
        scheduler: Scheduler,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.selector, self._settings, self._scheduler = selector, settings, scheduler
        self._clock = clock
        self._pace = MeasuredPace()
        self.waiting: dict[str, Request] = {}  # by arrival; the one that is read is among them
        self._reading: str | None = None
        self._left = 0  # tokens of its prompt that are not read yet
        self._chosen: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.counts = SelectionCounts()

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting)

    def has(self, request_id: str) -> bool:
        """Whether the request's tokens are not chosen yet."""
        return request_id in self.waiting

    def describe(self) -> dict[str, Any]:
        """JSON-ready: the method, the waiting prompts and the counts."""
        return {"method": self._settings.sparse, "waiting": len(self.waiting), **asdict(self.counts)}

    def takes(self, request: Request) -> bool:
        """Whether to choose tokens of this request's prompt: it is long, has only text, and allows it. Prompt
        logprobs need all tokens."""
        size, least = len(request.prompt), self._settings.sparse_min_tokens
        is_plain = (
            not request.pooled and not request.image_spans and request.media is None and not request.positions
        )
        generates = request.params.max_tokens > 0 and request.params.prompt_logprobs is None
        if not (request.sparse and is_plain and generates and least <= size <= self.selector.max_tokens):
            return False
        return size - self._scheduler.prefix_cache.count_cached(request) >= least

    def add(self, request: Request) -> None:
        """Queue a request with a new id. Overloaded if the queue is full."""
        waiting = sum(each.background == request.background for each in self.waiting.values())
        if waiting >= self._scheduler.settings.max_queue:
            raise Overloaded(
                f"the queue is full ({waiting} long prompts waiting, scheduler.max_queue): try again later"
            )
        self.waiting[request.id] = request

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request now. Returns its final event, or None if it is not here."""
        if self.waiting.pop(request_id, None) is None:
            return None
        if self._reading == request_id:
            self._stop_reading()
        return TokenEvent(request_id, finish=FinishReason.ABORT)

    def step(self) -> list[TokenEvent]:
        """Read a slice of a prompt, and give the scheduler a request that is ready. Returns its final event
        if the scheduler refuses it."""
        ready = self._read_slice()
        if ready is not None:
            try:
                self._scheduler.add(ready)
            except MlxrunError as error:
                return [TokenEvent(ready.id, finish=FinishReason.ERROR, error=error)]
        return []

    def _read_slice(self) -> Request | None:
        """Returns a request that is ready for the scheduler."""
        request = self._pick()
        try:
            positions = self._chosen.get(request.prompt) or self._read(request)
        except Exception as error:  # whatever the draft model raises, the target has the whole prompt
            log.warning("the tokens of request %s cannot be chosen: %s", request.id, error, exc_info=error)
            self._stop_reading()
            return self.waiting.pop(request.id)
        if positions is None:
            return None
        self._reading = None
        return self._choose(self.waiting.pop(request.id), positions)

    def _pick(self) -> Request:
        """The prompt that is being read, unless that can wait and the first one cannot."""
        reading = self.waiting.get(self._reading or "")
        first = min(self.waiting.values(), key=self._rank)
        if reading is None or (reading.background and not first.background):
            return first
        return reading

    def _rank(self, request: Request) -> tuple[bool, int]:
        """A sort key; of equal requests the oldest comes first."""
        return request.background, request.priority if self._scheduler.settings.policy == "priority" else 0

    def _read(self, request: Request) -> tuple[int, ...] | None:
        if self._reading != request.id:
            self._reading, self._left = request.id, len(request.prompt)
            cached = self._scheduler.prefix_cache.count_cached(request)
            self.selector.start(request.prompt, cached)
        limit, started = min(self._limit_tokens(), self._left), self._clock()
        positions = self.selector.advance(limit)
        if positions is None:  # the last slice does other things than reading
            self._left -= limit
            self._pace.record(limit, self._clock() - started)
        return positions

    def _stop_reading(self) -> None:
        self._reading = None
        self.selector.drop()

    def _limit_tokens(self) -> int:
        """Tokens of the next slice: in few sizes, as those of the scheduler's steps."""
        settings, pace = self._scheduler.settings, self._pace.compute()
        decoding = any(state.decoding for state in self._scheduler.requests)
        most = (settings.prefill_budget_busy if decoding else None) or settings.prefill_budget
        if not settings.step_ms:
            return most
        chunk = settings.chunk or DEFAULT_CHUNK
        fits = chunk if pace is None else fit_chunks(pace * settings.step_ms / 1000, chunk)
        return min(most, max(fits, MIN_CHUNK))

    def _choose(self, request: Request, positions: tuple[int, ...]) -> Request:
        prompt = request.prompt
        self._chosen = {prompt: positions, **self._chosen}
        while len(self._chosen) > REMEMBERED:
            self._chosen.popitem()
        self.counts.prompts += 1
        self.counts.tokens += len(prompt)
        self.counts.left_out += len(prompt) - len(positions)
        return leave_out(request, positions)

    def close(self) -> None:
        """Release all arrays, on the thread that made them."""
        self.selector.close()
