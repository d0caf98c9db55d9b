"""The log line of each request, as a sentence and as fields.

The text of prompts is logged only with `log.prompts`. Otherwise the log has the code and the field of an
error, and the type and traceback of a bug.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from aiohttp import web

from mlxrun.core.errors import MlxrunError, RequestError, shorten_message
from mlxrun.core.visible_text import FIELDS, describe_trace
from mlxrun.server.http.access import CONFIG, key_name, request_id
from mlxrun.server.http.surface import Endpoint, Surface
from mlxrun.server.live_requests import ENGINE_ERROR, LIVE

log = logging.getLogger(__name__)
CLIENT_GONE = 499  # the status, in the log and in metrics, of a request whose client disconnected


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """How a request ended. `sent`: the status that the client got; `counted`: the one of the metrics."""

    sent: int
    counted: int
    how: str = ""  # `client gone`, `connection cut` or `stream ended`
    error: str = ""  # the code of the error that ended it
    detail: str = ""  # the field of the error, or its text if that may be logged
    failed: bool = False  # the response is an error that was made here

    def describe(self) -> str:
        """Write it for the end of a line: ` stream ended: request_cancelled`."""
        # Escaped, because the client chooses names of fields, and they must not forge lines of the log.
        parts = (self.how, repr(self.error)[1:-1], repr(self.detail)[1:-1])
        text = ": ".join(part for part in parts if part)
        return f" {text}" if text else ""


LOGGED_ELSEWHERE = web.RequestKey("logged_elsewhere", bool)  # by the process that answers it
_REFUSAL = web.RequestKey("refusal", tuple[str, str])


def note_refusal(request: web.Request, code: str, text: str | None) -> None:
    """Remember why another process has refused a request, for its line. `text`: the field, or another text
    that may be logged."""
    request[_REFUSAL] = (code, text or "")


def describe_end(
    request: web.Request, surface: Surface, status: int | None, failure: Exception | None
) -> RequestEnd:
    """Describe how a request ended, and log the traceback of a bug.

    `status`: the one that was sent; None if the client disconnected. A stream sends 200 long before it fails,
    so it counts with the status of the error that ended it. `failure`: the error that became the response.
    """
    if failure is not None:
        code, detail = _describe_failure(request, failure)
        sent = status or CLIENT_GONE
        return RequestEnd(sent, sent, "", code, detail, failed=True)
    error = request.get(ENGINE_ERROR)
    if status is None:
        transport = request.transport
        gone = transport is None or transport.is_closing()
        how = "client gone" if gone and error is None else "connection cut"
        counted = CLIENT_GONE if error is None else surface.status(error)
        return RequestEnd(CLIENT_GONE, counted, how, "" if error is None else error.code)
    if error is None or status >= 400:
        return RequestEnd(status, status, "", *request.get(_REFUSAL, ("", "")))
    return RequestEnd(status, surface.status(error), "stream ended", error.code)


def _describe_failure(request: web.Request, error: Exception) -> tuple[str, str]:
    """The code of an error, and its field or its text."""
    with_text = request.app[CONFIG].log.prompts
    if not isinstance(error, MlxrunError):
        text = f": {error}" if with_text else ""
        trace = describe_trace(error.__traceback__)
        log.error("%s %s%s", request_id(request), type(error).__name__, text, extra=trace)
        return type(error).__name__, ""
    param = error.param if isinstance(error, RequestError) else None
    return error.code, str(error) if with_text else param or ""


def log_end(request: web.Request, endpoint: Endpoint | None, end: RequestEnd, took: float) -> None:
    """Log the one line of a request. `took`: seconds. What is asked for again and again is for DEBUG."""
    is_polled = endpoint is not None and (endpoint.is_page or endpoint.role == "metrics")
    is_seldom_read = is_polled or (endpoint is not None and endpoint.public)
    # The process that answers has logged it, unless that has died.
    is_logged = request.get(LOGGED_ELSEWHERE, False) and request.get(ENGINE_ERROR) is None
    is_quiet = (is_seldom_read or is_logged) and not end.failed
    level = logging.DEBUG if is_quiet else logging.INFO
    if end.failed and end.sent >= 500:
        level = logging.WARNING
    # Percent-encoded, because the client chooses the path, and it must not forge words or lines of the log.
    unmatched = quote(request.path[:100], safe="/:@!$&()*+,;=", errors="backslashreplace")
    path = unmatched if endpoint is None else endpoint.path
    rid, key, live = request_id(request), key_name(request), request.get(LIVE)
    fields: dict[str, Any] = {
        "request_id": rid,
        "method": request.method,
        "endpoint": path,
        "status": end.sent,
        "key": key or None,
        "total_ms": round(took * 1000, 1),
        "end": end.how or None,
        "error": end.error or None,
        "detail": shorten_message(end.detail) or None,
        **({} if live is None else live.describe_work()),
    }
    text = "%s %s %s %d %s %.3fs%s"
    args = (rid, request.method, path, end.sent, key or "-", took, end.describe())
    log.log(level, text, *args, extra={FIELDS: fields})
