"""What an API surface is: its endpoints, and the shape of its errors. Each surface module has a `SURFACE`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from mlxrun.api.openai.response import build_error
from mlxrun.errors import get_http_status

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One path and method. `path` may have parts such as `{id}`; `body` is a schema for /openapi.json."""

    method: str
    path: str
    handler: Handler
    summary: str
    body: Mapping[str, Any] | None = None
    public: bool = False  # needs no API key
    engine: bool = True  # answered with 503 while the engine loads, drains or is dead
    max_body: int | None = None  # bytes, if not server.max_body_bytes


@dataclass(frozen=True, slots=True)
class Surface:
    """`name` is the key of `apis:` that switches it; `error_body` gets the error and the request's id."""

    name: str
    endpoints: tuple[Endpoint, ...]
    error_body: Callable[[BaseException, str], dict[str, Any]] = lambda error, request_id: build_error(error)
    status: Callable[[BaseException], int] = get_http_status
