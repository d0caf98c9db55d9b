"""What an API surface is: its endpoints, and the shape of its errors. Each surface module has a `SURFACE`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web

from mlxrun.api.anthropic import response as anthropic
from mlxrun.api.openai.response import build_error
from mlxrun.core.errors import get_http_status

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
    """`name` is the key of `apis:` that switches it, and so is `needs` if there is a second one; `error_body`
    gets the error and the request's id; `lacking`: paths that the API has elsewhere and that patterns of this
    one's endpoints match, and why there are none."""

    name: str
    endpoints: tuple[Endpoint, ...]
    error_body: Callable[[BaseException, str], dict[str, Any]] = lambda error, request_id: build_error(error)
    status: Callable[[BaseException], int] = get_http_status
    needs: str = ""
    lacking: Mapping[str, str] = field(default_factory=dict)

    @property
    def switches(self) -> tuple[str, ...]:
        """The keys of `apis:` that must be on."""
        return (self.name, self.needs) if self.needs else (self.name,)

    def adapt(self, request: web.Request) -> Surface:
        """The surface with errors in the shape that the client of a request reads."""
        if not is_anthropic(request):
            return self
        return replace(self, error_body=anthropic.build_error, status=anthropic.get_error_status)


def is_anthropic(request: web.Request) -> bool:
    """Whether a request is from a client of Anthropic's API, by its headers. Some paths serve both APIs."""
    return "anthropic-version" in request.headers or "anthropic-beta" in request.headers
