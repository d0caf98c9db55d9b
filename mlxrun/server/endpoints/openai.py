"""OpenAI's models, chat/completions and completions: bodies go to api/openai/request.py, answers come from there."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from mlxrun.api.anthropic.request import models_page
from mlxrun.api.openai.fields import BODIES, URLS
from mlxrun.api.openai.request import check_model, error_body, prepare, response_body
from mlxrun.api.openai.stream import Chunks
from mlxrun.errors import MlxrunError
from mlxrun.server.generation import answers, whole
from mlxrun.server.request_body import json_reply, read_json
from mlxrun.server.sse import EventStream
from mlxrun.server.surface import Endpoint, Surface
from mlxrun.text.field_errors import bad

if TYPE_CHECKING:
    from aiohttp import web

    from mlxrun.api.prepared import PreparedRequest
    from mlxrun.server.live_requests import LiveRequest
    from mlxrun.server.state import Server

DONE = "[DONE]"
_BORN = int(time.time())  # when the model began to be served, about


async def complete(request: web.Request, server: Server) -> web.StreamResponse:
    """Answers a body of chat/completions or completions: one object, or a stream of chunks."""
    body = await read_json(request, server)
    prepared = await prepare(request.path, body, server.side, stream=True)
    _check_count(prepared, server.config.scheduler.max_queue)
    with server.live.open(request, "openai", prepared) as live:
        if prepared.stream:
            return await _stream(request, server, live, prepared)
        choices = await whole(server, live, prepared)
    made = response_body(prepared, choices, _id(prepared), int(time.time()), server.fingerprint)
    return json_reply(made)


def _check_count(prepared: PreparedRequest, most: int) -> None:
    """All answers of a request wait at once: more than the queue holds would be refused at every try."""
    count = len(prepared.requests)
    if count > most:
        name = "n" if prepared.n > 1 else "prompt"  # as many answers as prompts, where no `n` was sent
        raise bad(name, f"{count} answers in one request are more than scheduler.max_queue ({most})")


async def _stream(
    request: web.Request, server: Server, live: LiveRequest, prepared: PreparedRequest
) -> web.StreamResponse:
    """An error before the first chunk has its own status; a later one is the last event, without [DONE]."""
    chunks = Chunks(prepared, _id(prepared), int(time.time()), server.fingerprint)
    async with EventStream(request, server, live) as events:
        try:
            async with aclosing(answers(server, live, prepared)) as pieces:
                async for choice, deltas in pieces:
                    for chunk in chunks.of(choice, deltas):
                        await events.send(chunk)
        except MlxrunError as error:
            if not events.started:
                raise
            await events.send(error_body(error))
            return events.response
        if prepared.include_usage:
            await events.send(chunks.usage())
        await events.send(DONE)
    return events.response


def _id(prepared: PreparedRequest) -> str:
    """What the engine's requests of this one have in common."""
    return prepared.requests[0].id.rpartition("-")[0]


async def models(request: web.Request, server: Server) -> web.Response:
    """What is served, under each of its names. Anthropic's clients ask at the same path."""
    names = server.model_names()
    if "anthropic-version" in request.headers:
        return json_reply(models_page(names))
    return json_reply({"object": "list", "data": [_model(name, server) for name in names]})


async def model(request: web.Request, server: Server) -> web.Response:
    """One name. If the config has no names any will do, and what comes back says which model it is."""
    name = "/".join(request.match_info.values())
    check_model(name, server.host)
    return json_reply(_model(name if name in server.model_names() else server.host.name, server))


def _model(name: str, server: Server) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": _BORN,
        "owned_by": "mlxrun",
        "max_model_len": server.host.context_length,
    }


SURFACE = Surface(
    "openai",
    (
        Endpoint("GET", "/v1/models", models, "The names of the model"),
        Endpoint("GET", "/v1/models/{id}", model, "One name of the model"),
        Endpoint("GET", "/v1/models/{owner}/{id}", model, "The same, of a name with a slash"),
        *(
            Endpoint("POST", url, complete, f"Answer a {of}, whole or as a stream", BODIES[of].schema)
            for url, of in URLS.items()
        ),
    ),
)
