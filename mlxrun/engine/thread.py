"""The thread that owns the engine: it loads the model, steps while there is work, and closes the engine.

Messages come in by one queue; the events of each step go out by one call of `on_events`. MLX's streams belong
to threads, so no other thread touches the engine. watchdog.py notices a thread that hangs. After each step
the thread publishes the engine's numbers, for /v1/status and /metrics.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mlxrun.core.errors import EngineDead, MlxrunError, is_out_of_memory
from mlxrun.core.request import FinishReason, Request, TokenEvent
from mlxrun.engine.engine import Engine
from mlxrun.engine.scheduler.request_state import RequestState
from mlxrun.engine.watchdog import Watchdog
from mlxrun.model.load_check.report import LoadCheckReport
from mlxrun.model.machine.device import read_device_memory

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's numbers. `counts` are JSON-ready: running and waiting requests, in all and in the
    background; steps, failed steps, preemptions and tokens since the start; drafts."""

    counts: Mapping[str, Any]
    memory_limit: int | None  # bytes
    time: float  # seconds of time.monotonic
    busy: bool  # whether another step follows
    load_check: LoadCheckReport | None = None

    def compute_age(self) -> float:
        """Seconds since these numbers were collected; 0 while the engine is idle."""
        return time.monotonic() - self.time if self.busy else 0.0

    def describe(self) -> dict[str, Any]:
        """The counts, the result of the load check (None if there was none), and the bytes of memory now."""
        load_check = None if self.load_check is None else self.load_check.describe()
        return {
            "load_check": load_check,
            **self.counts,
            "memory": {**read_device_memory(), "limit": self.memory_limit},
        }


def collect_stats(engine: Engine) -> EngineStats:
    """Collect the engine's numbers, on its thread, between two steps."""
    requests = engine.scheduler.requests
    reading = [] if engine.selection is None else list(engine.selection.waiting.values())
    background = [state for state in requests if state.request.background]
    counts = {
        **_count_requests(requests, len(reading)),
        "background": _count_requests(background, sum(request.background for request in reading)),
        **({} if engine.pooling is None else {"pooling": engine.pooling.count()}),
        **({} if engine.transcription is None else {"transcription": engine.transcription.count()}),
        "steps": engine.generation.steps,
        "errors": engine.generation.errors,
        "preemptions": engine.scheduler.num_preemptions,
        "tokens": {"prefilled": engine.generation.prefilled, "generated": engine.generation.generated},
        "speculation": engine.scheduler.drafts.describe(),
        **({} if engine.selection is None else {"sparse_prefill": engine.selection.describe()}),
    }
    limit = engine.scheduler.limits.memory.limit or None
    return EngineStats(counts, limit, time.monotonic(), engine.busy, engine.load_check)


def _count_requests(requests: Collection[RequestState], reading: int) -> dict[str, int]:
    """`reading`: requests besides, which are with a draft model."""
    running = sum(state.running for state in requests)
    return {"running": running, "waiting": len(requests) - running + reading}


@dataclass(frozen=True, slots=True)
class Submit:
    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class CallEngine:
    """Call `function(engine)` between two steps, and set `result` to what it returns or raises."""

    function: Callable[[Engine], Any]
    result: Future[Any]


@dataclass(frozen=True, slots=True)
class StopEngine:
    """End the thread. Unfinished requests get no events."""


Message = Submit | Abort | CallEngine | StopEngine


@dataclass(frozen=True, slots=True)
class Listener:
    """Callbacks of the engine thread, called on that thread. They must not block.

    `on_ready`: called once after loading, with the idle engine; `on_events`: after each step that has events;
    `on_dead`: once, if loading fails or an error stops the engine.
    """

    on_ready: Callable[[Engine], None]
    on_events: Callable[[list[TokenEvent]], None]
    on_dead: Callable[[MlxrunError], None]


class EngineThread:
    """Runs an engine. `build` makes it, on the thread."""

    def __init__(self, build: Callable[[], Engine], listener: Listener) -> None:
        self._build = build
        self._listener = listener
        # After the newest step or message; None until the engine is built.
        self.stats: EngineStats | None = None
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._watchdog = Watchdog(self._give_up)
        self._over = threading.Event()  # the thread ends, or hangs for good
        self._is_stuck = False
        # A daemon thread does not keep the process alive if a front end dies without sending StopEngine.
        self._thread = threading.Thread(target=self._run, name="mlxrun-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, message: Message) -> None:
        """Queue a message. Never blocks."""
        self._inbox.put(message)

    def join(self) -> None:
        """Wait for the thread to end. A thread that hangs is left behind."""
        self._over.wait()
        if not self._is_stuck:
            self._thread.join()

    def _give_up(self, problem: str) -> None:
        """The thread hangs: end the engine for all who wait for it. On the watchdog's thread."""
        self._is_stuck = True
        self._listener.on_dead(EngineDead(f"the engine is stuck: {problem}"))
        self._over.set()

    def _run(self) -> None:
        try:
            self._run_engine()
        finally:
            self._watchdog.stop()
            self._over.set()

    def _run_engine(self) -> None:
        try:
            self._watchdog.start()
            self._watchdog.note("loading the model")
            engine = self._build()
        except MlxrunError as error:
            self._listener.on_dead(error)
            return
        except BaseException as error:  # if the thread ended silently, its callers would wait forever
            log.exception("loading failed")
            self._listener.on_dead(_as_engine_dead(error))
            return
        try:
            self.stats = collect_stats(engine)
            self._listener.on_ready(engine)
            self._run_steps(engine)
        except BaseException as error:  # a panic of a Rust library is not an Exception
            log.exception("the engine stops")
            self._listener.on_dead(_as_engine_dead(error))
        finally:
            self._watchdog.note("closing the engine")
            engine.close()

    def _run_steps(self, engine: Engine) -> None:
        while True:
            self._watchdog.note(None)
            events = self._handle_messages(engine)
            if events is None:
                return
            if engine.busy:
                self._watchdog.note("computing a step")
                events += engine.step()
                self.stats = collect_stats(engine)
            if events:
                self._listener.on_events(events)

    def _wait_for_message(self, engine: Engine) -> Message:
        """The next message. Meanwhile, an idle engine does what is left to do."""
        while (delay := engine.idle_delay) is not None:
            with suppress(queue.Empty):
                return self._inbox.get(timeout=delay)
            self._watchdog.note("preparing for prompts, or comparing the model again")
            engine.work_idle(lambda: not self._inbox.empty())
            self._watchdog.note(None)
            self.stats = collect_stats(engine)
        return self._inbox.get()

    def _handle_messages(self, engine: Engine) -> list[TokenEvent] | None:
        """Handle all queued messages, waiting for one if the engine is idle. Returns the events of refused
        requests, or None for StopEngine."""
        events: list[TokenEvent] = []
        received = False
        while not self._inbox.empty() or not (received or engine.busy):
            message = self._wait_for_message(engine)
            received = True
            match message:
                case StopEngine():
                    return None
                case Abort(request_id):
                    engine.abort(request_id)
                case Submit(request):
                    try:
                        engine.add(request)
                    except MlxrunError as error:
                        events.append(TokenEvent(request.id, finish=FinishReason.ERROR, error=error))
                case CallEngine():
                    _call_engine(engine, message)
        if received:
            self.stats = collect_stats(engine)  # published: whoever reads them waits for no step
        return events


def _call_engine(engine: Engine, message: CallEngine) -> None:
    if not message.result.set_running_or_notify_cancel():
        return
    try:
        message.result.set_result(message.function(engine))
    except Exception as error:  # it belongs to the caller
        message.result.set_exception(error)


def _as_engine_dead(error: BaseException) -> EngineDead:
    if isinstance(error, EngineDead):
        return error
    shortage = "out of memory: " if is_out_of_memory(error) else ""
    dead = EngineDead(f"the engine has stopped: {shortage}{type(error).__name__}: {error}")
    dead.__cause__ = error
    return dead
