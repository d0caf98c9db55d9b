"""Streams answers of /v1/chat/completions. Every method blocks, so that Ctrl-C ends the call it is in."""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from mlxrun.cli.server_connection import connect
from mlxrun.core.errors import MlxrunError

_SECONDS = 3600.0  # that the next part of an answer may take: a long prompt is read before the first one


class ChatError(MlxrunError):
    """The server refused a request, or cannot be reached."""

    code = "chat_failed"
    exit_code = 1


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """What has come: text of the answer, or of its `reasoning`. The last one has the `usage`."""

    text: str = ""
    reasoning: bool = False
    usage: Mapping[str, Any] | None = None


class ChatClient:
    """A client of the server at `url`, such as http://127.0.0.1:8000. `key`: an API key of it. `certificate`:
    see `connect`."""

    def __init__(self, url: str, key: str | None = None, certificate: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._certificate = certificate
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def list_models(self, timeout: float = _SECONDS) -> list[str]:
        """The names of the models that the server has. ChatError if it does not say."""
        with closing(self._connect(timeout)) as connection:
            answer = self._send(connection, "GET", "/v1/models", None)
            found = _read_json(answer.read())
        return [str(model.get("id")) for model in found.get("data", ())]

    def stream(
        self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]
    ) -> Generator[AnswerDelta, None, None]:
        """The answer to the messages, as it comes. `fields`: of the request's body, such as temperature.
        ChatError if the server refuses it, or breaks off."""
        options = {"stream": True, "stream_options": {"include_usage": True}}
        body = json.dumps({"messages": list(messages), **options, **fields}).encode()
        with closing(self._connect(_SECONDS)) as connection:
            answer = self._send(connection, "POST", "/v1/chat/completions", body)
            try:
                yield from _read_stream(answer)
            except (OSError, http.client.HTTPException) as error:
                raise ChatError(f"{self.url} broke off: {error}") from error

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        try:
            return connect(self.url, timeout, self._certificate)
        except ValueError as error:
            raise ChatError(f"{self.url} is not a URL: {error}") from error

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None
    ) -> http.client.HTTPResponse:
        prefix = urlsplit(self.url).path
        try:
            connection.request(method, f"{prefix}{path}", body, self._headers)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise ChatError(f"{self.url} does not answer: {error}") from error
        if answer.status != 200:
            raise ChatError(_describe_refusal(answer.status, answer.read()))
        return answer


def _read_stream(answer: http.client.HTTPResponse) -> Generator[AnswerDelta, None, None]:
    """The parts in the events of the stream (server-sent events, as OpenAI has them)."""
    for line in answer:
        if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
            continue
        event = _read_json(line[len(b"data: ") :])
        if "error" in event:
            raise ChatError(str(event["error"].get("message", event["error"])))
        for choice in event.get("choices", ()):
            delta = choice.get("delta", {})
            if text := delta.get("reasoning_content"):
                yield AnswerDelta(text, reasoning=True)
            if text := delta.get("content"):
                yield AnswerDelta(text)
        if usage := event.get("usage"):
            yield AnswerDelta(usage=usage)


def _read_json(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError as error:
        raise ChatError(f"the server's answer is not JSON: {data[:80]!r}") from error
    return found if isinstance(found, dict) else {}


def _describe_refusal(status: int, body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {status}: {body[:200].decode(errors='replace')}"
