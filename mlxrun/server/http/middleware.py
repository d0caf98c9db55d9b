"""The one middleware: gives each request an id, checks who sent it, and turns exceptions into responses.

An error has the shape of the path's surface; for unknown paths it has OpenAI's. A browser that asked for a
page gets a page.
"""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from mlxrun import __version__
from mlxrun.core.errors import (
    BodyTooLarge,
    MethodNotAllowed,
    MlxrunError,
    RequestError,
    Unauthorized,
    WrongContentEncoding,
)
from mlxrun.server.engine_state import ENGINE
from mlxrun.server.http.access import (
    ACTIVE_IDS,
    ALLOWED_SITES,
    API_KEYS,
    CONFIG,
    ID_HEADER,
    is_preflight,
    request_id,
)
from mlxrun.server.http.body_encoding import ENCODINGS, check_content_encoding
from mlxrun.server.http.error_page import make_error_page
from mlxrun.server.http.json_bodies import check_content_type, check_length, get_max_body_bytes, json_response
from mlxrun.server.http.request_log import describe_end, log_end
from mlxrun.server.http.surface import ROUTES, RUNS_PATH, UI_PATH, Endpoint, Handler, Surface, is_anthropic
from mlxrun.server.request_metrics import METRICS
from mlxrun.server.telemetry import record_request

KEY_REALM = "mlxrun: any name, and an API key as the password"
_HEADERS_SENT = web.RequestKey("headers_sent", bool)


@web.middleware
async def handle_request(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer one request. An exception of the handler becomes a response."""
    app = request.app
    active, clock = app[ACTIVE_IDS], app[ENGINE].clock
    rid, started = request_id(request, active), clock()
    surface, endpoint = app[ROUTES].find(request)
    surface = surface.adapt(request)
    failure: Exception | None = None
    status: int | None = None  # of the response; None if the client disconnected
    active.add(rid)
    try:
        response = await _check_and_run(request, handler, endpoint)
        status = response.status
        return response
    except ConnectionError:
        raise  # the client disconnected
    except Exception as error:
        status = surface.status(error)
        failure = error
        return _respond_with_error(request, surface, endpoint, error)
    finally:
        active.discard(rid)
        end = describe_end(request, surface, status, failure)
        app[METRICS].requests.labels(surface.name, str(end.counted)).inc()
        took = clock() - started
        log_end(request, endpoint, end, took)
        record_request(request, endpoint, end, took)


async def _check_and_run(
    request: web.Request, handler: Handler, endpoint: Endpoint | None
) -> web.StreamResponse:
    app = request.app
    if endpoint is None or not endpoint.public:
        app[ALLOWED_SITES].check_host(request)
    app[ALLOWED_SITES].check_origin(request)
    target = _find_page(request)  # first: the path / may be an API's too
    if target is not None:
        return web.Response(status=302, headers={"Location": target})
    if endpoint is None:
        return _answer_unmatched(request)
    if not endpoint.public:
        app[API_KEYS].check(request, endpoint.role)
    if not endpoint.is_form:
        check_content_type(request)
    check_content_encoding(request)
    check_length(request, endpoint.max_body or get_max_body_bytes(app))
    if not endpoint.engine:
        return await _run(request, handler)
    error = app[ENGINE].find_unavailability()
    if error is not None:
        raise error
    with app[ENGINE].active.hold():
        return await _run(request, handler)


async def _run(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Call the handler. A body that ends early, or is not compressed as it says, is the client's mistake."""
    try:
        return await handler(request)
    except web.RequestPayloadError as error:
        reason = " ".join(str(error).removeprefix("400, message:").split())[:200]
        raise RequestError(f"the body cannot be read: {reason}", code="invalid_body") from error
    except web.HTTPException as error:
        if error.status >= 500:
            raise
        refused = RequestError(error.reason, code="invalid_request")
        refused.http_status = error.status
        raise refused from error


def _answer_unmatched(request: web.Request) -> web.StreamResponse:
    """The response to OPTIONS, also of a browser's preflight; an error for an unknown path or method."""
    error = request.match_info.http_exception
    is_path = isinstance(error, web.HTTPMethodNotAllowed)
    if not is_path or request.app[ROUTES].find_lacking(request) is not None:
        raise request.app[ROUTES].make_not_found(request)
    methods = request.app[ROUTES].list_methods(request.path)
    if request.method == "OPTIONS":
        return _answer_options(request, methods)
    text = f"{request.method} is not allowed for {request.path}; use {' or '.join(methods)}"
    raise MethodNotAllowed(text, methods)


def _find_page(request: web.Request) -> str | None:
    """The relative address of the page for a browser that asks for / or /ui/; None for other requests. The
    page is that of the runs where no other is served. Relative, because a proxy may serve all paths below one
    of its own."""
    if not _wants_page(request) or request.path not in ("/", UI_PATH, f"{UI_PATH}/"):
        return None
    pages = (path for path in (UI_PATH, RUNS_PATH) if request.app[ROUTES].list_methods(path))
    page = next(pages, request.path)
    if page == request.path:
        return None
    return f"..{page}" if request.path == f"{UI_PATH}/" else page[1:]


def _wants_page(request: web.Request) -> bool:
    """Whether a person asks, by a browser."""
    return request.method in ("GET", "HEAD") and "text/html" in request.headers.get("Accept", "")


def _answer_options(request: web.Request, methods: Sequence[str]) -> web.Response:
    headers = {"Allow": ", ".join(sorted([*methods, "OPTIONS"]))}
    if is_preflight(request) and request.app[ALLOWED_SITES].find_allowed_origin(request) is not None:
        headers |= {
            "Access-Control-Allow-Methods": ", ".join(methods),
            "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers", ""),
            "Access-Control-Max-Age": "600",
        }
    return web.Response(status=204, headers=headers)


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add the headers that every response has, also a stream. A handler of aiohttp's on_response_prepare."""
    app, active = request.app, request.app[ACTIVE_IDS]
    request[_HEADERS_SENT] = True
    response.headers["Server"] = f"mlxrun/{__version__}"
    response.headers["X-Content-Type-Options"] = "nosniff"  # no uploaded file is taken for a script
    if ID_HEADER not in response.headers:
        response.headers[ID_HEADER] = request_id(request, active)
    if is_anthropic(request):
        response.headers["request-id"] = request_id(request, active)  # which Anthropic's clients read
    if app[CONFIG].server.cors_origins:
        response.headers["Vary"] = "Origin"
        allowed = app[ALLOWED_SITES].find_allowed_origin(request)
        if allowed is not None:
            response.headers["Access-Control-Allow-Origin"] = allowed
            response.headers["Access-Control-Expose-Headers"] = f"{ID_HEADER}, request-id, retry-after"


def _respond_with_error(
    request: web.Request, surface: Surface, endpoint: Endpoint | None, error: Exception
) -> web.StreamResponse:
    if request.get(_HEADERS_SENT):
        # It is too late for a status. The connection is cut, so that no client takes the answer for complete.
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the stream failed") from error
    headers: dict[str, str] = {}
    is_page = endpoint is not None and endpoint.is_page
    if isinstance(error, MlxrunError) and error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = f'Basic realm="{KEY_REALM}"' if is_page else "Bearer"
    if isinstance(error, MethodNotAllowed):
        headers["Allow"] = ", ".join(error.methods)
    if isinstance(error, WrongContentEncoding):
        headers["Accept-Encoding"] = ", ".join(ENCODINGS)  # of requests, as RFC 7694 has it
    if isinstance(error, BodyTooLarge) or not request.content.is_eof():
        headers["Connection"] = "close"  # the rest of the body is not read
    status, body = surface.status(error), surface.error_body(error, request_id(request))
    if _wants_page(request) and (is_page or endpoint is None):
        link = ("?", "To the start of this page") if is_page and request.query_string else None
        return make_error_page(status, body["error"]["message"], headers, link)
    return json_response(body, status, headers)
