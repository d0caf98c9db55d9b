"""Streams answers of /v1/chat/completions. Every method blocks, so that Ctrl-C ends the call it is in."""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from mlxrun.cli.server_client import SECONDS, ClientError, ServerClient, read_json


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """What has come: text of the answer, or of its `reasoning`. The last one has the `usage`."""

    text: str = ""
    reasoning: bool = False
    usage: Mapping[str, Any] | None = None


class ChatClient(ServerClient):
    """A client that asks for answers."""

    def list_models(self, timeout: float = SECONDS) -> list[str]:
        """The names of the models that the server has. ClientError if it does not say."""
        found = self.call("GET", "/v1/models", timeout=timeout)
        return [str(model.get("id")) for model in found.get("data", ())]

    def stream(
        self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]
    ) -> Generator[AnswerDelta, None, None]:
        """The answer to the messages, as it comes. `fields`: of the request's body, such as temperature.
        ClientError if the server refuses it, or breaks off."""
        options = {"stream": True, "stream_options": {"include_usage": True}}
        body = json.dumps({"messages": list(messages), **options, **fields}).encode()
        with closing(self._connect(SECONDS)) as connection:
            answer = self._send(connection, "POST", "/v1/chat/completions", body)
            try:
                yield from _read_stream(answer)
            except (OSError, http.client.HTTPException) as error:
                raise ClientError(f"{self.url} broke off: {error}") from error


def _read_stream(answer: http.client.HTTPResponse) -> Generator[AnswerDelta, None, None]:
    """The parts in the events of the stream (server-sent events, as OpenAI has them)."""
    for line in answer:
        if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
            continue
        event = read_json(line[len(b"data: ") :])
        if "error" in event:
            raise ClientError(str(event["error"].get("message", event["error"])))
        for choice in event.get("choices", ()):
            delta = choice.get("delta", {})
            if text := delta.get("reasoning_content"):
                yield AnswerDelta(text, reasoning=True)
            if text := delta.get("content"):
                yield AnswerDelta(text)
        if usage := event.get("usage"):
            yield AnswerDelta(usage=usage)
