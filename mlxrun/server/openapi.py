"""/openapi.json, made of the endpoints that are on and of the schemas that check their bodies."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from mlxrun import __version__
from mlxrun.server.surface import Endpoint, Surface


def document(surfaces: Iterable[Surface], *, keys: bool) -> dict[str, Any]:
    """The OpenAPI 3.1 document. `keys`: whether requests need one."""
    paths: dict[str, dict[str, Any]] = {}
    for surface in surfaces:
        for endpoint in surface.endpoints:
            operation = _operation(endpoint, surface.name, keys and not endpoint.public)
            paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = operation
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "mlxrun", "version": __version__},
        "paths": paths,
    }
    if keys:
        found["components"] = {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            }
        }
    return found


def _operation(endpoint: Endpoint, tag: str, locked: bool) -> dict[str, Any]:
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
    if locked:
        found["security"] = [{"bearer": []}, {"key": []}]
    return found
