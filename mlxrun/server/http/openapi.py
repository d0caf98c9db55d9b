"""/openapi.json, made of the endpoints that are switched on and of the schemas that validate their bodies."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from mlxrun import __version__
from mlxrun.server.http.surface import Endpoint, Surface


def make_document(surfaces: Iterable[Surface], *, needs_keys: bool) -> dict[str, Any]:
    """The OpenAPI 3.1 document. `needs_keys`: whether requests need an API key."""
    paths: dict[str, dict[str, Any]] = {}
    for surface in surfaces:
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
        content = {"application/json": {"schema": dict(endpoint.body)}}
        found["requestBody"] = {"required": True, "content": content}
    if needs_key:
        found["security"] = [{"bearer": []}, {"key": []}]
    return found
