"""Errors for paths and methods that do not exist, and what they suggest."""

from __future__ import annotations

import asyncio

import pytest

from mlxrun.server.endpoints import admin, openai
from mlxrun.server.http.surface import ROUTES
from tests.helpers.server_fakes import MINI, Serving, run_server

ONLY = [MINI, admin.SURFACE]


async def reported(s: Serving, method: str, path: str) -> str:
    reply = await s.request(method, path)
    assert reply.status == 404
    return str(reply.json["error"]["message"])


async def test_an_unknown_path_suggests_paths_of_the_method() -> None:
    async with run_server(surfaces=[openai.SURFACE, admin.SURFACE]) as s:
        got = await reported(s, "GET", "/v1/model")
        assert got.startswith(
            "the path /v1/model does not exist (did you mean '/v1/models'?); paths for GET: /v1/models, "
        )
        assert got.endswith(", ... (/openapi.json lists all paths)") and "completions" not in got
        assert len(got.partition("GET: ")[2].partition(", ...")[0].split(", ")) == 5
        got = await reported(s, "POST", "/chat/completions")
        assert "(did you mean '/v1/chat/completions'?); paths for POST: /v1/chat/completions, " in got
        got = await reported(s, "POST", "/v1/models/")
        assert "'/v1/models'" not in got  # which takes no POST
        got = await reported(s, "DELETE", "/v1/caches")
        assert got == (
            "the path /v1/caches does not exist (did you mean '/v1/cache'?); paths for DELETE: /v1/cache, "
            "/v1/cache/pinned/{id}"
        )
        got = await reported(s, "PUT", "/qqq")
        assert got == "the path /qqq does not exist; no path accepts PUT (/openapi.json lists all paths)"


async def test_the_suggestion_names_the_openapi_document_only_if_it_is_on() -> None:
    async with run_server(surfaces=[openai.SURFACE]) as s:
        got = await reported(s, "POST", "/v1/nope")
        assert "paths for POST: /v1/" in got and "openapi" not in got


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("POST", "/v1/models", "GET, HEAD"),
        ("GET", "/v1/chat/completions", "POST"),
        ("PUT", "/v1/cache", "DELETE, GET, HEAD"),
        ("GET", "/v1/requests/x/cancel", "POST"),
        ("POST", "/v1/models/some/name", "GET, HEAD"),
    ],
)
async def test_a_wrong_method_names_the_right_ones(method: str, path: str, allow: str) -> None:
    async with run_server(surfaces=[openai.SURFACE, admin.SURFACE]) as s:
        reply = await s.request(method, path)
        assert (reply.status, reply.headers["Allow"]) == (405, allow)
        assert (
            reply.json["error"]["message"]
            == f"{method} is not allowed for {path}; use {allow.replace(', ', ' or ')}"
        )


async def test_paths_that_only_look_like_others() -> None:
    """A path of the API that mlxrun lacks is no id; CONNECT has a host and a port in place of a path."""
    async with run_server() as s:
        got = await reported(s, "POST", "/v1/responses/compact")
        assert got.startswith("/v1/responses/compact is not supported: conversations are not compacted")
        assert "'compact'" in await reported(s, "GET", "/v1/responses/compact")
        address = s.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(address[0], int(address[2]))
        writer.write(b"CONNECT example.com:443 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        reply = await reader.read()
        writer.close()
        assert b" 404 " in reply and b"the path example.com:443 does not exist" in reply


async def test_the_methods_of_a_path() -> None:
    """A path of its own has none of a pattern that it also matches."""
    async with run_server() as s:
        routes = s.app[ROUTES]
        assert routes.list_methods("/v1/responses/input_tokens") == ["POST"]
        assert routes.list_methods("/v1/responses/resp_1") == ["DELETE", "GET", "HEAD"]
        assert routes.list_methods("/v1/models/a/b") == ["GET", "HEAD"]
        assert routes.list_methods("/nothing") == []
