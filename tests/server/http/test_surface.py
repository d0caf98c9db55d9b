"""The shape of errors is that of the surface."""

from __future__ import annotations

from typing import Any

import pytest

from mlxrun.server.http.surface import Endpoint, Surface
from tests.helpers.server_fakes import (
    MINI,
    run_server,
    server_config,
)


@pytest.mark.parametrize("path", ["/v1/nope", "/v1/models/nope", "/v1/files/file-x", "/v1/messages/batches"])
async def test_errors_have_the_shape_that_the_client_reads(path: str) -> None:
    """Anthropic's for a request with its headers, whatever the path; else that of the path."""
    async with run_server(server_config(api_keys={"a": "secret"})) as s:
        for headers in ({"anthropic_version": "2023-06-01"}, {"anthropic_beta": "files-api-2025-04-14"}):
            reply = await s.get(path, **headers)
            found = reply.json
            assert found["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
            assert (found["type"], found["request_id"][:4]) == ("error", "req_")
            expected = "not_found_error" if path.endswith("nope") and "models" not in path else None
            assert found["error"]["type"] == (expected or "authentication_error")
        plain = (await s.get(path)).json
        assert ("type" in plain) == path.startswith("/v1/messages")
        assert "error" in plain


async def test_errors_of_aiohttp_have_the_shape_of_the_surface(caplog: pytest.LogCaptureFixture) -> None:
    async def handler(request: Any) -> Any:
        from aiohttp import web

        raise web.HTTPUnsupportedMediaType(reason="no form")

    refusing = Surface("refusing", (Endpoint("POST", "/refuse", handler, "x"),), MINI.error_body)
    async with run_server(surfaces=[refusing]) as s:
        reply = await s.post("/refuse", {})
        assert (reply.status, reply.json["text"]) == (415, "no form")
