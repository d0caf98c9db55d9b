"""Which surface and endpoint a request is for, and the error for paths that do not exist."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from aiohttp import web

from mlxrun.core.errors import NotFound
from mlxrun.core.field_errors import suggest
from mlxrun.server.http.surface import Endpoint, Surface

UNKNOWN_SURFACE = Surface("unknown", ())
OPENAPI_PATH = "/openapi.json"
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
        """The surface and endpoint of a request. If the path has other methods only, the surface alone."""
        found = self._endpoints.get(request.match_info.route)
        if found is not None:
            return found
        return _find_surface(self.surfaces, request.path) or UNKNOWN_SURFACE, None

    def list_methods(self, path: str) -> list[str]:
        """The methods of a path: those of its own endpoints, or else of the patterns that it matches."""
        endpoints = (endpoint for surface in self.surfaces for endpoint in surface.endpoints)
        matching = [endpoint for endpoint in endpoints if _matches(endpoint.path, path)]
        own = [endpoint for endpoint in matching if endpoint.path == path]
        methods = {endpoint.method for endpoint in own or matching}
        return sorted(methods | ({"HEAD"} if "GET" in methods else set()))

    def make_not_found(self, request: web.Request) -> NotFound:
        """The error for a path that does not exist; it suggests others."""
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
        """Why there is no such path, although a pattern matches it; None if nobody says so."""
        return next((s.lacking[request.path] for s in self.surfaces if request.path in s.lacking), None)

    def _list_paths(self, method: str) -> list[str]:
        endpoints = (endpoint for surface in self.surfaces for endpoint in surface.endpoints)
        return sorted({endpoint.path for endpoint in endpoints if endpoint.method == method})


ROUTES = web.AppKey("routes", Routes)


def _find_surface(surfaces: Iterable[Surface], path: str) -> Surface | None:
    """The first surface that has an endpoint of this path, for whatever method."""
    for surface in surfaces:
        if any(_matches(endpoint.path, path) for endpoint in surface.endpoints):
            return surface
    return None


def _matches(pattern: str, path: str) -> bool:
    wanted, given = pattern.split("/"), path.split("/")
    return len(wanted) == len(given) and all(
        w == g or (w.startswith("{") and g) for w, g in zip(wanted, given, strict=True)
    )
