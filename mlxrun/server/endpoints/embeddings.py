"""/v1/embeddings, /v1/rerank and /v1/score.

api/openai/pooled.py reads the bodies and builds the responses.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from aiohttp import web

from mlxrun.api.openai.pooled import (
    EMBEDDING,
    EMBEDDING_URL,
    POOLED_BODIES,
    POOLING_ALIASES,
    RELEVANCE,
    RELEVANCE_URL,
    RERANK,
    RERANK_URL,
    RERANK_V2_URL,
    prepare_pooling,
)
from mlxrun.core.errors import Cancelled, MlxrunError
from mlxrun.core.request import Request
from mlxrun.core.workers import run_together
from mlxrun.server.engine_state import ENGINE
from mlxrun.server.http.json_bodies import json_response, read_json
from mlxrun.server.http.surface import Endpoint, Surface
from mlxrun.server.live_requests import LIVE_REQUESTS, LiveRequest, count_from_arrival

IN_FLIGHT = 256  # texts of one request that wait in the engine at once


@count_from_arrival
async def create_vectors(request: web.Request) -> web.Response:
    """Answer a body with the embeddings of its texts, or with the scores of its pairs of texts."""
    app = request.app
    body = await read_json(request)
    url = POOLING_ALIASES.get(request.path, request.path)
    pooling = await prepare_pooling(url, body, app[ENGINE].context)
    with app[LIVE_REQUESTS].open(request, "embeddings", pooling.prepared) as live:
        vectors = await collect_vectors(live)
    return await asyncio.to_thread(lambda: json_response(pooling.build(vectors, pooling.prepared.name)))


async def collect_vectors(live: LiveRequest) -> list[bytes]:
    """Compute the vectors of all texts of a request. The first error of the engine is raised, and aborts the
    other texts."""
    slots = asyncio.Semaphore(min(IN_FLIGHT, live.config.scheduler.max_queue))

    async def compute(index: int, request: Request) -> bytes:
        async with slots:
            with live.run_choice(request.id):
                async with aclosing(live.engine.client.generate(request)) as events:
                    async for event in events:
                        live.record(index, event)
                        if event.vector:
                            return event.vector
        raise Cancelled("the request was cancelled")

    try:
        return await run_together(compute(*pair) for pair in enumerate(live.prepared.requests))
    except MlxrunError as error:
        live.error = error
        raise


SURFACE = Surface(
    "embeddings",
    (
        Endpoint("POST", EMBEDDING_URL, create_vectors, "Embed texts", EMBEDDING.schema),
        Endpoint("POST", RERANK_URL, create_vectors, "Score documents by a query", RERANK.schema),
        Endpoint("POST", RERANK_V2_URL, create_vectors, "The same, in Cohere's second form", RERANK.schema),
        Endpoint("POST", RELEVANCE_URL, create_vectors, "Score pairs of texts", RELEVANCE.schema),
        *(
            Endpoint("POST", alias, create_vectors, f"The same as {url}", POOLED_BODIES[url].schema)
            for alias, url in POOLING_ALIASES.items()
        ),
    ),
)
