"""The response bodies of lines: each is what the endpoint of its URL would answer.

The API packages check a line, build its prompt and write its answer, as they do for the server. Ids are made
of the line's key. Times are the batch's creation. A command's answers have time 0 and no counts of cached
tokens, so that they can be compared. Answers are not stored, and a line that continues a stored response is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from mlxrun.api.anthropic import request as messages
from mlxrun.api.anthropic.response import MessageWriter
from mlxrun.api.choice import Choice
from mlxrun.api.openai import request as chats
from mlxrun.api.openai import response as openai
from mlxrun.api.openai.pooled import prepare_pooling
from mlxrun.api.openai.transcription import check_transcription_line, prepare_transcription
from mlxrun.api.parsers.delta import Delta
from mlxrun.api.prepared import ApiContext, PreparedRequest
from mlxrun.api.responses import request as responses
from mlxrun.api.responses.stream import ResponseWriter, build_response
from mlxrun.api.stored_files import ReadFile, inline_files
from mlxrun.core.field_errors import reject_unsupported
from mlxrun.core.transcription import Transcript
from mlxrun.jobs.lines.job_file import MAX_LINE, MESSAGE, POOLED, RESPONSE, TRANSCRIPTION, JobLine
from mlxrun.jobs.records.output_records import CREATED, BatchStamp, make_request_id

Json = dict[str, Any]

_STORED = ("previous_response_id", "conversation")  # fields that name what only a server stores


@dataclass(frozen=True, slots=True)
class LineBody:
    """A prepared line and its growing answer. `feed`: adds the next deltas of a choice, the ending ones once;
    `build`: makes the response body once all choices have ended."""

    prepared: PreparedRequest
    feed: Callable[[Choice, Sequence[Delta]], object]
    build: Callable[[], Json]


@dataclass(frozen=True, slots=True)
class PooledBody:
    """Embeddings of texts, or relevance of documents. `build`: makes the response body from the vectors of
    all requests."""

    prepared: PreparedRequest
    build: Callable[[Sequence[bytes]], Json]


@dataclass(frozen=True, slots=True)
class TranscriptBody:
    """A transcript of a recording. `build`: makes the response body from the whole transcript; `held`: what
    the recording holds in memory until it is closed."""

    prepared: PreparedRequest
    build: Callable[[Transcript], Json]
    held: AsyncExitStack


Body = LineBody | PooledBody | TranscriptBody


async def prepare_line(
    line: JobLine,
    key: str,
    context: ApiContext,
    *,
    default_max_tokens: int | None,
    read_file: ReadFile | None = None,
    stamp: BatchStamp | None = None,
) -> Body:
    """Check a line and build its prompts. RequestError if its body is refused. `key`: the line's key;
    `read_file`: reads the files that its body may name, None if it may name none; `stamp`: the stamp of its
    batch."""
    body = line.body
    if read_file is not None:
        body = await inline_files(body, read_file, MAX_LINE)
    if line.url == MESSAGE:
        # A line has no headers, so it may use what clients switch on by one.
        message = await messages.prepare_message(body, context, interleaved=True)
        return _make_message_body(message, MessageWriter(message, f"msg_{key[:24]}"))
    if line.url in POOLED:
        pooling = await prepare_pooling(line.url, body, context)
        return PooledBody(pooling.prepared, lambda vectors: pooling.build(vectors, key[:24]))
    if line.url == TRANSCRIPTION:
        return await _prepare_transcript(body, context)
    if line.url == RESPONSE:
        created = CREATED if stamp is None else stamp.created_at
        return await _prepare_response(body, key, context, default_max_tokens, created)
    prepared = await chats.prepare_request(line.url, body, context, default_max_tokens=default_max_tokens)
    return _make_choices_body(prepared, key, stamp)


async def _prepare_transcript(body: Json, context: ApiContext) -> TranscriptBody:
    check_transcription_line(body)
    async with AsyncExitStack() as held:
        made = await held.enter_async_context(prepare_transcription(body, context))

        def build(transcript: Transcript) -> Json:
            found = made.build(transcript)
            assert isinstance(found, dict), "texts are refused"
            return found

        return TranscriptBody(made.prepared, build, held.pop_all())


def _make_choices_body(prepared: PreparedRequest, key: str, stamp: BatchStamp | None) -> LineBody:
    """A chat completion or a completion."""
    choices: dict[int, Choice] = {}

    def build() -> Json:
        created = CREATED if stamp is None else stamp.created_at
        found = [choices[index] for index in sorted(choices)]
        body = openai.build_response(prepared, found, make_request_id(key), created)
        if stamp is None:
            details = body["usage"].pop("prompt_tokens_details")
            if "left_out_tokens" in details:  # by sparse prefill, which makes another answer
                body["usage"]["prompt_tokens_details"] = {"left_out_tokens": details["left_out_tokens"]}
        return body

    return LineBody(prepared, lambda choice, _: choices.update({choice.index: choice}), build)


def _make_message_body(message: messages.PreparedMessage, writer: MessageWriter) -> LineBody:
    """A message of Anthropic's API, which has one choice."""
    choices: list[Choice] = []

    def feed(choice: Choice, deltas: Sequence[Delta]) -> None:
        choices[:] = [choice]
        writer.feed(choice, deltas)

    return LineBody(message.prepared, feed, lambda: writer.build_message(*choices))


async def _prepare_response(
    body: Json, key: str, context: ApiContext, default_max_tokens: int | None, created: int
) -> LineBody:
    """A response of OpenAI's /v1/responses."""
    for name in _STORED:
        if body.get(name) is not None:
            reject_unsupported(name, "a job has no stored responses; send all items in `input`")
    request, prepared = await responses.prepare_response(
        body, context, responses.ResponseLookup(), key, default_max_tokens=default_max_tokens
    )
    response = build_response(f"resp_{key}", created, request, prepared)
    writer = ResponseWriter({**response, "store": False, "background": False}, request, prepared)

    def feed(choice: Choice, deltas: Sequence[Delta]) -> None:
        writer.choice = choice
        writer.feed(deltas)

    def build() -> Json:
        writer.end(created)
        return writer.response

    return LineBody(prepared, feed, build)
