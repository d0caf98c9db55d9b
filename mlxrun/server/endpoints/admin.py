"""Health checks, status, metrics, cancelling requests, clearing and warming the cache, for operators.

/health is always on and needs no API key. All else is the surface `admin`.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import asdict
from functools import partial
from typing import Any

from aiohttp import web
from prometheus_client import generate_latest

from mlxrun import __version__
from mlxrun.api.body_schema import BodySchema
from mlxrun.api.prepared import check_message_counts
from mlxrun.api.prompt_prefix import PREFIX_URLS, guess_url, prepare_prefix
from mlxrun.core.errors import EngineDead, MlxrunError, NotFound, RequestError
from mlxrun.core.field_errors import reject
from mlxrun.server.engine_state import ENGINE
from mlxrun.server.generation import collect_choices
from mlxrun.server.http.access import API_KEYS, CONFIG, CONFIG_HASH, may_end
from mlxrun.server.http.json_bodies import json_response, read_empty_body, read_json
from mlxrun.server.http.surface import OPENAPI_PATH, ROUTES, Endpoint, Surface, make_document
from mlxrun.server.live_requests import LIVE_REQUESTS, count_from_arrival
from mlxrun.server.request_metrics import METRICS
from mlxrun.server.status import (
    count_phases,
    describe_batches,
    describe_files,
    describe_limits,
    read_power_state,
)

_STATUS = {"loading": "loading", "shutting_down": "draining", "engine_unavailable": "dead"}


async def check_readiness(request: web.Request) -> web.StreamResponse:
    """Answer 200 while requests are served; 503 while the model loads, in a shutdown, or with a dead
    engine."""
    return _respond_with_health(request.app[ENGINE].find_unavailability())


async def check_liveness(request: web.Request) -> web.StreamResponse:
    """Answer 200 until the engine has died, then 503: the process must be restarted."""
    error = request.app[ENGINE].find_unavailability()
    return _respond_with_health(error if isinstance(error, EngineDead) else None)


def _respond_with_health(error: MlxrunError | None) -> web.Response:
    body: dict[str, Any] = {"status": _name_status(error), "version": __version__}
    if error is None:
        return json_response(body)
    headers = {"Retry-After": str(error.retry_after)} if error.retry_after is not None else None
    return json_response({**body, "reason": str(error)}, error.http_status, headers)


def _name_status(error: MlxrunError | None) -> str:
    return "ok" if error is None else _STATUS.get(error.code, error.code)


async def get_status(request: web.Request) -> web.StreamResponse:
    """Describe each request with its phase, and the state of the engine, the memory and the cache."""
    power = await asyncio.to_thread(read_power_state)  # first: all else is of one moment
    app, engine = request.app, request.app[ENGINE]
    values, age = engine.read_stats()
    stats, phases = dict(values), count_phases(app)
    background = {name: stats.pop(name) for name in ("running", "waiting", "background")}["background"]
    clients = {"running": phases["prefill"] + phases["decode"], "waiting": phases["queued"]}
    return json_response(
        {
            "status": _name_status(engine.find_unavailability()),
            "version": __version__,
            "uptime": round(engine.clock() - engine.started, 3),
            "config_hash": app[CONFIG_HASH],
            "model": engine.describe_model(),
            "requests": [live.describe() for live in app[LIVE_REQUESTS]],
            "queue": {**phases, **clients, "background": background},
            "limits": describe_limits(app),
            "batches": describe_batches(app),
            "files": describe_files(app),
            "cache": _describe_cache(app),
            "age": None if age is None else round(age, 3),
            **stats,
            **engine.facts,
            "power": power,
        }
    )


async def get_metrics(request: web.Request) -> web.StreamResponse:
    """Return the metrics in Prometheus' text format."""
    headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
    return web.Response(body=generate_latest(request.app[METRICS].registry), headers=headers)


async def cancel_request(request: web.Request) -> web.StreamResponse:
    """End a request in flight. NotFound for a request of another API key, unless the key is an admin's."""
    await read_empty_body(request)
    rid = request.match_info["id"]
    live = request.app[LIVE_REQUESTS].get(rid)
    if live is None or not may_end(request, live.key_name):
        raise NotFound(f"there is no request {rid[:128]!r} in flight")
    live.cancel()
    return json_response({"id": rid, "cancelled": True})


async def get_cache(request: web.Request) -> web.StreamResponse:
    """Return the size and the counters of the prefix cache, and the pinned prefixes."""
    return json_response(_describe_cache(request.app))


async def clear_cache(request: web.Request) -> web.StreamResponse:
    """Remove all entries of the prefix cache that no running request uses."""
    await read_empty_body(request)
    engine = request.app[ENGINE]
    before = dict(engine.read_cache_counts())
    await engine.client.clear_cache()
    after = engine.read_cache_counts()
    names = ("entries", "memory_bytes", "disk_bytes")
    freed = {name: before.get(name, 0) - after.get(name, 0) for name in names}
    return json_response({"cleared": True, "freed": freed, "cache": _describe_cache(request.app)})


async def get_openapi(request: web.Request) -> web.StreamResponse:
    """Return the OpenAPI document of the endpoints that are switched on."""
    document = make_document(request.app[ROUTES].surfaces, needs_keys=bool(request.app[API_KEYS]))
    return json_response(document)


def _describe_cache(app: web.Application) -> dict[str, Any]:
    engine = app[ENGINE]
    pinned = [asdict(prefix) for prefix in engine.list_pinned_prefixes()]
    return {"backend": app[CONFIG].cache.backend, **engine.read_cache_counts(), "pinned": pinned}


WARM_PATH = "/v1/cache/warm"
MAX_NAME = 100  # characters
WARM_BODY = BodySchema(
    {
        "body": {"type": "object", "description": "The body of a request whose prompt begins alike."},
        "url": {"type": "string", "description": f"Its endpoint: {', '.join(PREFIX_URLS)}."},
        "name": {"type": "string", "maxLength": MAX_NAME, "description": "What the prefix is listed as."},
    }
)


@count_from_arrival
async def warm_cache(request: web.Request) -> web.StreamResponse:
    """Compute the system prompt and the tools of a body, and pin them in the prefix cache."""
    given = WARM_BODY.check(await read_json(request))
    if "body" not in given:
        reject("body", "is required", code="missing_field")
    app, body = request.app, given["body"]
    check_message_counts(body, app[CONFIG].server.max_messages)
    engine = app[ENGINE]
    prefix = await prepare_prefix(
        given.get("url") or guess_url(body), body, engine.context, secrets.token_hex(12)
    )
    with app[LIVE_REQUESTS].open(request, "admin", prefix.prepared) as live:
        await collect_choices(live)
        pinned = await engine.client.pin_prefix(prefix.request, prefix.tokens, given.get("name", ""))
        seconds, cached = live.age, min(live.cached_tokens, prefix.tokens)
    if pinned is None:
        raise RequestError(
            "the prefix cache holds nothing of this prompt: it is off (cache.backend: none), it is too "
            "small, or the model's caches cannot be stored",
            code="not_cached",
        )
    work = {"prefix_tokens": prefix.tokens, "cached_tokens": cached, "seconds": round(seconds, 3)}
    return json_response({"pinned": asdict(pinned), **work})


async def unpin_prefix(request: web.Request) -> web.StreamResponse:
    """Make a pinned prefix an ordinary one, which is evicted when it was not used for long."""
    await read_empty_body(request)
    prefix_id = request.match_info["id"]
    if not await request.app[ENGINE].client.unpin_prefix(prefix_id):
        raise NotFound(f"there is no pinned prefix {prefix_id[:64]!r}; GET /v1/cache lists them")
    return json_response({"id": prefix_id, "unpinned": True})


HEALTH = Surface(
    "health",
    (
        Endpoint("GET", "/health", check_readiness, "Whether requests are served", public=True, engine=False),
        Endpoint("GET", "/health/ready", check_readiness, "The same as /health", public=True, engine=False),
        Endpoint(
            "GET", "/health/live", check_liveness, "Whether the engine is alive", public=True, engine=False
        ),
    ),
)
_READ = partial(Endpoint, "GET", engine=False, role="metrics")
SURFACE = Surface(
    "admin",
    (
        _READ("/v1/status", get_status, "Requests, engine, memory and cache"),
        _READ("/metrics", get_metrics, "Metrics for Prometheus"),
        Endpoint("POST", "/v1/requests/{id}/cancel", cancel_request, "End a running request", engine=False),
        _READ("/v1/cache", get_cache, "Counters of the prefix cache"),
        Endpoint("DELETE", "/v1/cache", clear_cache, "Clear the prefix cache", role="admin"),
        Endpoint("POST", "/v1/cache/clear", clear_cache, "Clear the prefix cache", role="admin"),
        Endpoint(
            "POST",
            WARM_PATH,
            warm_cache,
            "Compute a prompt's beginning, and pin it",
            WARM_BODY.schema,
            role="admin",
        ),
        Endpoint("DELETE", "/v1/cache/pinned/{id}", unpin_prefix, "Unpin a prompt's beginning", role="admin"),
        _READ(OPENAPI_PATH, get_openapi, "This document", role=None),
    ),
)
