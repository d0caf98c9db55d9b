"""The front of a server on several processes: mlxrun's own application, whose endpoints relay to a worker's.

The front checks keys, hosts and sizes and knows all paths, as without workers. The worker, which has the same
application, answers. Bytes pass as they come. A client that disconnects cancels the handler here; this closes
the connection to the worker, which then cancels the request. Stored responses and conversations are on the
worker whose number is in their ids.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import aiohttp
import orjson
from aiohttp import web
from prometheus_client.core import CounterMetricFamily
from yarl import URL

from mlxrun import __version__
from mlxrun.api.responses.request import find_conversation_id
from mlxrun.cluster.servers.merged_metrics import MergedMetrics, PastCounts
from mlxrun.cluster.servers.relayed_answer import NOT_SENT
from mlxrun.config.settings import Config
from mlxrun.core.errors import EngineDead, MlxrunError, NotFound
from mlxrun.server.app import list_surfaces, make_app
from mlxrun.server.batches.batch_queue import BatchQueue
from mlxrun.server.endpoints.admin import WARM_PATH, get_openapi
from mlxrun.server.engine_state import ENGINE, EngineState
from mlxrun.server.http.access import CONFIG, ID_HEADER, SAFE_METHODS, request_id, write_key
from mlxrun.server.http.forms import MAX_FIELDS, find_form_field
from mlxrun.server.http.json_bodies import get_max_body_bytes, json_response, parse_body, read_bytes
from mlxrun.server.http.surface import OPENAPI_PATH, ROUTES, Endpoint, Handler, Surface
from mlxrun.server.live_requests import ENGINE_ERROR

SECRET_HEADER = "x-mlxrun-relay"  # has the secret that front and workers share
KEY_HEADER = "x-mlxrun-key"  # has the name and the role of the API key
FRONT = "front"  # the label `worker` of requests that failed at the front
OWNER_DIGITS = 3  # hexadecimal, of a worker's number in the ids that it makes
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 5.0  # that a worker may take to say something of itself; then it is left out
IDLE_SECONDS = 15.0  # that a connection to a worker stays open; a worker closes it later
SILENT_SECONDS = 30  # in which the machine of a worker acknowledges something; then it is gone


def make_relay_app(
    config: Config, relay: Relay, state: EngineState, batch_queue: BatchQueue | None = None
) -> web.Application:
    """Make an application whose endpoints are those of a relay. `state`: of what stands for its engine."""
    surfaces = [relay.wrap_surface(surface) for surface in list_surfaces()]
    app = make_app(config, batch_queue, surfaces=surfaces)
    app[ENGINE] = state
    app.cleanup_ctx.append(relay.open_session)
    return app


def open_socket(address: tuple[Any, ...]) -> socket.socket:
    """Open a socket that fails if the machine at its other end has vanished, which ends no connection. The
    system asks that machine whether it is there, also while a worker computes and sends nothing."""
    found = socket.socket(*address[:3])
    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", SILENT_SECONDS // 3),
        ("TCP_KEEPALIVE", SILENT_SECONDS // 3),  # the same on macOS
        ("TCP_KEEPINTVL", SILENT_SECONDS // 6),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", SILENT_SECONDS * 1000),  # for what was sent to it
    ):
        if hasattr(socket, name):  # no system has all
            found.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return found


class RelayedSlot(Protocol):
    """The place of a worker, as the relay sees it. `url`: empty while it serves nothing; `label`: for
    metrics."""

    @property
    def number(self) -> int: ...
    @property
    def url(self) -> str: ...
    @property
    def label(self) -> str: ...
    def describe(self) -> dict[str, Any]: ...


class Relay:
    """The handlers of the front. `label`: of metrics, for what answers the requests."""

    label = "worker"
    unchanged: Collection[str] = ("ui",)  # surfaces that the front answers as one server does

    def __init__(self, slots: Sequence[RelayedSlot], secret: str) -> None:
        self._slots = slots
        self.past = PastCounts()
        self._by_number = {slot.number: slot for slot in slots}
        self._secret = secret
        self._session: aiohttp.ClientSession
        self._failed: Counter[tuple[str, str]] = Counter()  # requests by surface and status, see relay

    async def open_session(self, app: web.Application) -> AsyncIterator[None]:
        """Keep connections to the workers while the application runs."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS, socket_factory=open_socket)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        async with aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        ) as self._session:
            yield

    def wrap_surface(self, surface: Surface) -> Surface:
        """Return the surface with endpoints that relay."""
        endpoints = (replace(each, handler=self._choose_handler(surface, each)) for each in surface.endpoints)
        return replace(surface, endpoints=tuple(endpoints))

    def _choose_handler(self, surface: Surface, endpoint: Endpoint) -> Handler:
        if surface.name in self.unchanged:
            return endpoint.handler
        return self.list_own().get(endpoint.path, self.relay)

    def list_own(self) -> dict[str, Handler]:
        """The handlers of paths that the front answers itself, from what all workers say."""
        return {
            OPENAPI_PATH: get_openapi,
            "/v1/status": self.get_status,
            "/metrics": self.get_metrics,
            "/v1/cache": self.collect,
            "/v1/cache/clear": self.collect,
            WARM_PATH: self.collect,
            "/v1/cache/pinned/{id}": self.ask_any,
            "/v1/requests/{id}/cancel": self.ask_any,
        }

    # One worker

    async def relay(self, request: web.Request) -> web.StreamResponse:
        """Relay, and count a request that failed here: a worker that has died counts nothing any more."""
        surface = request.app[ROUTES].find(request)[0].adapt(request)
        error: Exception | None = None
        try:
            return await self.relay_to_worker(request)
        except MlxrunError as failure:
            error = failure
            raise
        finally:
            if error := request.get(ENGINE_ERROR) or error:
                self._failed[surface.name, str(surface.status(error))] += 1

    async def relay_to_worker(self, request: web.Request) -> web.StreamResponse:
        """Relay a request to the worker that it is for."""
        raise NotImplementedError

    def find_owner(self, request: web.Request, fields: Mapping[str, Any]) -> RelayedSlot | None:
        """The worker that has the response or conversation of a request; None if any worker will do. NotFound
        if there is no such worker."""
        named = find_conversation_id(fields)
        path = request.path if request.path.startswith(("/v1/responses/", "/v1/conversations/")) else ""
        name = (request.match_info.get("id") if path else None) or fields.get("previous_response_id") or named
        if not isinstance(name, str):
            return None
        digits = name.partition("_")[2][:OWNER_DIGITS]
        try:
            return self._by_number[int(digits, 16)]
        except (ValueError, KeyError):
            return None  # no worker has made it: any of them says so

    async def send(self, request: web.Request, slot: RelayedSlot, body: bytes) -> aiohttp.ClientResponse:
        if not slot.url:
            raise aiohttp.ConnectionTimeoutError(f"worker {slot.number} is being started")
        given = request.headers.items()
        own = {
            ID_HEADER: request_id(request),
            KEY_HEADER: write_key(request),
            SECRET_HEADER: self._secret,
        }
        headers = [(k, v) for k, v in given if k.lower() not in NOT_SENT | own.keys()] + [*own.items()]
        url = URL(slot.url + request.rel_url.raw_path_qs, encoded=True)
        return await self._session.request(
            request.method, url, headers=headers, data=body or None, allow_redirects=False
        )

    # All workers

    async def ask_all(self, request: web.Request) -> list[tuple[RelayedSlot, int, bytes]]:
        """The answers of all workers that serve: status and body. One that hangs does not hide the others."""
        body = await request.read()
        seconds = ANSWER_SECONDS if request.method in SAFE_METHODS else None

        async def ask(slot: RelayedSlot) -> tuple[RelayedSlot, int, bytes]:
            async with asyncio.timeout(seconds), await self.send(request, slot, body) as upstream:
                return slot, upstream.status, await upstream.read()

        slots = [slot for slot in self._slots if slot.url]
        found = await asyncio.gather(*map(ask, slots), return_exceptions=True)
        answers = [each for each in found if not isinstance(each, BaseException)]
        if not answers:
            raise EngineDead("no worker answers")
        return answers

    async def get_status(self, request: web.Request) -> web.Response:
        """What each worker says of itself, below what the pool knows of it."""
        return json_response(await self.describe_status(request))

    async def describe_status(self, request: web.Request) -> dict[str, Any]:
        """Build the body of /v1/status."""
        answers = await self.ask_all(request)
        said = {slot.number: orjson.loads(body) for slot, status, body in answers if status == 200}
        engine = request.app[ENGINE]
        error = engine.find_unavailability()
        return {
            "status": "ok" if error is None else error.code,
            "version": __version__,
            "uptime": round(engine.clock() - engine.started, 3),
            "model": engine.describe_model(),
            f"{self.label}s": [{**slot.describe(), "status": said.get(slot.number)} for slot in self._slots],
        }

    async def get_metrics(self, request: web.Request) -> web.Response:
        """The metrics of all workers, with a label for the worker, and the requests that failed here."""
        merged = MergedMetrics(self.label, self.past)
        for slot, _, body in await self.ask_all(request):
            merged.add(slot.label, body.decode())
        text = "Requests that have ended. A stream that failed counts with the status of its error."
        failed = CounterMetricFamily("mlxrun_requests", text, labels=["surface", "status", self.label])
        for (surface, status), number in self._failed.items():
            failed.add_metric([surface, status, FRONT], number)
        merged.add_families([failed])
        self.add_own_metrics(request.app, merged)
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=merged.encode(), headers=headers)

    def add_own_metrics(self, app: web.Application, merged: MergedMetrics) -> None:
        """Add what the front knows besides."""

    async def collect(self, request: web.Request) -> web.Response:
        """The answers of all workers in one list."""
        answers = await self.ask_all(request)
        name = self.label
        found = [{name: slot.describe()[name], **orjson.loads(body)} for slot, _, body in answers]
        return json_response({f"{name}s": found}, max((status for _, status, _ in answers), default=200))

    async def ask_any(self, request: web.Request) -> web.Response:
        """The answer of a worker that has what the path names, else of any. NotFound if there are none."""
        answers = await self.ask_all(request)
        if not answers:
            raise NotFound(f"{request.path} does not exist: no {self.label} is loaded")
        return choose_answer(answers)


def choose_answer(answers: Sequence[tuple[Any, int, bytes]]) -> web.Response:
    """The answer of the worker that has what a request is about: the one with the lowest status."""
    _, status, body = min(answers, key=lambda answer: answer[1])
    return web.Response(body=body, status=status, content_type="application/json")


async def read_fields(request: web.Request) -> tuple[bytes, Mapping[str, Any]]:
    """Read a body, and return it with the fields by which a request is routed; of a form that is its model. A
    body that is no JSON object has none, as its worker refuses it. RequestError for one that is no JSON."""
    if not request.can_read_body:
        return b"", {}
    endpoint = request.app[ROUTES].find(request)[1]
    if endpoint is not None and endpoint.is_form:
        body = await read_bytes(request, request.app[CONFIG].media.audio_max_bytes + MAX_FIELDS)
        return body, {"model": find_form_field(body, request.headers.get("Content-Type", ""), "model")}
    body = await read_bytes(request, get_max_body_bytes(request.app))
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:  # it takes no byte order mark, which workers take
        found = await parse_body(body) if body.strip() else None
    return body, found if isinstance(found, dict) else {}
