"""Which surface and endpoint a request is for, and the error for paths that do not exist."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from aiohttp import web

from mlxrun.errors import NotFound
from mlxrun.server.surface import Endpoint, Surface
from mlxrun.text.field_errors import suggest

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

    def make_not_found(self, request: web.Request) -> NotFound:
        """The error for a path that does not exist; it suggests others."""
        off = _find_surface(self._off, request.path)
        if off is not None:
            return NotFound(f"{request.path} is switched off (apis.{off.name}: false)")
        method = "GET" if request.method == "HEAD" else request.method
        paths = self._list_paths(method)
        near = get_close_matches(request.path[:80], paths, MOST_SUGGESTED, cutoff=0.0)
        others = f"; paths for {method}: {', '.join(near)}" if near else f"; no path accepts {method[:20]}"
        if len(near) < len(paths) or not near:
            others += ", ..." if near else ""
            others += f" ({OPENAPI_PATH} lists all paths)" if OPENAPI_PATH in self._list_paths("GET") else ""
        return NotFound(f"the path {request.path[:200]} does not exist{suggest(request.path, paths)}{others}")

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
