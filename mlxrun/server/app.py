"""The aiohttp application: the surfaces that the config switches on, behind one middleware.

A surface is a module with a `SURFACE`: it is registered by its name in the list below, and by its switch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiohttp import web

from mlxrun.config.settings import ApiSettings
from mlxrun.server.batches import endpoints
from mlxrun.server.endpoints import admin, anthropic, openai, responses, tokenize
from mlxrun.server.endpoints.admin import HEALTH
from mlxrun.server.middleware import Next, Routes, add_headers, middleware
from mlxrun.server.surface import Endpoint, Surface

if TYPE_CHECKING:
    from mlxrun.server.state import Server


def all_surfaces() -> list[Surface]:
    """Every surface that there is, switched on or off."""
    return [module.SURFACE for module in (openai, responses, anthropic, tokenize, endpoints, admin)]


def make_app(server: Server, surfaces: Sequence[Surface] | None = None) -> web.Application:
    """The application of a server; to be run with `handler_cancellation`. `surfaces`: for tests."""
    known = all_surfaces() if surfaces is None else list(surfaces)
    switches = _switches(server.config.apis)
    on = [surface for surface in known if switches.get(surface.name, True)]
    routes = Routes([HEALTH, *on], [surface for surface in known if surface not in on])
    server.surfaces = tuple(routes.surfaces)
    app = web.Application(middlewares=[middleware(server, routes)])
    for surface in routes.surfaces:
        for endpoint in surface.endpoints:
            for method in ("GET", "HEAD") if endpoint.method == "GET" else (endpoint.method,):
                route = app.router.add_route(method, endpoint.path, _handler(endpoint, server))
                routes.of[id(route)] = (surface, endpoint)

    async def prepare(request: web.Request, response: web.StreamResponse) -> None:
        await add_headers(request, response, server)

    app.on_response_prepare.append(prepare)
    return app


def _switches(apis: ApiSettings) -> dict[str, bool]:
    """Which surfaces the config wants, by name."""
    return {
        "openai": apis.openai,
        "responses": apis.responses,
        "anthropic": apis.anthropic,
        "tokenize": apis.tokenize,
        "batches": apis.batches,
        "admin": apis.admin,
    }


def _handler(endpoint: Endpoint, server: Server) -> Next:
    async def handle(request: web.Request) -> web.StreamResponse:
        return await endpoint.handler(request, server)

    return handle
