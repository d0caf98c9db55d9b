"""The response bodies of lines, each as the endpoint of its URL would answer the line's body.

The API packages check a line, build its prompt and write its answer, as they do for the server. Ids are made
of the line's key. Times are when the batch was created, or 0 for a command, whose answers have no counts of
cached tokens either, so that they can be compared. There is no client and no store: answers
are not stored, and a line that continues a stored response is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from mlxrun.api.anthropic import request as messages
from mlxrun.api.anthropic.file_sources import inline_files
from mlxrun.api.anthropic.stream import MessageWriter
from mlxrun.api.choice import Choice
from mlxrun.api.openai import request as chats
from mlxrun.api.openai import response as openai
from mlxrun.api.openai.pooled import PreparedPooling, prepare_pooling
from mlxrun.api.parsers.delta import Delta
from mlxrun.api.prepared import ApiContext, PreparedRequest
from mlxrun.api.responses import request as responses
from mlxrun.api.responses.response import build_response
from mlxrun.api.responses.stream import ResponseWriter
from mlxrun.api.stored_files import ReadFile, inline_file_parts
from mlxrun.core.field_errors import reject_unsupported
from mlxrun.jobs.lines.job_file import MAX_LINE, MESSAGE, POOLED, RESPONSE, JobLine
from mlxrun.jobs.records.output_records import CREATED, BatchStamp, make_request_id

Json = dict[str, Any]

_STORED = ("previous_response_id", "conversation")  # fields that name what only a server stores


class LineBody(Protocol):
    """A prepared line and its answer as it grows."""

    prepared: PreparedRequest

    def feed(self, choice: Choice, deltas: Sequence[Delta]) -> object:
        """Add the next deltas of a choice; those that end the choice once."""

    def build(self) -> Json:
        """The response body, once all choices have ended."""


async def prepare_line(
    line: JobLine,
    key: str,
    context: ApiContext,
    *,
    default_max_tokens: int | None,
    read_file: ReadFile | None = None,
    stamp: BatchStamp | None = None,
) -> LineBody | PooledBody:
    """Check a line and build its prompts; RequestError if its body is refused. `key`: of the line;
    `read_file`: reads the files that its body may name, None if it may name none; `stamp`: of its batch."""
    body = line.body
    if read_file is not None:
        inline = inline_files if line.url == MESSAGE else inline_file_parts
        body = await inline(body, read_file, MAX_LINE)
    if line.url == MESSAGE:
        # A line has no headers, so it may use what clients switch on by one.
        message = await messages.prepare_message(body, context, interleaved=True)
        return _MessageBody(message, key)
    if line.url in POOLED:
        return PooledBody(await prepare_pooling(line.url, body, context), key)
    if line.url == RESPONSE:
        created = CREATED if stamp is None else stamp.created_at
        return await _ResponseBody.prepare(body, key, context, default_max_tokens, created)
    prepared = await chats.prepare_request(line.url, body, context, default_max_tokens=default_max_tokens)
    return _ChoicesBody(prepared, key, stamp)


class PooledBody:
    """Embeddings of texts, or scores of documents."""

    def __init__(self, pooling: PreparedPooling, key: str) -> None:
        self.prepared = pooling.prepared
        self._pooling = pooling
        self._key = key

    def build(self, vectors: Sequence[bytes]) -> Json:
        """The response body with the vector of each request."""
        return self._pooling.build(vectors, self._key[:24])


class _ChoicesBody:
    """A chat completion or a completion."""

    def __init__(self, prepared: PreparedRequest, key: str, stamp: BatchStamp | None) -> None:
        self.prepared = prepared
        self._key = key
        self._stamp = stamp
        self._choices: dict[int, Choice] = {}

    def feed(self, choice: Choice, deltas: Sequence[Delta]) -> None:
        self._choices[choice.index] = choice

    def build(self) -> Json:
        choices = [self._choices[index] for index in sorted(self._choices)]
        created = CREATED if self._stamp is None else self._stamp.created_at
        body = openai.build_response(self.prepared, choices, make_request_id(self._key), created)
        if self._stamp is None:
            details = body["usage"].pop("prompt_tokens_details")
            if "left_out_tokens" in details:  # by sparse prefill, which makes another answer
                body["usage"]["prompt_tokens_details"] = {"left_out_tokens": details["left_out_tokens"]}
        return body


class _MessageBody:
    """A message of Anthropic's API."""

    def __init__(self, message: messages.PreparedMessage, key: str) -> None:
        self.prepared = message.prepared
        self._writer = MessageWriter(message, f"msg_{key[:24]}")
        self._choice: Choice | None = None

    def feed(self, choice: Choice, deltas: Sequence[Delta]) -> None:
        self._choice = choice
        self._writer.feed(choice, deltas)

    def build(self) -> Json:
        assert self._choice is not None
        return self._writer.build_message(self._choice)


class _ResponseBody:
    """A response of OpenAI's /v1/responses."""

    def __init__(
        self, request: responses.ResponseRequest, prepared: PreparedRequest, key: str, created: int
    ) -> None:
        self.prepared = prepared
        self._created = created
        response = build_response(f"resp_{key}", created, request, prepared)
        response |= {"store": False, "background": False}
        self._writer = ResponseWriter(response, request, prepared)

    @classmethod
    async def prepare(
        cls, body: Json, key: str, context: ApiContext, default_max_tokens: int | None, created: int
    ) -> _ResponseBody:
        for name in _STORED:
            if body.get(name) is not None:
                reject_unsupported(name, "a job has no stored responses; send all items in `input`")
        request, prepared = await responses.prepare_response(
            body, context, responses.ResponseLookup(), key, default_max_tokens=default_max_tokens
        )
        return cls(request, prepared, key, created)

    def feed(self, choice: Choice, deltas: Sequence[Delta]) -> None:
        self._writer.choice = choice
        self._writer.feed(deltas)

    def build(self) -> Json:
        self._writer.end(self._created)
        return self._writer.response
