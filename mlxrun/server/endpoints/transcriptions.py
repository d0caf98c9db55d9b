"""OpenAI's /v1/audio/transcriptions; api/openai/transcription.py reads bodies and builds responses."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from aiohttp import web

from mlxrun.api.openai.transcription import (
    LISTS,
    TRANSCRIPTION,
    TRANSCRIPTION_URL,
    find_speech_model,
    prepare_transcription,
    read_form_fields,
)
from mlxrun.core.errors import Cancelled, MlxrunError
from mlxrun.core.request import FinishReason
from mlxrun.core.transcription import Transcript
from mlxrun.server.engine_state import ENGINE
from mlxrun.server.http.access import CONFIG
from mlxrun.server.http.forms import FILE, FILE_TYPE, FormFile, read_form
from mlxrun.server.http.json_bodies import json_response
from mlxrun.server.http.sse import open_stream, wants_stream
from mlxrun.server.http.surface import Endpoint, Surface
from mlxrun.server.live_requests import LIVE_REQUESTS, LiveRequest, count_from_arrival

NAME = "transcriptions"
_MAX_PROMPT = 10_000  # bytes of a field; the model uses the last 223 tokens of a prompt
_FIELDS = tuple(TRANSCRIPTION.schema["properties"].keys() - {*LISTS, FILE})


@count_from_arrival
async def create_transcription(request: web.Request) -> web.StreamResponse:
    """Answer a form with the transcript of its file, at once or as a stream of events."""
    app = request.app
    context = app[ENGINE].context
    find_speech_model(context.model_info)  # before the file is received
    file = FormFile(app[CONFIG].media.audio_max_bytes, "media.audio_max_bytes")
    fields, several = await read_form(request, _FIELDS, file.receive, lists=LISTS, max_field=_MAX_PROMPT)
    fields.pop(FILE_TYPE, None)
    body = read_form_fields({**fields, **several})
    if wants_stream(body):
        return await _stream(request, body, file.take())
    async with prepare_transcription(body, context, file.take()) as prepared:
        with app[LIVE_REQUESTS].open(request, NAME, prepared.prepared) as live:
            whole = Transcript()
            async with aclosing(_read_parts(live)) as parts:
                async for part in parts:
                    whole = whole.join(part)
    made = prepared.build(whole)
    if isinstance(made, str):
        return web.Response(text=made, content_type="text/plain", charset="utf-8")
    return json_response(made)


async def _stream(request: web.Request, body: Mapping[str, Any], data: bytes | None) -> web.StreamResponse:
    app, whole = request.app, Transcript()
    async with (
        open_stream(request) as events,
        prepare_transcription(body, app[ENGINE].context, data) as prepared,
    ):
        with app[LIVE_REQUESTS].open(request, NAME, prepared.prepared) as events.live:
            async with aclosing(_read_parts(events.live)) as parts:
                async for part in parts:
                    whole = whole.join(part)
                    if part.text:
                        await events.send(prepared.write_delta(part))
            await events.send(prepared.write_end(whole))
    return events.response


async def _read_parts(live: LiveRequest) -> AsyncGenerator[Transcript, None]:
    """The parts of the transcript as they come. Raises the engine's errors."""
    (wanted,) = live.prepared.requests
    try:
        with live.run_choice(wanted.id):
            async with aclosing(live.engine.client.generate(wanted)) as events:
                async for event in events:
                    live.record(0, event)
                    yield event.transcript
                    if event.finish is FinishReason.STOP:
                        return
    except MlxrunError as error:
        live.error = error
        raise
    raise Cancelled("the request was cancelled")


SURFACE = Surface(
    NAME,
    (
        Endpoint(
            "POST",
            TRANSCRIPTION_URL,
            create_transcription,
            "Transcribe a sound, at once or as a stream",
            TRANSCRIPTION.schema,
            max_body=sys.maxsize,  # `FormFile` counts as it reads
            is_form=True,
        ),
    ),
    lacking={
        "/v1/audio/translations": "sound is transcribed in its own language only",
        "/v1/audio/speech": "no model here speaks",
    },
)
