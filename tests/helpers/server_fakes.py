"""A server for tests: real HTTP on a free port of this machine, before an engine that follows a script.

    async with serving(script=says("hello")) as s:
        reply = await s.post("/v1/chat/completions", {...})      # s.url for SDKs, s.engine, s.live

A script is called with the engine's Request and gives what the engine does, in order: a str (its tokens, one
an event), a TokenEvent, a MlxrunError (the request fails), a maker of awaitables such as `event.wait` (the
engine pauses there), or a FinishReason (the end; without one the end is STOP).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web

from mlxrun.api.openai.request import prepare_request
from mlxrun.api.parsers.answer_parser import ModelFormats
from mlxrun.api.prepared import ApiContext
from mlxrun.api.text.media.images import MediaLoader
from mlxrun.config.settings import Config, ServerSettings
from mlxrun.core.errors import EngineDead, MlxrunError
from mlxrun.core.request import FinishReason, HitKind, Request, TokenEvent, TokenLogprob
from mlxrun.core.step_plan import PinnedPrefix
from mlxrun.engine.client import Collector
from mlxrun.engine.thread import EngineStats
from mlxrun.server.app import make_app
from mlxrun.server.batches.batch_queue import BatchQueue
from mlxrun.server.certificate import ServerCertificate
from mlxrun.server.engine_state import ENGINE, EngineState, LoadedEngine
from mlxrun.server.generation import collect_choices, stream_deltas
from mlxrun.server.http.access import ACTIVE_IDS
from mlxrun.server.http.json_bodies import json_response, read_json
from mlxrun.server.http.sse import open_stream
from mlxrun.server.http.surface import Endpoint, Surface
from mlxrun.server.lifecycle import listen
from mlxrun.server.live_requests import LIVE_REQUESTS, LiveRequests
from tests.helpers.prompt_scores import make_prompt_logprobs
from tests.helpers.tokenizers import FakeModelInfo, ids_of

if TYPE_CHECKING:
    from mlxrun.model.load_check.report import LoadCheckReport

Act = str | TokenEvent | MlxrunError | FinishReason | Callable[[], Awaitable[Any]]
Script = Callable[[Request], Iterable[Act]]


def make_script(*acts: Act) -> Script:
    """The same acts for every request."""
    return lambda request: acts


def tokens_of(text: str, request: Request) -> list[TokenEvent]:
    """One event a token, with made-up logprobs if they were asked for."""
    events = []
    for at, token in enumerate(ids_of(text)):
        wanted = request.params.logprobs
        top = () if wanted is None else tuple((65 + i, -1.0 - i) for i in range(wanted))
        logprobs = () if wanted is None else (TokenLogprob(-0.5 - at % 3, top),)
        events.append(TokenEvent(request.id, (token,), logprobs, len(request.prompt), hit_kind=HitKind.MISS))
    return events


class FakeEngine:
    """Stands for EngineClient. `requests`: all that came; `aborted`: ids that were ended early; `running`:
    ids under way, empty once all is over. Events merge while they are not read, as the real client's do."""

    def __init__(self, model_info: Any = None, script: Script | None = None) -> None:
        self.model_info = model_info or FakeModelInfo()
        self.script = script or make_script("Hello", " world", "!")
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.running: dict[str, Collector] = {}
        self.dead_error: MlxrunError | None = None
        self.load_check: LoadCheckReport | None = None
        self.closed = False
        self.cleared = 0
        self.pins = True  # whether its prefix cache has what is to be pinned
        self.pinned_prefixes: tuple[PinnedPrefix, ...] = ()
        self.scripts_done = 0
        self.counts: dict[str, int] = {"miss": 0}
        self.numbers: dict[str, Any] = {"running": 0, "waiting": 0, "steps": 7, "errors": 0}
        self.step_ended: float | None = None  # by time.monotonic; None: the engine is idle
        self._died = asyncio.Event()

    async def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        if self.dead_error is not None:
            raise EngineDead(str(self.dead_error)) from self.dead_error
        assert request.id not in self.running, "request ids are unique"
        self.requests.append(request)
        collector = self.running[request.id] = Collector()
        pump = asyncio.create_task(self._pump(request, collector))
        finished = False
        try:
            while not finished:
                event = await collector.get()
                finished = event.finish is not None
                if event.error is not None:
                    if event.tokens:
                        yield event._replace(finish=None, error=None)
                    raise event.error
                yield event
        finally:
            pump.cancel()
            if not finished:
                self._note(request.id)
            self.running.pop(request.id, None)

    async def _pump(self, request: Request, collector: Collector) -> None:
        left = request.params.max_tokens
        finish: FinishReason | None = None
        scores = make_prompt_logprobs(request)
        for part in filter(None, (scores[: len(scores) // 2], scores[len(scores) // 2 :])):
            collector.put(TokenEvent(request.id, prompt_logprobs=part))
        for act in self.script(request):
            if self.running.get(request.id) is not collector:
                return  # it was ended from outside
            if isinstance(act, MlxrunError):
                collector.put(TokenEvent(request.id, finish=FinishReason.ERROR, error=act))
                return
            if isinstance(act, FinishReason):
                finish = act
                break
            if callable(act):
                await act()
                continue
            events = (
                tokens_of(act, request) if isinstance(act, str) else [act._replace(request_id=request.id)]
            )
            for event in events:
                left -= len(event.tokens)
                if left < 0 or self.running.get(request.id) is not collector:
                    break
                collector.put(event)
                await asyncio.sleep(0)
            if left <= 0:
                finish = FinishReason.LENGTH
                break
        self.scripts_done += 1
        if self.running.get(request.id) is not collector:
            return
        collector.put(
            TokenEvent(
                request.id, num_computed_tokens=len(request.prompt), finish=finish or FinishReason.STOP
            )
        )

    def abort(self, request_id: str) -> None:
        if request_id in self.running:
            self._note(request_id)

    def fail(self, request_id: str, error: MlxrunError) -> None:
        if request_id in self.running:
            collector, self.running[request_id] = self.running[request_id], Collector()
            collector.put(TokenEvent(request_id, finish=FinishReason.ERROR, error=error))
            self._note(request_id)

    def _note(self, request_id: str) -> None:
        if request_id not in self.aborted:
            self.aborted.append(request_id)

    def die(self, error: MlxrunError | None = None) -> None:
        """What the end of the engine thread does."""
        self.dead_error = error or EngineDead("the engine has stopped: as scripted")
        for rid, collector in list(self.running.items()):
            self.running[rid] = Collector()  # what the script still does is not read
            collector.put(TokenEvent(rid, finish=FinishReason.ERROR, error=self.dead_error))
        self._died.set()

    async def wait_until_dead(self) -> MlxrunError:
        await self._died.wait()
        assert self.dead_error is not None
        return self.dead_error

    def read_cache_counters(self) -> Mapping[str, int]:
        return self.counts

    async def pin_prefix(self, request: Request, stop: int, name: str) -> PinnedPrefix | None:
        if not self.pins:
            return None
        self.pinned_prefixes += (PinnedPrefix(f"{stop:016x}", name, stop, 4 * stop, 1_700_000_000),)
        return self.pinned_prefixes[-1]

    async def unpin_prefix(self, prefix_id: str) -> bool:
        left = tuple(prefix for prefix in self.pinned_prefixes if prefix.id != prefix_id)
        found, self.pinned_prefixes = len(left) < len(self.pinned_prefixes), left
        return found

    def read_stats(self) -> EngineStats:
        is_busy = self.step_ended is not None
        return EngineStats(self.numbers, None, self.step_ended or 0.0, is_busy, self.load_check)

    @property
    def surprise(self) -> str:
        return "" if self.load_check is None else self.load_check.surprise

    async def clear_cache(self) -> None:
        self.cleared += 1

    async def close(self) -> None:
        self.closed = True
        self.die(EngineDead("the engine was closed"))


@dataclass
class Reply:
    """A response, read to its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[tuple[str | None, Any]]:
        """Server-sent events as (event, data), data parsed where it is JSON; comments left out."""
        return parse_events(self.body.decode())


def parse_events(text: str) -> list[tuple[str | None, Any]]:
    """The events of a stream."""
    found: list[tuple[str | None, Any]] = []
    for block in text.split("\n\n"):
        name, data = None, []
        for line in block.split("\n"):
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                data.append(line[6:])
        if data:
            joined = "\n".join(data)
            found.append((name, json.loads(joined) if joined[0] == "{" else joined))
    return found


class AppView:
    """What tests look into of an application."""

    def __init__(self, app: web.Application) -> None:
        self.app = app
        self.state: EngineState = app[ENGINE]
        self.live: LiveRequests = app[LIVE_REQUESTS]
        self.active: set[str] = app[ACTIVE_IDS]


@dataclass
class Serving(AppView):
    """A running server and a client of it."""

    url: str
    app: web.Application
    engine: Any
    http: aiohttp.ClientSession
    headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(self.app)

    async def request(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        """`body`: bytes or str as they are, else JSON. Header names with `_` for `-`."""
        named = self.headers | {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if isinstance(body, bytes | str | None) else json.dumps(body)
        if data is not None:
            named.setdefault("Content-Type", "application/json")
        async with self.http.request(method, self.url + path, data=data, headers=named) as response:
            return Reply(response.status, response.headers, await response.read())

    async def get(self, path: str, **headers: str) -> Reply:
        return await self.request("GET", path, **headers)

    async def post(self, path: str, body: Any, **headers: str) -> Reply:
        return await self.request("POST", path, body, **headers)

    async def settle(self) -> None:
        """Nothing is under way any more: no request, no row. Fails after long."""
        for _ in range(30_000):
            busy = len(self.live) or self.active
            if not busy and not (isinstance(self.engine, FakeEngine) and self.engine.running):
                return
            await asyncio.sleep(0.002)
        raise AssertionError(f"still under way: {[live.describe() for live in self.live]}")


async def _mini(request: web.Request) -> web.StreamResponse:
    """The least that a surface does, as every surface does it. Events can be made large by ?pad=N."""
    pad = "x" * int(request.query.get("pad", 0))
    body = await read_json(request)
    prepared = await prepare_request("/v1/chat/completions", body, request.app[ENGINE].context, stream=True)
    with request.app[LIVE_REQUESTS].open(request, "mini", prepared) as live:
        if not prepared.stream:
            choices = await collect_choices(live)
            return json_response({"id": live.id, "texts": [choice.content for choice in choices]})
        async with open_stream(request) as stream:
            stream.live = live
            try:
                async with aclosing(stream_deltas(live)) as events:
                    async for choice, deltas in events:
                        text = "".join(delta.text for delta in deltas)
                        end = choice.finish_reason
                        await stream.send({"at": choice.index, "text": text, "end": end, "pad": pad})
            except MlxrunError as error:
                if not stream.started:
                    raise
                await stream.send({"error": error.code})
        return stream.response


def _mini_error(error: BaseException, request_id: str) -> dict[str, Any]:
    return {"mini": getattr(error, "code", type(error).__name__), "id": request_id, "text": str(error)}


MINI = Surface("mini", (Endpoint("POST", "/mini", _mini, "A chat, in brief"),), _mini_error)


def make_chat_body(**fields: Any) -> dict[str, Any]:
    """A small chat body."""
    return {"messages": [{"role": "user", "content": "hello"}], **fields}


def server_config(**fields: Any) -> Config:
    """A Config whose section `server` has these fields, on a free port."""
    return Config(server=ServerSettings(port=0, **fields))


@asynccontextmanager
async def run_server(
    config: Config | None = None,
    *,
    script: Script | None = None,
    engine: Any = None,
    model_info: Any = None,
    formats: ModelFormats | None = None,
    surfaces: Sequence[Surface] | None = None,
    clock: Callable[[], float] = time.monotonic,
    loaded: bool = True,
    batches: BatchQueue | None = None,
    responses_path: Path | None = None,
    certificate: ServerCertificate | None = None,
) -> AsyncIterator[Serving]:
    """A server that listens. `engine`: a FakeEngine or a real EngineClient (the caller closes it)."""
    config = config or server_config()
    if config.server.port != 0:
        config = replace(config, server=replace(config.server, port=0))
    engine = engine or FakeEngine(model_info, script)
    app = make_app(config, batches, responses_path=responses_path, surfaces=surfaces, clock=clock)
    if loaded:
        context = ApiContext(
            engine.model_info, config, MediaLoader(config.media, None), formats or ModelFormats()
        )
        app[ENGINE].attach(LoadedEngine(engine, context, {}))
    async with (
        listen(app, certificate=certificate) as url,
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=False), timeout=aiohttp.ClientTimeout(total=30)
        ) as http,
    ):
        yield Serving(url, app, engine, http)
