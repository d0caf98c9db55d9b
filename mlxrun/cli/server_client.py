"""A client of a running server, for commands. Every method blocks, so that Ctrl-C ends the call it is in."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from mlxrun.cli.server_connection import connect
from mlxrun.core.errors import MlxrunError

SECONDS = 3600.0  # that the next part of an answer may take: a long prompt is read before the first one


class ClientError(MlxrunError):
    """The server refused a request, or cannot be reached; or what was typed cannot be sent."""

    code = "client_failed"
    exit_code = 1


class ServerClient:
    """A client of the server at `url`, such as http://127.0.0.1:8000. `key`: an API key of it. `certificate`:
    see `connect`."""

    def __init__(self, url: str, key: str | None = None, certificate: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._certificate = certificate
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout: float = SECONDS
    ) -> dict[str, Any]:
        """The answer to one request, a JSON object. ClientError if the server refuses it."""
        data = None if body is None else json.dumps(body).encode()
        with closing(self._connect(timeout)) as connection:
            answer = self._send(connection, method, path, data)
            try:
                return read_json(answer.read())
            except (OSError, http.client.HTTPException) as error:
                raise ClientError(f"{self.url} broke off: {error}") from error

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        try:
            return connect(self.url, timeout, self._certificate)
        except ValueError as error:
            raise ClientError(f"{self.url} is not a URL: {error}") from error

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None
    ) -> http.client.HTTPResponse:
        prefix = urlsplit(self.url).path
        try:
            connection.request(method, f"{prefix}{path}", body, self._headers)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise ClientError(f"{self.url} does not answer: {error}") from error
        if answer.status != 200:
            raise ClientError(_describe_refusal(answer.status, answer.read()))
        return answer


def read_json(data: bytes) -> dict[str, Any]:
    """The object in an answer; empty if it is another value. ClientError if it is no JSON."""
    try:
        found = json.loads(data)
    except ValueError as error:
        raise ClientError(f"the server's answer is not JSON: {data[:80]!r}") from error
    return found if isinstance(found, dict) else {}


def _describe_refusal(status: int, body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {status}: {body[:200].decode(errors='replace')}"
