"""The one middleware: names the request, checks who asks, and turns whatever is raised into an answer.

An error has the shape of the surface whose path was asked; unknown paths have OpenAI's. Logs hold no text of
prompts: of an error only its code and the field, of a bug its type and where it is.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Awaitable, Callable, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.typedefs import Middleware

from mlxrun import __version__
from mlxrun.errors import MlxrunError, NotAllowed, NotFound, RequestError, TooLarge, Unauthorized
from mlxrun.server.access import ID_HEADER, give_id, named, request_id
from mlxrun.server.auth import key_name
from mlxrun.server.live_requests import ended_by
from mlxrun.server.request_body import check_length, json_reply
from mlxrun.server.surface import Endpoint, Surface
from mlxrun.text.field_errors import suggest

if TYPE_CHECKING:
    from mlxrun.server.state import Server

log = logging.getLogger(__name__)
Next = Callable[[web.Request], Awaitable[web.StreamResponse]]
UNKNOWN = Surface("unknown", ())
STARTED = web.RequestKey("started", bool)
DOCUMENT = "/openapi.json"
NEAR = 5  # most paths that the error for an unknown one names
GONE = 499  # the status in the log of a request whose client went away


class Routes:
    """Which surface and endpoint a route is of, and what is off."""

    def __init__(self, surfaces: list[Surface], off: list[Surface]) -> None:
        self.surfaces = surfaces
        self.off = off
        self.of: dict[int, tuple[Surface, Endpoint]] = {}  # by id of the aiohttp route

    def find(self, request: web.Request) -> tuple[Surface, Endpoint | None]:
        """What was asked for; of a path with other methods the surface alone."""
        route = request.match_info.route
        found = self.of.get(id(route))
        if found is not None:
            return found
        for surface in self.surfaces:
            if any(_shaped(endpoint.path, request.path) for endpoint in surface.endpoints):
                return surface, None
        return UNKNOWN, None

    def not_found(self, request: web.Request) -> NotFound:
        """The error for a path that nobody serves, with where to look."""
        for surface in self.off:
            if any(_shaped(endpoint.path, request.path) for endpoint in surface.endpoints):
                return NotFound(f"{request.path} is switched off here (apis.{surface.name}: false)")
        method = "GET" if request.method == "HEAD" else request.method
        paths = self._paths(method)
        hint = suggest(request.path, paths)
        near = get_close_matches(request.path[:80], paths, NEAR, cutoff=0.0)
        found = f"; {method} takes {', '.join(near)}" if near else f"; no path takes {method[:20]}"
        if len(near) < len(paths) or not near:
            found += ", ..." if near else ""
            found += f" ({DOCUMENT} has all paths)" if DOCUMENT in self._paths("GET") else ""
        return NotFound(f"there is no {request.path[:200]} here{hint}{found}")

    def _paths(self, method: str) -> list[str]:
        """Those that take this method."""
        every = (e for surface in self.surfaces for e in surface.endpoints)
        return sorted({e.path for e in every if e.method == method})


def _shaped(pattern: str, path: str) -> bool:
    """Whether a path is of the form of an endpoint's."""
    wanted, given = pattern.split("/"), path.split("/")
    return len(wanted) == len(given) and all(
        w == g or (w.startswith("{") and g) for w, g in zip(wanted, given, strict=True)
    )


def middleware(server: Server, routes: Routes) -> Middleware:
    """The middleware of one server."""

    @web.middleware
    async def answer(request: web.Request, handler: Next) -> web.StreamResponse:
        rid = give_id(request, server.active)
        surface, endpoint = routes.find(request)
        started = server.clock()
        status: int | None = None  # of what is answered; a client that goes away gets nothing
        server.active.add(rid)
        try:
            response = await _answer(request, handler, server, routes, endpoint)
            status = response.status
            return response
        except MlxrunError as error:
            status = surface.status(error)
            _note(request, error, server)
            return _reply(request, surface, error)
        except ConnectionError:
            raise  # the client is gone
        except Exception as error:
            status = 500
            _note_bug(request, error, server)
            return _reply(request, surface, error)
        finally:
            server.active.discard(rid)
            counted, end = _outcome(request, surface, status)
            server.metrics.requests.labels(surface.name, str(counted)).inc()
            level = logging.DEBUG if endpoint is not None and endpoint.public else logging.INFO
            path = repr(request.path[:100]) if endpoint is None else endpoint.path
            shown, took, who = status or GONE, server.clock() - started, key_name(request) or "-"
            log.log(level, "%s %s %s %d %s %.3fs%s", rid, request.method, path, shown, who, took, end)

    return answer


def _outcome(request: web.Request, surface: Surface, status: int | None) -> tuple[int, str]:
    """As which status a request counts, and what its line in the log says of its end.

    A stream has sent its 200 long before it fails: it counts as the error that ended it.
    """
    error = ended_by(request)
    if status is None:
        transport = request.transport
        gone = transport is None or transport.is_closing()
        end = "client gone" if gone and error is None else "connection cut"
        counted = GONE if error is None else surface.status(error)
        return counted, f" {end}" if error is None else f" {end}: {error.code}"
    if error is None or status >= 400:
        return status, ""
    return surface.status(error), f" stream ended: {error.code}"


async def _answer(
    request: web.Request,
    handler: Next,
    server: Server,
    routes: Routes,
    endpoint: Endpoint | None,
) -> web.StreamResponse:
    if endpoint is None or not endpoint.public:
        server.sites.check_host(request)
    if endpoint is None:
        return await _no_endpoint(request, handler, server, routes)
    server.sites.check_origin(request)
    if not endpoint.public:
        server.keys.check(request)
    check_length(request, endpoint.max_body or server.config.server.max_body_bytes)
    if not endpoint.engine:
        return await _run(request, handler)
    trouble = server.trouble()
    if trouble is not None:
        raise trouble
    with server.work:
        return await _run(request, handler)


async def _run(request: web.Request, handler: Next) -> web.StreamResponse:
    """The handler; a body that ends early or is not compressed as it says is the client's mistake."""
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


async def _no_endpoint(
    request: web.Request, handler: Next, server: Server, routes: Routes
) -> web.StreamResponse:
    """A browser asks what it may send, or the path or the method is not known."""
    try:
        await handler(request)
    except web.HTTPMethodNotAllowed as error:
        if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
            return _preflight(request, server, error.allowed_methods)
        methods = ", ".join(sorted(error.allowed_methods))
        text = f"{request.path} does not take {request.method}, but {methods}"
        raise NotAllowed(text, error.allowed_methods) from None
    except web.HTTPNotFound:
        pass
    raise routes.not_found(request)


def _preflight(request: web.Request, server: Server, methods: set[str]) -> web.Response:
    headers = {}
    if server.sites.allowed_origin(request) is not None:
        asked = request.headers.get("Access-Control-Request-Headers", "")
        headers = {
            "Access-Control-Allow-Methods": ", ".join(sorted(methods)),
            "Access-Control-Allow-Headers": asked,
            "Access-Control-Max-Age": "600",
        }
    return web.Response(status=204, headers=headers)


async def add_headers(request: web.Request, response: web.StreamResponse, server: Server) -> None:
    """What every response has, streams too. To be called when the headers are about to go out."""
    request[STARTED] = True
    if not named(request):  # it was refused before it came to the middleware
        give_id(request, server.active)
    response.headers["Server"] = f"mlxrun/{__version__}"
    if ID_HEADER not in response.headers:
        response.headers[ID_HEADER] = request_id(request)
    if server.config.server.cors_origins:
        response.headers["Vary"] = "Origin"
        allowed = server.sites.allowed_origin(request)
        if allowed is not None:
            response.headers["Access-Control-Allow-Origin"] = allowed
            response.headers["Access-Control-Expose-Headers"] = f"{ID_HEADER}, retry-after"


def _reply(request: web.Request, surface: Surface, error: BaseException) -> web.StreamResponse:
    if request.get(STARTED):
        # Too late for a status: the connection ends in the middle, so that nobody takes it for complete.
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the stream failed") from error
    headers = dict(error_headers(error))
    if isinstance(error, TooLarge) or not request.content.is_eof():
        headers["Connection"] = "close"  # what is left of the body is not read
    return json_reply(surface.error_body(error, request_id(request)), surface.status(error), headers)


def error_headers(error: BaseException) -> Mapping[str, str]:
    """Headers that go with an error's status."""
    headers: dict[str, str] = {}
    if isinstance(error, MlxrunError) and error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, NotAllowed):
        headers["Allow"] = ", ".join(error.methods)
    return headers


def _note(request: web.Request, error: MlxrunError, server: Server) -> None:
    """What the log says of an error that was meant for the client."""
    param = error.param if isinstance(error, RequestError) else None
    said = str(error) if server.config.log.prompts else param or "-"
    level = logging.WARNING if error.http_status >= 500 else logging.INFO
    # Escaped: the name of a field is the client's, and must not write lines of its own.
    log.log(level, "%s %s: %s", request_id(request), error.code, repr(said)[1:-1])


def _note_bug(request: web.Request, error: Exception, server: Server) -> None:
    """Where it happened. The text of the exception may quote a prompt."""
    where = "".join(traceback.format_tb(error.__traceback__))
    said = f": {error}" if server.config.log.prompts else ""
    log.error("%s %s%s\n%s", request_id(request), type(error).__name__, said, where)
