"""What the log says of requests.

The text of prompts is logged with `log.prompts` only. Else the log has the code and the field of an error,
and the type and traceback of a bug.
"""

from __future__ import annotations

import logging
from urllib.parse import quote

from aiohttp import web

from mlxrun.core.errors import MlxrunError, RequestError
from mlxrun.core.log_lines import describe_trace
from mlxrun.server.http.access import key_name
from mlxrun.server.http.request_context import request_id
from mlxrun.server.http.surface import Endpoint, Surface
from mlxrun.server.live_requests import find_engine_error

log = logging.getLogger(__name__)
CLIENT_GONE = 499  # the status, in the log and in metrics, of a request whose client disconnected

_REFUSAL = web.RequestKey("refusal", str)


def describe_error(request: web.Request, error: Exception, *, with_text: bool) -> str:
    """Why a request was refused or failed, for the end of its line; logs the traceback of a bug.

    The text of an error may quote a prompt, so it is included only if `with_text`.
    """
    rid = request_id(request)
    if not isinstance(error, MlxrunError):
        text = f": {error}" if with_text else ""
        log.error("%s %s%s", rid, type(error).__name__, text, extra=describe_trace(error.__traceback__))
        return f" {type(error).__name__}"
    param = error.param if isinstance(error, RequestError) else None
    return _format_error(error.code, str(error) if with_text else param)


def _format_error(code: str, text: str | None) -> str:
    # Escaped, because the client chooses field names, and they must not forge lines of the log.
    return f" {code}: {repr(text)[1:-1]}" if text else f" {code}"


def note_refusal(request: web.Request, code: str, text: str | None) -> None:
    """Remember why another process has refused a request, for the end of its line. `text`: the field, or what
    may be logged."""
    request[_REFUSAL] = _format_error(repr(code)[1:-1], text)


def log_end(
    request: web.Request,
    endpoint: Endpoint | None,
    status: int | None,
    took: float,
    end: str,
    error: Exception | None = None,
) -> None:
    """Log the one line of a request. `took`: seconds; `end`: from `describe_end` and `describe_error`."""
    level = logging.DEBUG if endpoint is not None and endpoint.public and error is None else logging.INFO
    if error is not None and (status or 0) >= 500:
        level = logging.WARNING
    # Percent-encoded, because the client chooses the path, and it must not forge words or lines of the log.
    unmatched = quote(request.path[:100], safe="/:@!$&()*+,;=", errors="backslashreplace")
    path = unmatched if endpoint is None else endpoint.path
    shown, key = status or CLIENT_GONE, key_name(request) or "-"
    log.log(level, "%s %s %s %d %s %.3fs%s", request_id(request), request.method, path, shown, key, took, end)


def describe_end(request: web.Request, surface: Surface, status: int | None) -> tuple[int, str]:
    """The status that a request counts with in the metrics, and how its line in the log ends.

    `status` is what was sent, None if the client disconnected. A stream sends 200 long before it fails, so it
    counts with the status of the error that ended it.
    """
    error = find_engine_error(request)
    if status is None:
        transport = request.transport
        gone = transport is None or transport.is_closing()
        end = "client gone" if gone and error is None else "connection cut"
        return (CLIENT_GONE, f" {end}") if error is None else (surface.status(error), f" {end}: {error.code}")
    if error is None or status >= 400:
        return status, request.get(_REFUSAL, "")
    return surface.status(error), f" stream ended: {error.code}"
