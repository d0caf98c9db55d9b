"""The OpenAPI document."""

from __future__ import annotations

from mlxrun.server.http.surface import ROUTES
from tests.helpers.server_fakes import (
    run_server,
    server_config,
)


async def test_openapi_has_every_endpoint() -> None:
    async with run_server(server_config(api_keys={"a": "secret"})) as s:
        document = (await s.get("/openapi.json", x_api_key="secret")).json
        for surface in (each for each in s.app[ROUTES].surfaces if each.is_api):
            for endpoint in surface.endpoints:
                operation = document["paths"][endpoint.path][endpoint.method.lower()]
                assert ("security" in operation) == (not endpoint.public)
                assert ("requestBody" in operation) == (endpoint.body is not None)
        chat = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]
        assert "messages" in chat["application/json"]["schema"]["properties"]
        assert document["openapi"].startswith("3.1")
