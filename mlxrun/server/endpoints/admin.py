"""What an operator asks: is it healthy, what runs, what does it cost; and what an operator can do.

/health is there always and needs no key; the rest is the surface `admin`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aiohttp import web

from mlxrun import __version__
from mlxrun.errors import EngineDead, MlxrunError, NotFound
from mlxrun.server.batches.files import mine
from mlxrun.server.openapi import document
from mlxrun.server.request_body import json_reply, read_nothing
from mlxrun.server.surface import Endpoint, Surface

if TYPE_CHECKING:
    from mlxrun.server.state import Server

_STATUS = {"loading": "loading", "shutting_down": "draining", "engine_unavailable": "dead"}


async def health(request: web.Request, server: Server) -> web.StreamResponse:
    """Whether requests are served: 503 while the model loads, during a shutdown, and once the engine died."""
    return _health(server.trouble())


async def alive(request: web.Request, server: Server) -> web.StreamResponse:
    """Whether the process is worth keeping: 503 only once the engine has died."""
    trouble = server.trouble()
    return _health(trouble if isinstance(trouble, EngineDead) else None)


def _health(trouble: MlxrunError | None) -> web.Response:
    body: dict[str, Any] = {"status": "ok", "version": __version__}
    if trouble is None:
        return json_reply(body)
    body["status"] = _STATUS.get(trouble.code, trouble.code)
    body["reason"] = str(trouble)
    headers = {"Retry-After": str(trouble.retry_after)} if trouble.retry_after is not None else None
    return json_reply(body, trouble.http_status, headers)


async def status(request: web.Request, server: Server) -> web.StreamResponse:
    """Each request with its phase, and what engine, memory and cache are at."""
    stats = dict(await server.read_stats())
    background = {name: stats.pop(name) for name in ("running", "waiting", "background")}["background"]
    trouble, age = server.trouble(), server.stats_age
    rows = [live.describe() for live in server.live]
    return json_reply(
        {
            "status": "ok" if trouble is None else _STATUS.get(trouble.code, trouble.code),
            "version": __version__,
            "uptime": round(server.clock() - server.started, 3),
            "config_hash": server.digest,
            "model": server.model_facts(),
            "requests": rows,
            "queue": {**_queue([row["phase"] for row in rows]), "background": background},
            "limits": server.limits(),
            "batches": server.batches(),
            "files": server.files(),
            "cache": _cache(server),
            "age": None if age is None else round(age, 3),
            **stats,
            **server.facts,
        }
    )


def _queue(phases: Sequence[str]) -> dict[str, int]:
    """Clients' requests by phase, and summed up. All from the same table, so that they agree."""
    queued, prefill, decode = (phases.count(phase) for phase in ("queued", "prefill", "decode"))
    return {
        "queued": queued,
        "prefill": prefill,
        "decode": decode,
        "running": prefill + decode,
        "waiting": queued,
    }


async def metrics(request: web.Request, server: Server) -> web.StreamResponse:
    """Prometheus' text format."""
    await server.read_stats()
    headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
    return web.Response(body=server.metrics.text(), headers=headers)


async def cancel(request: web.Request, server: Server) -> web.StreamResponse:
    """Ends a request that is under way; another key's is as one that is not there."""
    await read_nothing(request, server)
    rid = request.match_info["id"]
    live = server.live.get(rid)
    if live is None or not mine(request, live.key_name) or not server.live.cancel(rid):
        raise NotFound(f"no request {rid[:128]!r} is under way")
    return json_reply({"id": rid, "cancelled": True})


async def cache(request: web.Request, server: Server) -> web.StreamResponse:
    """What the prefix cache holds, and what it did."""
    return json_reply(_cache(server))


async def clear(request: web.Request, server: Server) -> web.StreamResponse:
    """Forgets all prefixes that no running request uses."""
    await read_nothing(request, server)
    before = dict(server.cache_counts())
    await server.client.clear_cache()
    after = dict(server.cache_counts())
    freed = {
        name: before.get(name, 0) - after.get(name, 0) for name in ("records", "memory_bytes", "disk_bytes")
    }
    return json_reply({"cleared": True, "freed": freed, "cache": _cache(server)})


async def openapi(request: web.Request, server: Server) -> web.StreamResponse:
    """The OpenAPI document of what is switched on."""
    return json_reply(document(server.surfaces, keys=bool(server.keys)))


def _cache(server: Server) -> dict[str, Any]:
    return {"backend": server.config.cache.backend, **server.cache_counts()}


HEALTH = Surface(
    "health",
    (
        Endpoint("GET", "/health", health, "Whether requests are served", public=True, engine=False),
        Endpoint("GET", "/health/ready", health, "The same", public=True, engine=False),
        Endpoint("GET", "/health/live", alive, "Whether the process is of use", public=True, engine=False),
    ),
)
SURFACE = Surface(
    "admin",
    (
        Endpoint("GET", "/v1/status", status, "What runs, and what it costs", engine=False),
        Endpoint("GET", "/metrics", metrics, "Metrics for Prometheus", engine=False),
        Endpoint("POST", "/v1/requests/{id}/cancel", cancel, "End a running request", engine=False),
        Endpoint("GET", "/v1/cache", cache, "Counters of the prefix cache", engine=False),
        Endpoint("DELETE", "/v1/cache", clear, "Clear the prefix cache"),
        Endpoint("POST", "/v1/cache/clear", clear, "Clear the prefix cache"),
        Endpoint("GET", "/openapi.json", openapi, "This interface", engine=False),
    ),
)
