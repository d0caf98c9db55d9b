"""Ollama's API for the served model; api/ollama reads the bodies and builds the responses.

The model is chosen when the server starts. So what loads, changes or removes models in Ollama is refused.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

from aiohttp import web

from mlxrun import __version__
from mlxrun.api.ollama.fields import BODIES, CHAT_PATH, EMBED_PATH, GENERATE_PATH, OLD_EMBED_PATH, SHOW_PATH
from mlxrun.api.ollama.request import check_model, prepare_answer, prepare_embeddings
from mlxrun.api.ollama.response import (
    AnswerTimes,
    OllamaWriter,
    build_embeddings,
    build_error,
    describe_model,
    list_loaded,
    list_tags,
)
from mlxrun.api.prepared import PreparedRequest
from mlxrun.server.endpoints.embeddings import collect_vectors
from mlxrun.server.engine_state import ENGINE
from mlxrun.server.generation import collect_choices, stream_deltas
from mlxrun.server.http.json_bodies import json_response, read_json
from mlxrun.server.http.sse import LineStream, open_stream, wants_stream
from mlxrun.server.http.surface import Endpoint, Surface
from mlxrun.server.live_requests import LIVE_REQUESTS, LiveRequest, count_from_arrival

NAME = "ollama"
API_VERSION = "0.32.15"  # of Ollama: clients compare it with the one that they need
_ONE_MODEL = "the model is chosen when the server starts; `mlxrun pull` downloads one"
_KEPT = "models are not removed by requests; `mlxrun rm` removes one from this machine"


@count_from_arrival
async def create_answer(request: web.Request) -> web.StreamResponse:
    """Answer a conversation or a prompt with a stream of lines, or with one object."""
    started = request.app[ENGINE].clock()
    body = await read_json(request)
    if wants_stream(body, usually=True):
        return await _stream(request, body, started)
    prepared = await prepare_answer(request.path, body, request.app[ENGINE].context)
    writer = _make_writer(request, prepared)
    if prepared is None:
        return json_response(writer.write_load())
    with request.app[LIVE_REQUESTS].open(request, NAME, prepared) as live:
        (choice,) = await collect_choices(live)
        return json_response(writer.build_answer(choice, _measure(live, started)))


def _make_writer(request: web.Request, prepared: PreparedRequest | None = None) -> OllamaWriter:
    is_chat = request.path == CHAT_PATH
    if prepared is None:
        return OllamaWriter(request.app[ENGINE].model.name, 0, is_chat=is_chat)
    return OllamaWriter(
        prepared.model, prepared.prompt_tokens, is_chat=is_chat, has_logprobs=prepared.has_logprobs
    )


async def _stream(request: web.Request, body: Any, started: float) -> web.StreamResponse:
    writer = _make_writer(request)
    async with open_stream(request, ping=lambda: (None, writer.write_ping()), kind=LineStream) as lines:
        prepared = await prepare_answer(request.path, body, request.app[ENGINE].context)
        if prepared is None:
            return json_response(writer.write_load())
        writer = _make_writer(request, prepared)
        with request.app[LIVE_REQUESTS].open(request, NAME, prepared) as lines.live:
            async with aclosing(stream_deltas(lines.live)) as stream:
                async for choice, deltas in stream:
                    for line in writer.feed(choice, deltas):
                        await lines.send(line)
            await lines.send(writer.write_last(choice, _measure(lines.live, started)))
    return lines.response


def _measure(live: LiveRequest, started: float) -> AnswerTimes:
    """The times of an answer that has ended. Its first token is computed together with the prompt: it has its
    share of that time, without which an answer of one token would take none."""
    _, prefill, decode = live.measure_phases()
    total, prefill = live.engine.clock() - started, prefill or 0.0
    if decode is None:
        return AnswerTimes(total, prefill, 0.0)
    first = prefill / (max(live.prompt_tokens - live.cached_tokens, 0) + 1)
    return AnswerTimes(total, prefill - first, first + decode)


@count_from_arrival
async def create_embeddings(request: web.Request) -> web.Response:
    """Answer texts with their embeddings. Without a text there is none."""
    engine = request.app[ENGINE]
    started = engine.clock()
    pooling = await prepare_embeddings(request.path, await read_json(request), engine.context)
    if pooling is None:
        vectors, tokens = [], 0
    else:
        with request.app[LIVE_REQUESTS].open(request, NAME, pooling.prepared) as live:
            found = await collect_vectors(live)
        built = await asyncio.to_thread(pooling.build, found, "")
        vectors, tokens = [each["embedding"] for each in built["data"]], pooling.prepared.prompt_tokens
    if request.path == OLD_EMBED_PATH:
        return json_response({"embedding": vectors[0] if vectors else []})
    seconds = engine.clock() - started
    name = engine.model.name
    return await asyncio.to_thread(lambda: json_response(build_embeddings(name, vectors, tokens, seconds)))


async def list_models(request: web.Request) -> web.Response:
    """List the names of the served model."""
    return json_response(await asyncio.to_thread(list_tags, request.app[ENGINE].model))


async def list_running(request: web.Request) -> web.Response:
    """Describe the model if it is loaded."""
    return json_response(await asyncio.to_thread(list_loaded, request.app[ENGINE].find_model()))


async def show_model(request: web.Request) -> web.Response:
    """Describe the served model by one of its names."""
    context = request.app[ENGINE].context
    given = BODIES[SHOW_PATH].check(await read_json(request), strict=context.config.server.strict_fields)
    check_model(given.get("model") or given.get("name"), context.model_info)
    return json_response(await asyncio.to_thread(describe_model, context))


async def get_version(request: web.Request) -> web.Response:
    """Return the version of Ollama whose API this is."""
    return json_response({"version": API_VERSION, "mlxrun": __version__})


async def say_running(request: web.Request) -> web.Response:
    """Answer the question whether a server is there, in Ollama's words."""
    return web.Response(text="Ollama is running")


SURFACE = Surface(
    NAME,
    (
        Endpoint("POST", CHAT_PATH, create_answer, "Answer a conversation", BODIES[CHAT_PATH].schema),
        Endpoint("POST", GENERATE_PATH, create_answer, "Answer a prompt", BODIES[GENERATE_PATH].schema),
        Endpoint("POST", EMBED_PATH, create_embeddings, "Embed texts", BODIES[EMBED_PATH].schema),
        Endpoint("POST", OLD_EMBED_PATH, create_embeddings, "Embed a text", BODIES[OLD_EMBED_PATH].schema),
        Endpoint("GET", "/api/tags", list_models, "List the names of the served model"),
        Endpoint("GET", "/api/ps", list_running, "Describe the loaded model", engine=False),
        Endpoint("POST", SHOW_PATH, show_model, "Describe the model in detail", BODIES[SHOW_PATH].schema),
        Endpoint("GET", "/api/version", get_version, "The version of Ollama's API", engine=False),
        Endpoint("GET", "/", say_running, "Whether the server runs", public=True, engine=False),
    ),
    lambda error, request_id: build_error(error),
    error_event=lambda error, request_id: (None, build_error(error)),
    lacking={
        **dict.fromkeys(("/api/pull", "/api/create", "/api/copy"), _ONE_MODEL),
        "/api/delete": _KEPT,
        "/api/push": "models are not uploaded",
        "/api/blobs/{digest}": "models are not uploaded",
    },
)
