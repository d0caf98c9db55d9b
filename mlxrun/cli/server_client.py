"""A client of a running server, and the servers of this machine, for commands. Every call blocks, so that
Ctrl-C ends the one it is in.

A server with `server.tls` on this machine is known by its certificate.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import ssl
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mlxrun.core.errors import MlxrunError
from mlxrun.core.text_files import read_regular

if TYPE_CHECKING:
    from mlxrun.server.running_servers import ServerNote

LOCAL = "http://127.0.0.1:8000"
KEY_VARIABLE = "MLXRUN_API_KEY"
SECONDS = 3600.0  # that the next part of an answer may take: a long prompt is read before the first one
_LOOK_SECONDS = 0.5  # that another program may take to say that it has no models
_STATE_SECONDS = 2.0  # that a server on this machine may take to say its state, or which models it has
_MOST_BYTES = 1_000_000  # of that answer
_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


class ClientError(MlxrunError):
    """The server refused a request, or cannot be reached; or what was typed cannot be sent."""

    code = "client_failed"
    exit_code = 1


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """What has come: text of the answer, or of its `reasoning`. `cut`: the answer ended at the maximum number
    of tokens. The last one has the `usage`."""

    text: str = ""
    reasoning: bool = False
    usage: Mapping[str, Any] | None = None
    cut: bool = False


def list_running_servers() -> list[ServerNote]:
    """The servers that run on this machine, the oldest first."""
    from mlxrun.server.running_servers import find_notes_folder, list_servers

    return list_servers(find_notes_folder(os.environ))


def list_certificates() -> dict[str, str | None]:
    """The certificates of the servers on this machine by their URLs, the oldest first."""
    return {note.url: note.certificate for note in list_running_servers()}


def find_server(key: str | None) -> str | None:
    """The usual address, else that of the newest server on this machine, if a server answers there."""
    known = list_certificates()
    for url in dict.fromkeys((LOCAL, *reversed(known))):
        with suppress(ClientError):
            if make_client(url, key).list_models(_STATE_SECONDS if url in known else _LOOK_SECONDS):
                return url
    return None


def explain_refusal(key: str | None) -> str | None:
    """Why the newest server on this machine is none that `find_server` finds; None if none runs."""
    url, certificate = next(reversed(list_certificates().items()), ("", None))
    if not url:
        return None
    state = read_state(url, certificate)
    if state != "ok":
        return f"{url} cannot be asked now, its state is: {state}"
    return f"{url} needs {'another API key' if key else 'its API key'}: give --key, or set {KEY_VARIABLE}"


def make_client(url: str, key: str | None) -> ServerClient:
    """A client of the server at `url`, which accepts only its own certificate if it runs on this machine."""
    return ServerClient(url, key, list_certificates().get(url.rstrip("/").removesuffix("/v1")))


def read_state(url: str, certificate: str | None = None) -> str:
    """What a server says of its state, or that it does not answer. `certificate`: see `connect`."""
    found = _read_object(f"{url}/health", certificate)
    return "no answer" if found is None else str(found.get("status", "unknown"))


def read_modalities(url: str, certificate: str | None = None) -> list[str]:
    """The kinds of input that a server's models take. Empty if it does not say."""
    models = (_read_object(f"{url}/v1/models", certificate) or {}).get("data", ())
    return list(dict.fromkeys(kind for model in models for kind in model.get("input_modalities", ())))


def _read_object(url: str, certificate: str | None) -> dict[str, Any] | None:
    """The JSON object at a URL, empty if it is another value. None without an answer, or if it is no JSON."""
    try:
        with closing(connect(url, _STATE_SECONDS, certificate)) as connection:
            connection.request("GET", urlsplit(url).path)
            return read_json(connection.getresponse().read(_MOST_BYTES))
    except (OSError, http.client.HTTPException, ClientError):
        return None


class ServerClient:
    """A client of the server at `url`, such as http://127.0.0.1:8000. `key`: an API key of it. `certificate`:
    see `connect`."""

    def __init__(self, url: str, key: str | None = None, certificate: str | None = None) -> None:
        url = url if "://" in url else f"http://{url}"
        self.url = url.rstrip("/").removesuffix("/v1")
        self._certificate = certificate
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout: float = SECONDS
    ) -> dict[str, Any]:
        """The answer to one request, a JSON object. ClientError if the server refuses it."""
        with self._open(method, path, None if body is None else json.dumps(body).encode(), timeout) as answer:
            return read_json(answer.read())

    def list_models(self, timeout: float = SECONDS) -> list[str]:
        """The names of the models that the server has. ClientError if it does not say."""
        return [str(model.get("id")) for model in self._read_models(timeout)]

    def read_context_length(self) -> int | None:
        """The tokens of prompt and answer together that each model of the server takes. None if it does not
        say: vLLM and mlxrun do."""
        known = [model.get("max_model_len") for model in self._read_models(SECONDS)]
        return min((length for length in known if isinstance(length, int)), default=None)

    def _read_models(self, timeout: float) -> list[dict[str, Any]]:
        found = self.call("GET", "/v1/models", timeout=timeout).get("data")
        return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []

    def stream(
        self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]
    ) -> Generator[AnswerDelta, None, None]:
        """The answer to the messages, as it comes. `fields`: of the request's body, such as temperature.
        ClientError if the server refuses it, or breaks off."""
        options = {"stream": True, "stream_options": {"include_usage": True}}
        body = json.dumps({"messages": list(messages), **options, **fields}).encode()
        with self._open("POST", "/v1/chat/completions", body, SECONDS) as answer:
            yield from _read_stream(answer)

    @contextmanager
    def _open(
        self, method: str, path: str, body: bytes | None, timeout: float
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request, and give its answer. ClientError if the server refuses it, or breaks off."""
        try:
            connection = connect(self.url, timeout, self._certificate)
        except ValueError as error:
            raise ClientError(f"{self.url} is not a URL: {error}") from error
        with closing(connection):
            try:
                connection.request(method, f"{urlsplit(self.url).path}{path}", body, self._headers)
                answer = connection.getresponse()
                refusal = None if answer.status == 200 else answer.read()
            except (OSError, http.client.HTTPException) as error:
                raise ClientError(f"{self.url} does not answer: {error}") from error
            except ValueError as error:  # whose text may have the key in it
                text = "the URL or the API key has characters that HTTP does not allow"
                raise ClientError(f"{self.url} cannot be asked: {text}") from error
            if refusal is not None:
                raise ClientError(_describe_refusal(answer.status, refusal))
            try:
                yield answer
            except (OSError, http.client.HTTPException) as error:
                raise ClientError(f"{self.url} broke off: {error}") from error


def read_json(data: bytes) -> dict[str, Any]:
    """The object in an answer; empty if it is another value. ClientError if it is no JSON."""
    try:
        found = json.loads(data)
    except ValueError as error:
        raise ClientError(f"the server's answer is not JSON: {data[:80]!r}") from error
    return found if isinstance(found, dict) else {}


def _describe_refusal(status: int, body: bytes) -> str:
    hint = f"; give --key, or set {KEY_VARIABLE}" if status == 401 else ""
    try:
        return str(json.loads(body)["error"]["message"]) + hint
    except (ValueError, KeyError, TypeError):
        return f"the server answered {status}: {body[:200].decode(errors='replace')}{hint}"


def _read_stream(answer: http.client.HTTPResponse) -> Generator[AnswerDelta, None, None]:
    """The parts in the events of the stream (server-sent events, as OpenAI has them). ClientError if it has
    no end: a connection that breaks looks like one."""
    has_ended = False
    for line in answer:
        field, _, data = line.partition(b":")
        if field != b"data":
            continue
        if data.strip() == b"[DONE]":
            return
        event = read_json(data)
        if error := event.get("error"):
            raise ClientError(str(error.get("message", error) if isinstance(error, dict) else error))
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            if text := delta.get("reasoning_content"):
                yield AnswerDelta(text, reasoning=True)
            if text := delta.get("content"):
                yield AnswerDelta(text)
            has_ended = has_ended or choice.get("finish_reason") is not None
            if choice.get("finish_reason") == "length":
                yield AnswerDelta(cut=True)
        if usage := event.get("usage"):
            yield AnswerDelta(usage=usage)
    if not has_ended:
        raise ClientError("the server broke off before the end of the answer")


def connect(url: str, timeout: float, certificate: str | None = None) -> http.client.HTTPConnection:
    """Make a connection to the server at `url`, which opens with the first request. `timeout`: seconds.

    `certificate`: the file of the only certificate that is accepted, whatever its names and dates are. None:
    those that this machine trusts. ValueError if `url` is not one.
    """
    parts = urlsplit(url)
    if parts.scheme != "https":
        return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
    if certificate is None:
        return http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=timeout)
    return _PinnedConnection(parts.hostname or "", parts.port, timeout, Path(certificate))


class _PinnedConnection(http.client.HTTPSConnection):
    """A connection to the server that has the first certificate of a file. OSError if it has another one."""

    def __init__(self, host: str, port: int | None, timeout: float, certificate: Path) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False  # most certificates name the public host, and not this address
        context.verify_mode = ssl.CERT_NONE  # compared below instead
        super().__init__(host, port, timeout=timeout, context=context)
        self._certificate = certificate

    def connect(self) -> None:
        """Open the connection, before anything is sent."""
        super().connect()
        found = _CERTIFICATE.search(read_regular(self._certificate))
        if found is None or self.sock.getpeercert(True) != ssl.PEM_cert_to_DER_cert(found[0].decode()):
            self.close()
            text = f"its certificate is not that of {self._certificate}; SIGHUP has it read the file again"
            raise OSError(text)
