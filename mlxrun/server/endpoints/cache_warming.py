"""Computes the beginning of a prompt ahead, and pins it in the prefix cache. Part of the surface `admin`."""

from __future__ import annotations

import secrets
from dataclasses import asdict

from aiohttp import web

from mlxrun.api.body_schema import BodySchema
from mlxrun.api.prepared import check_message_counts
from mlxrun.api.prompt_prefix import PREFIX_URLS, guess_url, prepare_prefix
from mlxrun.core.errors import NotFound, RequestError
from mlxrun.core.field_errors import reject
from mlxrun.server.engine_state import ENGINE
from mlxrun.server.generation import collect_choices
from mlxrun.server.http.access import CONFIG
from mlxrun.server.http.json_bodies import json_response, read_empty_body, read_json
from mlxrun.server.live_requests import LIVE_REQUESTS

WARM_PATH = "/v1/cache/warm"
MAX_NAME = 100  # characters
WARM_BODY = BodySchema(
    {
        "body": {"type": "object", "description": "The body of a request whose prompt begins alike."},
        "url": {"type": "string", "description": f"Its endpoint: {', '.join(PREFIX_URLS)}."},
        "name": {"type": "string", "maxLength": MAX_NAME, "description": "What the prefix is listed as."},
    }
)


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
