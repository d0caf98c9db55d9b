"""The asyncio side of the engine: it submits requests and iterates over their events.

Closing or cancelling the iteration aborts the request within one step. A slow reader delays nobody, because
its events merge in a single slot. All methods must be called on the event loop that called `start`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from mlxrun.config.settings import Config
from mlxrun.core.errors import EngineDead, InternalError, MlxrunError, RequestError
from mlxrun.core.request import FinishReason, Request, TokenEvent, TokenLogprob
from mlxrun.core.step_plan import PinnedPrefix
from mlxrun.engine.build import build_engine
from mlxrun.engine.engine import Engine
from mlxrun.engine.thread import Abort, CallEngine, EngineStats, EngineThread, Listener, StopEngine, Submit
from mlxrun.model.load.model_info import LoadedModelInfo

log = logging.getLogger(__name__)
T = TypeVar("T")

PIN_ATTEMPTS, PIN_SECONDS = 50, 0.02  # looks whether a prefix is stored before it is pinned, and between two


class Collector:
    """One slot for the events of one request. `put` merges unread events; `get` waits for one."""

    def __init__(self) -> None:
        self._event: TokenEvent | None = None  # the unread events as one, without the tokens and logprobs
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: list[TokenLogprob | None] = []
        self._filled = asyncio.Event()

    def put(self, event: TokenEvent) -> None:
        # Tokens are copied here and when they are read. Merging whole events would copy all each time.
        self._tokens += event.tokens
        self._logprobs += event.logprobs
        self._prompt_logprobs += event.prompt_logprobs
        self._event = event if self._event is None else self._event.merge_progress(event)
        self._filled.set()

    def replace_with_error(self, error: MlxrunError) -> None:
        """Replace the unread events by an error."""
        self._take_unread()
        self.put(TokenEvent("", finish=FinishReason.ERROR, error=error))

    async def get(self) -> TokenEvent:
        await self._filled.wait()
        self._filled.clear()
        event = self._take_unread()
        assert event is not None
        return event

    def _take_unread(self) -> TokenEvent | None:
        if self._event is None:
            return None
        event = self._event._replace(
            tokens=tuple(self._tokens),
            logprobs=tuple(self._logprobs),
            prompt_logprobs=tuple(self._prompt_logprobs),
        )
        self._event, self._tokens, self._logprobs, self._prompt_logprobs = None, [], [], []
        return event


class EngineClient:
    """A running engine on its own thread. `start` makes one."""

    def __init__(self, build: Callable[[], Engine]) -> None:
        self._loop = asyncio.get_running_loop()
        self._collectors: dict[str, Collector] = {}  # of requests whose final event has not come yet
        self._ready: asyncio.Future[Engine] = self._loop.create_future()
        self.dead_error: MlxrunError | None = None  # why the engine has ended; None while it runs
        self._dead_event = asyncio.Event()
        self._pending_calls: set[Future[Any]] = set()  # calls of the engine without a result yet
        listener = Listener(
            on_ready=partial(self._call_on_loop, self._on_ready),
            on_events=partial(self._call_on_loop, self._on_events),
            on_dead=partial(self._call_on_loop, self.on_dead),
        )
        self._thread = EngineThread(build, listener)

    @classmethod
    async def start(cls, config: Config, model_info: LoadedModelInfo | None = None) -> EngineClient:
        """Load the model and start the engine. Raises ModelLoadError or ConfigError. `model_info`: if already
        loaded."""
        return await cls.start_with(partial(build_engine, config, model_info))

    @classmethod
    async def start_with(cls, build: Callable[[], Engine]) -> EngineClient:
        """Start with the engine that `build` makes on the engine thread."""
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
        return self._ready.result().model_info

    async def wait_until_dead(self) -> MlxrunError:
        """Wait until the engine has stopped. Returns the reason."""
        await self._dead_event.wait()
        assert self.dead_error is not None
        return self.dead_error

    def read_cache_counters(self) -> Mapping[str, int]:
        """The prefix cache's CacheCounters by name; empty without a cache."""
        return self._ready.result().prefix_cache.read_counters()

    def read_stats(self) -> EngineStats:
        """The engine's numbers after its newest step, which is its last one if it has stopped."""
        assert self._thread.stats is not None, "the engine is ready"
        return self._thread.stats

    @property
    def surprise(self) -> str:
        """How the repeated load check differed from the kept one; empty if it did not."""
        load_check = self.read_stats().load_check
        return "" if load_check is None else load_check.surprise

    async def clear_cache(self) -> None:
        """Drop all prefix cache entries that no running request uses. EngineDead if the engine has
        stopped."""
        await self._call_engine(lambda engine: engine.prefix_cache.clear())

    @property
    def pinned_prefixes(self) -> Sequence[PinnedPrefix]:
        """The prefixes that are pinned in the prefix cache, the oldest first."""
        return self._ready.result().prefix_cache.pinned_prefixes

    async def pin_prefix(self, request: Request, stop: int, name: str) -> PinnedPrefix | None:
        """Pin the first `stop` tokens of a request's prompt, which was computed just now. None if the cache
        has none of them. Raises as PrefixCacheInterface.pin_prefix does."""

        def is_stored(engine: Engine) -> bool:
            return engine.prefix_cache.count_cached(request) >= stop or not engine.busy

        for _ in range(PIN_ATTEMPTS):  # the steps after the row's last one store its snapshots
            if await self._call_engine(is_stored):
                break
            await asyncio.sleep(PIN_SECONDS)
        return await self._call_engine(lambda engine: engine.prefix_cache.pin_prefix(request, stop, name))

    async def unpin_prefix(self, prefix_id: str) -> bool:
        """Unpin a prefix. Returns whether there was one with this id. EngineDead if the engine has
        stopped."""
        return await self._call_engine(lambda engine: engine.prefix_cache.unpin_prefix(prefix_id))

    def abort(self, request_id: str) -> None:
        """End a request whose events nobody reads any more. A request that has ended is ignored."""
        if request_id in self._collectors:
            self._thread.send(Abort(request_id))

    def fail(self, request_id: str, error: MlxrunError) -> None:
        """End a request with `error`. Its reader gets it after the events that have already come."""
        collector = self._collectors.get(request_id)
        if collector is None:
            return
        self._collectors[request_id] = Collector()  # nobody reads the events that are still to come
        collector.put(TokenEvent(request_id, finish=FinishReason.ERROR, error=error))
        self._thread.send(Abort(request_id))

    async def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """The events of one request, merged while unread. The last one has `finish`.

        Raises an event's error: RequestError, Overloaded or EngineDead.
        """
        self._raise_if_dead()
        if request.id in self._collectors:
            raise RequestError(f"a request with id {request.id!r} is already running")
        collector = self._collectors[request.id] = Collector()
        self._thread.send(Submit(request))
        finished = False
        try:
            while not finished:
                event = await collector.get()
                finished = event.finish is not None
                if event.error is not None:
                    # They came before the error, and were merged with it.
                    if event.tokens or event.prompt_logprobs:
                        yield event._replace(finish=None, error=None)
                    raise event.error
                yield event
        finally:
            # The engine deletes the collector with the final event. Another one belongs to a later request.
            if self._collectors.get(request.id) is collector:
                self._thread.send(Abort(request.id))

    async def close(self) -> None:
        """Stop the engine and wait for its thread. Unfinished requests end with EngineDead."""
        self._thread.send(StopEngine())
        try:
            await asyncio.to_thread(self._thread.join)
        finally:
            self.on_dead(EngineDead("the engine was closed"))

    def stop_at_exit(self) -> None:
        """Stop the engine and wait for its thread, at a time when no worker thread can start any more. It may
        be called on any thread. Unfinished requests get no event."""
        self._thread.send(StopEngine())
        self._thread.join()

    def _raise_if_dead(self) -> None:
        if self.dead_error is not None:
            raise EngineDead(str(self.dead_error)) from self.dead_error

    async def _call_engine(self, function: Callable[[Engine], T]) -> T:
        """The result of `function(engine)`, called on the engine thread between two steps."""
        self._raise_if_dead()
        result: Future[T] = Future()
        self._pending_calls.add(result)
        result.add_done_callback(self._pending_calls.discard)
        self._thread.send(CallEngine(function, result))
        return await asyncio.wrap_future(result)

    # -- called on the loop, by the thread ----------------------------------------------------------------

    def _call_on_loop(self, function: Callable[..., None], *args: object) -> None:
        with suppress(RuntimeError):  # the loop is closed, maybe since just now: nobody waits any more
            self._loop.call_soon_threadsafe(function, *args)

    def _on_ready(self, engine: Engine) -> None:
        if not self._ready.done():
            self._ready.set_result(engine)

    def _on_events(self, events: list[TokenEvent]) -> None:
        for event in events:
            try:
                self._deliver(event)
            except Exception as error:  # an event that cannot be delivered must not affect other requests
                log.exception("an event of request %s cannot be delivered", event.request_id)
                self._fail_undelivered(event, error)

    def _deliver(self, event: TokenEvent) -> None:
        if event.request_id in self._collectors:  # otherwise it ended with the engine
            self._collectors[event.request_id].put(event)
            if event.finish is not None:
                del self._collectors[event.request_id]

    def _fail_undelivered(self, event: TokenEvent, error: Exception) -> None:
        """End the request with an error, since its reader would wait for the event forever."""
        failed = InternalError(f"the answer was lost: {type(error).__name__}", error)
        self._collectors.pop(event.request_id).replace_with_error(failed)
        if event.finish is None:
            self._collectors[event.request_id] = Collector()  # nobody reads the events that are still to come
            self._thread.send(Abort(event.request_id))

    def on_dead(self, error: MlxrunError) -> None:
        """End every request and every pending call with the first error that the engine died of."""
        self.dead_error = self.dead_error or error
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # marked as retrieved: `start` may have been cancelled
        for request_id, collector in self._collectors.items():
            collector.put(TokenEvent(request_id, finish=FinishReason.ERROR, error=error))
        self._collectors.clear()
        for result in tuple(self._pending_calls):
            result.set_exception(EngineDead(str(self.dead_error)))
        self._dead_event.set()
