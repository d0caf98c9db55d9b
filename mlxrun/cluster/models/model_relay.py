"""The front of a server of several models: each request goes to the process of the model that it names, once
that is loaded.

What all models share is answered here: the lists of models, status and metrics. A request that names no model
goes to the first one of the config that does what its path is for. Files and batches are the front's own; see
model_lines.py for the lines.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import aiohttp
from aiohttp import web
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from mlxrun.api.anthropic.response import build_model, build_models_page, format_time
from mlxrun.api.ollama.fields import BODIES, CHAT_PATH, SHOW_PATH
from mlxrun.api.ollama.request import LATEST, read_keep_alive
from mlxrun.api.ollama.response import NEVER, OllamaWriter
from mlxrun.api.stored_files import find_file_parts
from mlxrun.cluster.messages import LineResult
from mlxrun.cluster.models.messages import BatchLine
from mlxrun.cluster.models.model_lines import LINE_PATH
from mlxrun.cluster.models.model_pool import TASKS, ModelPool
from mlxrun.cluster.models.model_slot import ModelSlot
from mlxrun.cluster.models.models_state import ModelsState
from mlxrun.cluster.models.shared_limits import SharedLimits
from mlxrun.cluster.servers.merged_metrics import MergedMetrics
from mlxrun.cluster.servers.relayed_answer import pass_on
from mlxrun.cluster.servers.server_relay import (
    FRONT,
    KEY_HEADER,
    SECRET_HEADER,
    Relay,
    choose_answer,
    make_relay_app,
    read_fields,
)
from mlxrun.config.settings import Config
from mlxrun.core.errors import Cancelled, EngineDead, ModelLoadError, NotFound, NotReady, RequestError
from mlxrun.core.field_errors import check_type, reject, reject_unknown
from mlxrun.server.batches.batch_queue import BatchQueue
from mlxrun.server.batches.queue_access import inline_stored_files
from mlxrun.server.endpoints import ollama
from mlxrun.server.endpoints.admin import WARM_PATH
from mlxrun.server.engine_state import ActiveCount
from mlxrun.server.http.access import CONFIG, NO_KEY, key_name, may_end, request_id
from mlxrun.server.http.json_bodies import encode_json, encode_utf8, json_response, parse_body, read_json
from mlxrun.server.http.request_log import LOGGED_ELSEWHERE
from mlxrun.server.http.sse import EventStream, LineStream, MakePing, open_stream, wants_stream
from mlxrun.server.http.surface import ROUTES, Endpoint, Handler, Surface, is_anthropic
from mlxrun.server.live_requests import LIVE_REQUESTS
from mlxrun.server.status import collect_storage, describe_batches, describe_files

COUNTS_SECONDS = 2.0  # that a process has to say what it has counted, before it ends
COUNTED = TASKS.keys() | {WARM_PATH}  # the paths whose requests count in the limits of API keys


def make_models_front(relay: ModelRelay, config: Config, batch_queue: BatchQueue | None) -> web.Application:
    """Make the application of the front of several models."""
    app = make_relay_app(config, relay, ModelsState(relay.models), batch_queue)
    relay.limits = SharedLimits(app[LIVE_REQUESTS].limits)
    relay.models.follow = relay.limits.follow_process
    return app


class ModelRelay(Relay):
    """The handlers of the front. `secret`: what the processes of the models demand."""

    label = "model"
    unchanged = ("ui", "batches", "anthropic_batches")

    limits: SharedLimits

    def __init__(self, pool: ModelPool, secret: str) -> None:
        super().__init__(pool.slots, secret)
        pool.before_end = self.keep_counts
        self.models = pool
        self._waiting: dict[str, tuple[str, ActiveCount]] = {}  # by request's id: its key's name, its end

    def wrap_surface(self, surface: Surface) -> Surface:
        found = super().wrap_surface(surface)
        if surface.name != "admin":
            return found
        own = (
            Endpoint("POST", "/v1/models/load", self.load_model, "Load a model", role="admin"),
            Endpoint("POST", "/v1/models/unload", self.unload_model, "Unload a model", role="admin"),
        )
        return replace(found, endpoints=(*found.endpoints, *own))

    def list_own(self) -> dict[str, Handler]:
        return {
            **super().list_own(),
            WARM_PATH: self.relay,
            "/v1/requests/{id}/cancel": self.cancel,
            "/v1/models": self.list_models,
            "/v1/models/{id}": self.get_model,
            "/v1/models/{owner}/{id}": self.get_model,
            "/api/tags": self.list_tags,
            "/api/ps": self.list_loaded,
            SHOW_PATH: self.show_model,
        }

    # One model

    async def relay_to_worker(self, request: web.Request) -> web.StreamResponse:
        body, fields = await read_fields(request)
        slot = self.choose_model(request, fields)
        if find_file_parts(fields):
            body = encode_utf8(encode_json(await inline_stored_files(request, fields)))
        elif _is_ollama(request) and "keep_alive" in fields:  # it is for this process, and not for the model
            rest = {name: value for name, value in (await parse_body(body)).items() if name != "keep_alive"}
            body = encode_utf8(encode_json(rest))
        held: AbstractContextManager[None] = nullcontext()
        if request.path in COUNTED:
            held = self.limits.hold(request_id(request), key_name(request))
        with held:
            return await self._relay_to_model(request, slot, fields, body)

    async def _relay_to_model(
        self, request: web.Request, slot: ModelSlot, fields: Mapping[str, Any], body: bytes
    ) -> web.StreamResponse:
        """A stream is kept alive while its model is loaded."""
        is_ollama = _is_ollama(request)
        streams = TASKS.get(request.path) == "generate" and wants_stream(fields, usually=is_ollama)
        if slot.state == "ready" or not streams:
            return await self._answer(request, slot, fields, body)
        writer = OllamaWriter(slot.name, 0, is_chat=request.path == CHAT_PATH)
        ping: MakePing | None = (lambda: (None, writer.write_ping())) if is_ollama else None
        kind = LineStream if is_ollama else EventStream
        async with open_stream(request, ping=ping, kind=kind) as stream:
            answer: web.StreamResponse = stream.response  # if its last event is an error
            answer = await self._answer(request, slot, fields, body, stream)
        return answer

    async def _answer(
        self,
        request: web.Request,
        slot: ModelSlot,
        fields: Mapping[str, Any],
        body: bytes,
        stream: EventStream | None = None,
    ) -> web.StreamResponse:
        with self._let_cancel(request):
            await self.models.wait_loaded(slot)
        with self.models.hold(slot):
            if _is_ollama(request) and "keep_alive" in fields:
                slot.keep_alive = read_keep_alive(fields["keep_alive"])
            try:
                upstream = await self.send(request, slot, body)
            except aiohttp.ClientError as error:  # nothing of an answer has come
                raise EngineDead(f"{slot.name}: its process has ended: try again soon") from error
            request[LOGGED_ELSEWHERE] = True
            async with upstream:
                return await pass_on(request, upstream, slot.name, stream)

    def choose_model(self, request: web.Request, fields: Mapping[str, Any]) -> ModelSlot:
        """Choose the model of a request: the one that it names, else the first one for its path. NotFound if
        there is no such model; RequestError if another one has the stored response that it continues."""
        if request.path == WARM_PATH and isinstance(inner := fields.get("body"), dict):
            fields = inner
        found = self.find_owner(request, fields)
        owner = next((slot for slot in self.models.slots if slot is found), None)
        given = (fields.get("model"), fields.get("name"), request.query.get("model"))
        name = next((each for each in given if isinstance(each, str) and each), None)
        if name is None:
            return owner or self.models.find_first(request.path)
        if _is_ollama(request) and not self.models.has(name):
            name = name.removesuffix(LATEST)
        named = self.models.find(name)
        if owner is not None and named is not owner:
            text = f"model: the stored response or conversation is of {owner.name}, not of {named.name}"
            raise RequestError(text, param="model")
        return named

    @contextmanager
    def _let_cancel(self, request: web.Request) -> Iterator[None]:
        """Let /v1/requests/ID/cancel end the block with Cancelled."""
        rid, count = request_id(request), ActiveCount()
        self._waiting[rid] = (key_name(request), count)
        try:
            with count.hold():
                yield
        finally:
            del self._waiting[rid]

    async def cancel(self, request: web.Request) -> web.Response:
        """End a request that waits for its model, or one of a loaded model."""
        rid = request.match_info["id"]
        owner, count = self._waiting.get(rid, ("", None))
        if count is not None and may_end(request, owner):
            count.end_all(Cancelled("the request was cancelled while it waited for its model"))
            return json_response({"id": rid, "cancelled": True})
        answers = await self.ask_all(request)
        if not answers:
            raise NotFound(f"there is no request {rid[:128]!r} in flight")
        return choose_answer(answers)

    # All models

    async def ask_all(self, request: web.Request) -> list[tuple[Any, int, bytes]]:
        try:
            return await super().ask_all(request)
        except EngineDead:  # none is loaded, or the last one has just ended
            return []

    async def get_status(self, request: web.Request) -> web.Response:
        used = sum(slot.memory for slot in self.models.slots if slot.is_loaded)
        stored = {"batches": describe_batches(request.app), "files": describe_files(request.app)}
        memory = {"limit": self.models.limit or None, "used": used}
        return json_response({**await self.describe_status(request), **stored, "models_memory": memory})

    def add_own_metrics(self, app: web.Application, merged: MergedMetrics) -> None:
        """Add the counters of models that are not loaded, the state of all, and files and batches."""
        label = [self.label]
        ready = GaugeMetricFamily("mlxrun_ready", "Whether requests are served.", labels=label)
        ready.add_metric([FRONT], 1)
        loaded = GaugeMetricFamily("mlxrun_model_loaded", "Whether a model is loaded.", labels=label)
        text = "Requests that wait until their model is loaded."
        waiting = GaugeMetricFamily("mlxrun_model_waiting", text, labels=label)
        loads = CounterMetricFamily("mlxrun_model_loads", "How often a model was loaded.", labels=label)
        for slot in self.models.slots:
            if not slot.url:
                merged.add_ended(slot.label)
            loaded.add_metric([slot.label], slot.state == "ready")
            waiting.add_metric([slot.label], len(slot.waiting))
            loads.add_metric([slot.label], slot.loads)
        merged.add_families((ready, loaded, waiting, loads))
        merged.add_samples(FRONT, collect_storage(app))

    async def keep_counts(self, slot: ModelSlot) -> None:
        """Keep the counters of a process that is about to end, or has ended."""
        text, headers = "", {SECRET_HEADER: self._secret, KEY_HEADER: NO_KEY}
        timeout = aiohttp.ClientTimeout(total=COUNTS_SECONDS)
        with suppress(aiohttp.ClientError, TimeoutError):
            async with self._session.get(f"{slot.url}/metrics", headers=headers, timeout=timeout) as upstream:
                text = await upstream.text()
        self.past.add(slot.label, text)

    async def send_line(self, slot: ModelSlot, line: BatchLine) -> LineResult:
        """Have a loaded model answer a line. NotReady if its process ends before."""
        headers = {SECRET_HEADER: self._secret, KEY_HEADER: NO_KEY}
        try:
            sent = self._session.post(slot.url + LINE_PATH, data=pickle.dumps(line), headers=headers)
            async with sent as upstream:
                body = await upstream.read()
        except aiohttp.ClientError as error:
            raise NotReady(f"{slot.name}: its process has ended: try again soon") from error
        if upstream.status != 200:  # it is ending
            raise NotReady(f"{slot.name}: status {upstream.status}: try again soon")
        found = pickle.loads(body)
        assert isinstance(found, LineResult)
        return found

    async def list_models(self, request: web.Request) -> web.Response:
        """List the names of all models, each with its state."""
        slots = self.models.slots
        found = [
            each
            for slot in slots
            for each in _describe_names(slot)
            if self.models.find(each["id"]) is slot  # two entries of one path have its name
        ]
        if is_anthropic(request):
            return json_response(build_models_page([each["id"] for each in found]))
        return json_response({"object": "list", "data": found})

    async def get_model(self, request: web.Request) -> web.Response:
        """Describe a model by one of its names."""
        name = "/".join(request.match_info.values())
        names = _describe_names(self.models.find(name))
        found = next((each for each in names if each["id"] == name), names[0])
        return json_response(build_model(found["id"]) if is_anthropic(request) else found)

    async def list_tags(self, request: web.Request) -> web.Response:
        """List the names of all models, as Ollama does."""
        slots = self.models.slots
        found = [
            tag
            for slot in slots
            if slot.facts is not None
            for tag in slot.facts.tags
            if self.models.find(tag["name"].removesuffix(LATEST)) is slot  # as in list_models
        ]
        return json_response({"models": found})

    async def list_loaded(self, request: web.Request) -> web.Response:
        """List the models that are loaded, as Ollama does."""
        slots = [slot for slot in self.models.slots if slot.state == "ready" and slot.facts is not None]
        return json_response({"models": [_describe_loaded(slot) for slot in slots]})

    async def show_model(self, request: web.Request) -> web.Response:
        """Describe a model in detail, as Ollama does."""
        strict = request.app[CONFIG].server.strict_fields
        given = BODIES[SHOW_PATH].check(await read_json(request), strict=strict)
        slot = self.choose_model(request, {"model": given.get("model") or given.get("name")})
        if slot.facts is None:
            raise ModelLoadError(f"{slot.name}: {slot.error}")
        return json_response(dict(slot.facts.shown))

    async def load_model(self, request: web.Request) -> web.Response:
        """Load a model now: `{"model": NAME}`."""
        slot = await self._read_model(request)
        await self.models.wait_loaded(slot)
        return json_response(slot.describe())

    async def unload_model(self, request: web.Request) -> web.Response:
        """Unload a model once its requests have ended: `{"model": NAME}`."""
        slot = await self._read_model(request)
        await self.models.unload(slot)
        return json_response(slot.describe())

    async def _read_model(self, request: web.Request) -> ModelSlot:
        body = check_type(await read_json(request), dict, "body")
        for key in body.keys() - {"model"}:
            reject_unknown(key, ["model"])
        if "model" not in body:
            reject("model", "is required", code="missing_field")
        return self.models.find(check_type(body["model"], str, "model"))


def _is_ollama(request: web.Request) -> bool:
    return request.app[ROUTES].find(request)[0].name == ollama.NAME


def _describe_names(slot: ModelSlot) -> list[dict[str, Any]]:
    """The objects of a model in /v1/models, with its state."""
    if slot.facts is None:
        return [{"id": slot.name, "object": "model", "created": 0, "owned_by": "mlxrun", "state": "failed"}]
    return [{**each, "state": slot.state} for each in slot.facts.listed]


def _describe_loaded(slot: ModelSlot) -> dict[str, Any]:
    assert slot.facts is not None
    tag = dict(slot.facts.tags[0])
    del tag["modified_at"]
    left = slot.compute_lifetime(asyncio.get_running_loop().time())
    expires = NEVER if left is None else format_time(round(time.time() + left))
    more = {"expires_at": expires, "size_vram": tag["size"], "context_length": slot.facts.context_length}
    return tag | more
