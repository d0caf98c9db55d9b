"""API surfaces: their endpoints, and the shape of their errors. Each surface module has a `SURFACE`.

`Routes` finds the surface and endpoint of a request. /openapi.json is made from the endpoints that are
switched on, and from the schemas of their bodies.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from aiohttp import web

from mlxrun import __version__
from mlxrun.api.anthropic import response as anthropic
from mlxrun.api.openai.response import build_error
from mlxrun.config.server_settings import KeyRole
from mlxrun.core.errors import NotFound, get_http_status
from mlxrun.core.field_errors import suggest

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One path and method. `path`: may have parts such as `{id}`. `body`: a schema for /openapi.json."""

    method: str
    path: str
    handler: Handler
    summary: str
    body: Mapping[str, Any] | None = None
    public: bool = False  # needs no API key
    role: KeyRole | None = "inference"  # of the API key; None: any
    is_page: bool = False  # opened by browsers, which ask for the key themselves
    engine: bool = True  # answered with 503 while the engine loads, drains or is dead
    max_body: int | None = None  # bytes, if not server.max_body_bytes
    is_form: bool = False  # takes multipart/form-data; all others take JSON


@dataclass(frozen=True, slots=True)
class Surface:
    """The endpoints of one API. `name`, `needs`: the keys of `apis:` that switch it; `needs` may be empty.
    `error_body`: gets the error and the request's id. `lacking`: paths of the original API that do not exist
    here, and why; they may have parts such as `{id}`. `is_api`: /openapi.json has its paths. `error_event`:
    gets the same as `error_body`, and returns the name and the data of the last event of a stream."""

    name: str
    endpoints: tuple[Endpoint, ...]
    error_body: Callable[[BaseException, str], dict[str, Any]] = lambda error, request_id: build_error(error)
    status: Callable[[BaseException], int] = get_http_status
    needs: str = ""
    lacking: Mapping[str, str] = field(default_factory=dict)
    is_api: bool = True
    error_event: Callable[[BaseException, str], tuple[str | None, dict[str, Any]]] = (
        lambda error, request_id: (None, build_error(error))
    )

    @property
    def switches(self) -> tuple[str, ...]:
        """The keys of `apis:` that must be on."""
        return (self.name, self.needs) if self.needs else (self.name,)

    def adapt(self, request: web.Request) -> Surface:
        """Return this surface, with Anthropic's errors if the request is from a client of that API."""
        if not is_anthropic(request):
            return self
        return replace(self, error_body=anthropic.build_error, status=anthropic.get_error_status)


def is_anthropic(request: web.Request) -> bool:
    """Tell whether a request has headers of Anthropic's API. Some paths serve both APIs."""
    return "anthropic-version" in request.headers or "anthropic-beta" in request.headers


UNKNOWN_SURFACE = Surface("unknown", ())
OPENAPI_PATH = "/openapi.json"
UI_PATH = "/ui"
RUNS_PATH = f"{UI_PATH}/runs"
MOST_SUGGESTED = 5  # paths that the error for an unknown one names


class Routes:
    """The surfaces that are on and off, and the endpoint of each of aiohttp's routes."""

    def __init__(self, surfaces: Iterable[Surface], off: Iterable[Surface]) -> None:
        self.surfaces = tuple(surfaces)
        self._off = tuple(off)
        self._endpoints: dict[web.AbstractRoute, tuple[Surface, Endpoint]] = {}

    def register(self, router: web.UrlDispatcher) -> None:
        """Add every endpoint to aiohttp's router."""
        for surface in self.surfaces:
            for endpoint in surface.endpoints:
                for method in ("GET", "HEAD") if endpoint.method == "GET" else (endpoint.method,):
                    route = router.add_route(method, endpoint.path, endpoint.handler)
                    self._endpoints[route] = (surface, endpoint)

    def find(self, request: web.Request) -> tuple[Surface, Endpoint | None]:
        """Find the surface and endpoint of a request. A path with other methods only has no endpoint."""
        found = self._endpoints.get(request.match_info.route)
        if found is not None:
            return found
        return _find_surface(self.surfaces, request.path) or UNKNOWN_SURFACE, None

    def list_methods(self, path: str) -> list[str]:
        """List the methods of a path: of its own endpoints, else of the patterns that it matches."""
        endpoints = (endpoint for surface in self.surfaces for endpoint in surface.endpoints)
        matching = [endpoint for endpoint in endpoints if _matches(endpoint.path, path)]
        own = [endpoint for endpoint in matching if endpoint.path == path]
        methods = {endpoint.method for endpoint in own or matching}
        return sorted(methods | ({"HEAD"} if "GET" in methods else set()))

    def make_not_found(self, request: web.Request) -> NotFound:
        """Make the error for a path that does not exist. It suggests others."""
        off = _find_surface(self._off, request.path)
        if off is not None:
            keys = " or ".join(f"apis.{name}: false" for name in off.switches)
            return NotFound(f"{request.path} is switched off ({keys})")
        reason = self.find_lacking(request)
        if reason is not None:
            return NotFound(f"{request.path} is not supported: {reason}")
        method = "GET" if request.method == "HEAD" else request.method
        paths = self._list_paths(method)
        near = get_close_matches(request.path[:80], paths, MOST_SUGGESTED, cutoff=0.0)
        others = f"; paths for {method}: {', '.join(near)}" if near else f"; no path accepts {method[:20]}"
        if len(near) < len(paths) or not near:
            others += ", ..." if near else ""
            others += f" ({OPENAPI_PATH} lists all paths)" if OPENAPI_PATH in self._list_paths("GET") else ""
        name = request.path or request.raw_path  # CONNECT has a host and a port in place of a path
        return NotFound(f"the path {name[:200]} does not exist{suggest(request.path, paths)}{others}")

    def find_lacking(self, request: web.Request) -> str | None:
        """Return why a path of an original API does not exist here (`Surface.lacking`), or None."""
        rows = (row for surface in self.surfaces for row in surface.lacking.items())
        return next((reason for path, reason in rows if _matches(path, request.path)), None)

    def _list_paths(self, method: str) -> list[str]:
        apis = (surface for surface in self.surfaces if surface.is_api)
        endpoints = (endpoint for surface in apis for endpoint in surface.endpoints)
        return sorted({endpoint.path for endpoint in endpoints if endpoint.method == method})


ROUTES = web.AppKey("routes", Routes)


def _find_surface(surfaces: Iterable[Surface], path: str) -> Surface | None:
    """The first surface that has an endpoint of this path, for whatever method, or lacks the path."""
    for surface in surfaces:
        paths = (*(endpoint.path for endpoint in surface.endpoints), *surface.lacking)
        if any(_matches(each, path) for each in paths):
            return surface
    return None


def _matches(pattern: str, path: str) -> bool:
    wanted, given = pattern.split("/"), path.split("/")
    return len(wanted) == len(given) and all(
        w == g or (w.startswith("{") and g) for w, g in zip(wanted, given, strict=True)
    )


def make_document(surfaces: Iterable[Surface], *, needs_keys: bool) -> dict[str, Any]:
    """Build the OpenAPI 3.1 document. `needs_keys`: whether requests need an API key."""
    paths: dict[str, dict[str, Any]] = {}
    for surface in (each for each in surfaces if each.is_api):
        for endpoint in surface.endpoints:
            operation = _make_operation(endpoint, surface.name, needs_keys and not endpoint.public)
            paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = operation
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "mlxrun", "version": __version__},
        "paths": paths,
    }
    if needs_keys:
        found["components"] = {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            }
        }
    return found


def _make_operation(endpoint: Endpoint, tag: str, needs_key: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "summary": endpoint.summary,
        "tags": [tag],
        "responses": {
            "200": {"description": "The answer."},
            "4XX": {"description": "The request is refused; the body says why."},
            "5XX": {"description": "It cannot be served now; the body says why."},
        },
    }
    names = re.findall(r"\{(\w+)[^}]*\}", endpoint.path)
    if names:
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ]
    if endpoint.body is not None:
        kind = "multipart/form-data" if endpoint.is_form else "application/json"
        content = {kind: {"schema": dict(endpoint.body)}}
        found["requestBody"] = {"required": True, "content": content}
    if needs_key:
        found["security"] = [{"bearer": []}, {"key": []}]
    return found
