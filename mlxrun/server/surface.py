"""What an API surface is: its endpoints, and the shape of its errors. Each surface module has a `SURFACE`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxrun.api.openai.response import error_body
from mlxrun.errors import status_of

if TYPE_CHECKING:
    from aiohttp import web

    from mlxrun.server.state import Server

Handler = Callable[["web.Request", "Server"], Awaitable["web.StreamResponse"]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One path and method. `path` may have parts such as `{id}`; `body` is for /openapi.json only."""

    method: str
    path: str
    handler: Handler
    summary: str
    body: Mapping[str, Any] | None = None
    public: bool = False  # needs no key
    engine: bool = True  # answered with 503 while the engine loads, drains or is dead
    max_body: int | None = None  # bytes, where it is not server.max_body_bytes


def openai_error(error: BaseException, request_id: str) -> dict[str, Any]:
    """OpenAI's error object."""
    return error_body(error)


@dataclass(frozen=True, slots=True)
class Surface:
    """`name` is the key of `apis:` that switches it; `error_body` gets the error and the request's id."""

    name: str
    endpoints: tuple[Endpoint, ...]
    error_body: Callable[[BaseException, str], dict[str, Any]] = openai_error
    status: Callable[[BaseException], int] = status_of
