"""Recordings, which take turns: each step computes one try at a window of the recording that has had the
fewest.

So a short recording does not wait for long ones. Requests of clients go before background ones. Each request
gets an event for each window, and exactly one event with `finish` set.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlxrun.core.errors import InternalError, MlxrunError, Overloaded
from mlxrun.core.request import FinishReason, Request, TokenEvent
from mlxrun.core.transcription import Recording
from mlxrun.engine.workloads.failure_streak import FailureStreak

if TYPE_CHECKING:  # mlx-audio is an extra
    from mlxrun.model.transcription.whisper import WhisperRunner, WindowState

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Turn:
    """A request, how often it has been computed, and how far it is."""

    request: Request
    recording: Recording
    count: int = 0
    state: WindowState | None = None


class TranscriptionSteps:
    """Transcribes recordings. `max_queue`: requests of clients, and as many in the background; `max_errors`:
    consecutive failures after which the engine stops, unless the model still computes."""

    def __init__(self, runner: WhisperRunner, max_queue: int, max_errors: int) -> None:
        self.runner = runner
        self._max_queue = max_queue
        self._turns: dict[str, _Turn] = {}  # by arrival
        self._failures = FailureStreak("recordings", max_errors, runner)
        self._finished = 0  # since the start

    @property
    def is_busy(self) -> bool:
        return bool(self._turns)

    def count(self) -> dict[str, int]:
        """The numbers of running and waiting requests, and of those finished since the start."""
        running = sum(turn.state is not None for turn in self._turns.values())
        return {"running": running, "waiting": len(self._turns) - running, "finished": self._finished}

    def takes(self, request: Request) -> bool:
        """Whether the request has a recording."""
        return request.recording is not None

    def has(self, request_id: str) -> bool:
        """Whether the request is not finished yet."""
        return request_id in self._turns

    def add(self, request: Request) -> None:
        """Queue a request with a new id. Overloaded if there are too many."""
        assert request.recording is not None
        turns = self._turns.values()
        if sum(turn.request.background == request.background for turn in turns) >= self._max_queue:
            raise Overloaded(f"{self._max_queue} recordings wait (scheduler.max_queue): try again later")
        self._turns[request.id] = _Turn(request, request.recording)

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request now. Returns its final event, or None if it is not here."""
        if self._turns.pop(request_id, None) is None:
            return None
        return TokenEvent(request_id, finish=FinishReason.ABORT)

    def step(self) -> list[TokenEvent]:
        """Compute one try of one recording. Returns its event if it made progress. EngineDead after
        `max_errors` consecutive failures, if the model does not compute silence either."""
        turn = min(self._turns.values(), key=lambda each: (each.request.background, each.count))
        turn.count += 1
        try:
            return self._compute(turn)
        except Exception as error:  # whatever the model raises, the request must get an answer
            return [self._fail(turn.request, error)]

    def _compute(self, turn: _Turn) -> list[TokenEvent]:
        if turn.state is None:
            turn.state = self.runner.start(turn.recording)
            return []
        made = self.runner.advance(turn.state)
        self._failures.end()
        tokens = tuple(token for segment in made.segments for token in segment.tokens)
        finish = None
        if turn.state.done:
            del self._turns[turn.request.id]
            self._finished += 1
            finish = FinishReason.STOP
        elif not (made.text or made.language or made.segments):
            return []
        return [TokenEvent(turn.request.id, tokens, finish=finish, transcript=made)]

    def _fail(self, request: Request, error: Exception) -> TokenEvent:
        del self._turns[request.id]
        log.error("recording %s failed: %s", request.id, error, exc_info=error)
        self._failures.add(error)
        if not isinstance(error, MlxrunError):
            error = InternalError("the recording cannot be transcribed", error)
        return TokenEvent(request.id, finish=FinishReason.ERROR, error=error)

    def close(self) -> None:
        """Release all arrays, on the thread that made them."""
        self._turns.clear()
        self.runner.close()
