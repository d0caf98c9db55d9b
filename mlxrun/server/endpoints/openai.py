"""OpenAI's models, chat completions and completions; api/openai reads the bodies and builds the responses."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import Any

from aiohttp import web

from mlxrun.api.anthropic.response import build_model, build_models_page
from mlxrun.api.openai.fields import BODIES, URLS
from mlxrun.api.openai.request import prepare_request
from mlxrun.api.openai.response import build_response
from mlxrun.api.openai.stream import ChunkWriter
from mlxrun.api.prepared import PreparedRequest
from mlxrun.api.text.model_info import ModelInfo, choose_adapter, list_names, name_model
from mlxrun.core.field_errors import reject
from mlxrun.server.batches.queue_access import read_body_with_files
from mlxrun.server.engine_state import ENGINE, list_modalities, list_tasks
from mlxrun.server.generation import collect_choices, stream_deltas
from mlxrun.server.http.access import CONFIG, CONFIG_HASH
from mlxrun.server.http.json_bodies import json_response
from mlxrun.server.http.sse import DONE, open_stream, wants_stream
from mlxrun.server.http.surface import Endpoint, Surface, is_anthropic
from mlxrun.server.live_requests import LIVE_REQUESTS, count_from_arrival

NAME = "openai"
_CREATED = int(time.time())  # `created` of the models: about when the server was started


@count_from_arrival
async def create_completion(request: web.Request) -> web.StreamResponse:
    """Answer a body of chat/completions or completions with one object, or with a stream of chunks."""
    body = await read_body_with_files(request)
    if wants_stream(body):
        return await _stream(request, body)
    prepared = await _prepare(request, body)
    with request.app[LIVE_REQUESTS].open(request, NAME, prepared) as live:
        choices = await collect_choices(live)
    made = (prepared, choices, prepared.name, int(time.time()), _make_fingerprint(request))
    if prepared.requests[0].params.prompt_logprobs is None:
        return json_response(build_response(*made))
    # The logprobs of a long prompt are a large object, which takes seconds to build and encode.
    return await asyncio.to_thread(lambda: json_response(build_response(*made)))


async def _prepare(request: web.Request, body: Any) -> PreparedRequest:
    prepared = await prepare_request(request.path, body, request.app[ENGINE].context, stream=True)
    count, most = len(prepared.requests), request.app[CONFIG].scheduler.max_queue
    if count > most:  # all choices wait at once: more than the queue holds would be refused at every try
        name = "n" if prepared.n > 1 else "prompt"  # one choice for each prompt, if no `n` was sent
        reject(name, f"{count} choices in one request are more than scheduler.max_queue ({most})")
    return prepared


async def _stream(request: web.Request, body: Any) -> web.StreamResponse:
    """After an error there is no [DONE]."""
    async with open_stream(request) as events:
        prepared = await _prepare(request, body)
        chunks = ChunkWriter(prepared, prepared.name, int(time.time()), _make_fingerprint(request))
        with request.app[LIVE_REQUESTS].open(request, NAME, prepared) as events.live:
            async with aclosing(stream_deltas(events.live)) as stream:
                async for choice, deltas in stream:
                    for chunk in chunks.write(choice, deltas):
                        await events.send(chunk)
            if prepared.include_usage:
                await events.send(chunks.write_usage())
            await events.send(DONE)
    return events.response


def _make_fingerprint(request: web.Request) -> str:
    return f"fp_{request.app[CONFIG_HASH][:10]}"


async def list_models(request: web.Request) -> web.Response:
    """List the names of the model, for clients of both APIs."""
    engine = request.app[ENGINE]
    names = list_names(engine.model)
    if is_anthropic(request):
        return json_response(build_models_page(names))
    return json_response({"object": "list", "data": [describe_listed(name, engine.model) for name in names]})


async def get_model(request: web.Request) -> web.Response:
    """Describe the model by one of its names, for clients of both APIs. If the config has no names, every
    name is accepted, and the real one is returned. NotFound for a name that is not served."""
    engine = request.app[ENGINE]
    name = "/".join(request.match_info.values())
    adapter = choose_adapter(name, engine.model)
    known = name if name in list_names(engine.model) else name_model(engine.model, adapter)
    if is_anthropic(request):
        return json_response(build_model(known))
    return json_response(describe_listed(known, engine.model))


def describe_listed(name: str, model: ModelInfo) -> dict[str, Any]:
    """Describe a model, by one of its names, as /v1/models lists it."""
    adapted = choose_adapter(name, model) is not None
    return {
        "id": name,
        "object": "model",
        "created": _CREATED,
        "owned_by": "mlxrun",
        "max_model_len": model.context_length,
        "tasks": list_tasks(model),
        "input_modalities": list_modalities(model),
        **({"parent": model.name} if adapted else {}),
    }


SURFACE = Surface(
    NAME,
    (
        Endpoint("GET", "/v1/models", list_models, "List the names of the served model"),
        Endpoint("GET", "/v1/models/{id}", get_model, "Describe the served model by one of its names"),
        Endpoint(
            "GET",
            "/v1/models/{owner}/{id}",
            get_model,
            "Describe the served model by a name that has a slash",
        ),
        *(
            Endpoint(
                "POST", url, create_completion, f"Answer a {of}, at once or as a stream", BODIES[of].schema
            )
            for url, of in URLS.items()
        ),
    ),
)
