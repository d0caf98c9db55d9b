"""The thread that owns the engine: it loads the model, steps while there is work, and closes what it made.

In: one queue of tagged messages. Out: one call of `deliver` a step with that step's events. MLX's streams
belong to threads, so nothing of the engine is touched from anywhere else.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from mlxrun.engine.engine import Engine
from mlxrun.errors import EngineDead, MlxrunError
from mlxrun.scheduler.request import FinishReason, Request, TokenEvent

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Submit:
    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class CallEngine:
    """Call `call` with the engine between two steps, and `done` with what it gave or raised."""

    call: Callable[[Engine], object]
    done: Callable[[object, Exception | None], None]


@dataclass(frozen=True, slots=True)
class StopEngine:
    """End the thread; what runs is dropped without events."""


Message = Submit | Abort | CallEngine | StopEngine


@dataclass(frozen=True, slots=True)
class Listener:
    """What the thread calls, on itself: each must only hand the news over.

    `ready` once after loading, with the idle engine, or `dead` instead; `deliver` after each step that has
    events; `dead` once when the engine ends by an error.
    """

    on_ready: Callable[[Engine], None]
    on_events: Callable[[list[TokenEvent]], None]
    on_dead: Callable[[MlxrunError], None]


class EngineThread:
    """`build` makes the engine, on the thread."""

    def __init__(self, build: Callable[[], Engine], listener: Listener) -> None:
        self._build = build
        self._listener = listener
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        # A daemon, so that a front end that dies without `stop` does not hang the process.
        self._thread = threading.Thread(target=self._run, name="mlxrun-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, message: Message) -> None:
        """Hand a message over; never blocks."""
        self._inbox.put(message)

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the thread to end; whether it did."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            engine = self._build()
        except MlxrunError as error:
            self._listener.on_dead(error)
            return
        except BaseException as error:  # the border: a thread that ends silently leaves everybody waiting
            log.exception("loading failed")
            self._listener.on_dead(_as_engine_dead(error))
            return
        try:
            self._listener.on_ready(engine)
            self._run_steps(engine)
        except BaseException as error:  # a panic of a library in Rust is no Exception
            log.exception("the engine stops")
            self._listener.on_dead(_as_engine_dead(error))
        finally:
            engine.close()

    def _run_steps(self, engine: Engine) -> None:
        while True:
            events = self._handle_messages(engine)
            if events is None:
                return
            events += engine.step() if engine.busy else []
            if events:
                self._listener.on_events(events)

    def _handle_messages(self, engine: Engine) -> list[TokenEvent] | None:
        """Take in all messages; waits for one if there is nothing to do. None: stop."""
        events: list[TokenEvent] = []
        block = not engine.busy
        while block or not self._inbox.empty():
            message = self._inbox.get()
            block = False
            match message:
                case StopEngine():
                    return None
                case Abort(request_id):
                    engine.abort(request_id)
                case Submit(request):
                    events += _add_request(engine, request)
                case CallEngine(call, done):
                    _call_engine(engine, call, done)
        return events


def _add_request(engine: Engine, request: Request) -> list[TokenEvent]:
    """Add a request; a refusal is its final event."""
    try:
        engine.add(request)
    except MlxrunError as error:
        return [TokenEvent(request.id, finish=FinishReason.ERROR, error=error)]
    return []


def _call_engine(
    engine: Engine, call: Callable[[Engine], object], done: Callable[[object, Exception | None], None]
) -> None:
    try:
        result = call(engine)
    except Exception as error:  # the border: it belongs to who asked
        done(None, error)
    else:
        done(result, None)


def _as_engine_dead(error: BaseException) -> EngineDead:
    if isinstance(error, EngineDead):
        return error
    dead = EngineDead(f"the engine has stopped: {type(error).__name__}: {error}")
    dead.__cause__ = error
    return dead
