"""The asyncio side of the engine: submit a request, iterate over its events.

Closing or cancelling the iteration aborts the request within one step. A slow reader costs nothing: its
events merge in a single slot. All methods belong to the event loop that called `start`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from mlxrun.config.settings import Config
from mlxrun.engine.engine import Engine
from mlxrun.engine.factory import build_engine
from mlxrun.engine.stats import collect_stats
from mlxrun.engine.thread import Abort, CallEngine, EngineThread, Listener, Message, StopEngine, Submit
from mlxrun.errors import EngineDead, MlxrunError, RequestError
from mlxrun.model.model_info import LoadedModelInfo
from mlxrun.scheduler.request import FinishReason, Request, TokenEvent, TokenLogprob

log = logging.getLogger(__name__)
T = TypeVar("T")


class Collector:
    """One slot for one request's news: `put` merges what has not been read yet, `get` waits."""

    def __init__(self) -> None:
        self._event: TokenEvent | None = None  # all that has not been read; of several all but the tokens
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._filled = asyncio.Event()

    def put(self, event: TokenEvent) -> None:
        # Tokens are copied now and once they are read; merging event by event would copy all each time.
        self._tokens += event.tokens
        self._logprobs += event.logprobs
        self._event = event if self._event is None else self._event.merge_progress(event)
        self._filled.set()

    def replace_with_error(self, error: MlxrunError) -> None:
        """In place of whatever has not been read."""
        self._take_unread()
        self.put(TokenEvent("", finish=FinishReason.ERROR, error=error))

    async def get(self) -> TokenEvent:
        await self._filled.wait()
        self._filled.clear()
        event = self._take_unread()
        assert event is not None
        return event

    def _take_unread(self) -> TokenEvent | None:
        event, tokens, logprobs = self._event, tuple(self._tokens), tuple(self._logprobs)
        self._event, self._tokens, self._logprobs = None, [], []
        return event and replace(event, tokens=tokens, logprobs=logprobs)


class EngineClient:
    """A running engine on a thread of its own; made by `start`."""

    def __init__(self, build: Callable[[], Engine]) -> None:
        loop = asyncio.get_running_loop()
        self._collectors: dict[str, Collector] = {}  # requests whose final event has not come yet
        self._ready: asyncio.Future[Engine] = loop.create_future()
        self._dead_error: MlxrunError | None = None
        self._dead_event = asyncio.Event()
        self._pending_calls: set[asyncio.Future[Any]] = set()  # questions that the thread has not answered yet
        self._loop = loop
        listener = Listener(
            on_ready=partial(self._call_on_loop, self._on_ready),
            on_events=partial(self._call_on_loop, self._on_events),
            on_dead=partial(self._call_on_loop, self._on_dead),
        )
        self._thread = EngineThread(build, listener)

    @classmethod
    async def start(cls, config: Config, model_info: LoadedModelInfo | None = None) -> EngineClient:
        """Load the model and start; ModelLoadError or ConfigError if that fails. `host`: if it is loaded."""
        return await cls.start_with(partial(build_engine, config, model_info))

    @classmethod
    async def start_with(cls, build: Callable[[], Engine]) -> EngineClient:
        """Start an engine that `build` makes, on the engine thread."""
        client = cls(build)
        client._thread.start()
        try:
            await asyncio.shield(client._ready)
        except BaseException:
            await client.close()
            raise
        return client

    @property
    def model_info(self) -> LoadedModelInfo:
        """The model's host side."""
        return self._ready.result().model_info

    def read_cache_counters(self) -> Mapping[str, int]:
        """What the prefix cache did so far, by the names of cache.records.Counters; empty without one."""
        return self._ready.result().prefix_cache.read_counters()

    @property
    def dead_error(self) -> MlxrunError | None:
        """Why the engine has stopped, or None while it serves."""
        return self._dead_error

    async def wait_until_dead(self) -> MlxrunError:
        """Wait until the engine has stopped, and why."""
        await self._dead_event.wait()
        assert self._dead_error is not None
        return self._dead_error

    async def read_stats(self) -> Mapping[str, Any]:
        """The engine's numbers (engine/stats.py), read between two steps. EngineDead if it has stopped."""
        return await self._call_engine(collect_stats)

    async def clear_cache(self) -> None:
        """Forget all prefixes that no running request uses. EngineDead if the engine has stopped."""
        await self._call_engine(lambda engine: engine.clear_cache())

    def abort(self, request_id: str) -> None:
        """End a request whose events nobody reads any more; nothing happens if it has ended."""
        if request_id in self._collectors:
            self._send(Abort(request_id))

    def fail(self, request_id: str, error: MlxrunError) -> None:
        """End a request: who reads its events gets what has come, and then `error`."""
        collector = self._collectors.get(request_id)
        if collector is None:
            return
        self._collectors[request_id] = Collector()  # what still comes is not read
        collector.put(TokenEvent(request_id, finish=FinishReason.ERROR, error=error))
        self._send(Abort(request_id))

    async def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """Events of one request, merged while they are not read; the last has `finish`.

        Raises RequestError, Overloaded or EngineDead in place of an event that says so.
        """
        if self._dead_error is not None:
            raise EngineDead(str(self._dead_error)) from self._dead_error
        if request.id in self._collectors:
            raise RequestError(f"a request with id {request.id!r} is under way")
        collector = self._collectors[request.id] = Collector()
        self._send(Submit(request))
        finished = False
        try:
            while not finished:
                event = await collector.get()
                finished = event.finish is not None
                if event.error is not None:
                    if event.tokens:  # they came before the error, and merged with it
                        yield replace(event, finish=None, error=None)
                    raise event.error
                yield event
        finally:
            # The collector stays until the engine has said that this request, and not the next of the same
            # id, has ended.
            if self._collectors.get(request.id) is collector:
                self._send(Abort(request.id))

    async def close(self) -> None:
        """Stop the engine and wait for its thread; requests under way end with EngineDead."""
        self._send(StopEngine())
        try:
            await asyncio.to_thread(self._thread.join)
        finally:
            self._on_dead(EngineDead("the engine was closed"))

    def _send(self, message: Message) -> None:
        self._thread.send(message)

    async def _call_engine(self, call: Callable[[Engine], T]) -> T:
        """What `call` says of the engine, on the engine's thread between two steps."""
        if self._dead_error is not None:
            raise EngineDead(str(self._dead_error)) from self._dead_error
        answer: asyncio.Future[T] = self._loop.create_future()
        self._pending_calls.add(answer)
        answer.add_done_callback(self._pending_calls.discard)
        self._send(CallEngine(call, partial(self._call_on_loop, _set_answer, answer)))
        return await answer

    # -- called on the loop, by the thread ----------------------------------------------------------------

    def _call_on_loop(self, call: Callable[..., None], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *args)

    def _on_ready(self, engine: Engine) -> None:
        if not self._ready.done():
            self._ready.set_result(engine)

    def _on_events(self, events: list[TokenEvent]) -> None:
        for event in events:
            try:
                self._deliver(event)
            except Exception as error:  # the border: one request's event must not cost the others theirs
                log.exception("an event of request %s cannot be delivered", event.request_id)
                self._fail_undelivered(event, error)

    def _deliver(self, event: TokenEvent) -> None:
        if event.request_id in self._collectors:  # else it ended with the engine
            self._collectors[event.request_id].put(event)
            if event.finish is not None:
                del self._collectors[event.request_id]

    def _fail_undelivered(self, event: TokenEvent, error: Exception) -> None:
        """End the request with an error: what it waits for will not come."""
        failed = RequestError(f"the answer was lost: {type(error).__name__}", code="internal_error")
        failed.http_status = 500
        failed.__cause__ = error
        self._collectors.pop(event.request_id).replace_with_error(failed)
        if event.finish is None:
            self._collectors[event.request_id] = Collector()  # what still comes is not read
            self._send(Abort(event.request_id))

    def _on_dead(self, error: MlxrunError) -> None:
        self._dead_error = self._dead_error or error
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # mark as seen: start() may be gone
        for request_id, collector in self._collectors.items():
            collector.put(TokenEvent(request_id, finish=FinishReason.ERROR, error=error))
        self._collectors.clear()
        for answer in tuple(self._pending_calls):
            _set_answer(answer, None, EngineDead(str(self._dead_error)))
        self._dead_event.set()


def _set_answer(answer: asyncio.Future[Any], result: object, error: Exception | None) -> None:
    if answer.done():  # nobody waits any more
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)
