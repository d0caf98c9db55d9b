"""Encodings of bodies: those that are decoded, and the refusal of all others in the shape of each API."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import pytest

from mlxrun.server.endpoints import anthropic, ollama, openai, responses, transcriptions
from mlxrun.server.http.body_encoding import ENCODINGS
from tests.helpers.raw_clients import ONLY
from tests.helpers.server_fakes import make_chat_body, make_script, run_server
from tests.robustness.test_server_fuzz_bodies import HI

SURFACES = [openai.SURFACE, anthropic.SURFACE, responses.SURFACE, ollama.SURFACE, transcriptions.SURFACE]
MISSING = [
    each for each in ("br", "zstd") if each not in ENCODINGS
]  # which aiohttp knows, and has no library for
CHAT = {"messages": HI, "max_tokens": 4}
REFUSED = ["compress", "gzip, gzip", "utf-8"]


def check_shape(path: str, found: dict[str, Any]) -> str:
    """The message of an error, once its shape is that of the path's API."""
    error = found["error"]
    if path == "/api/chat":
        return str(error)
    if path == "/v1/messages":
        assert found["type"] == "error" and found["request_id"].startswith("req_")
        assert error["type"] == "invalid_request_error"
    else:
        assert (error["type"], error["param"]) == ("invalid_request_error", None)
        assert error["code"] == "unsupported_content_encoding"
    return str(error["message"])


@pytest.mark.parametrize("encoding", REFUSED)
@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat", "/v1/audio/transcriptions"],
)
async def test_an_encoding_that_is_not_decoded_is_refused(path: str, encoding: str) -> None:
    """The body is valid JSON without it, and a form is no exception."""
    async with run_server(surfaces=SURFACES, script=make_script("An answer.")) as s:
        reply = await s.post(path, json.dumps(CHAT).encode(), Content_Encoding=encoding)
        assert reply.status == 415, reply.body
        said = check_shape(path, reply.json)
        assert said.startswith(f"the Content-Encoding '{encoding}' is not supported: ")
        assert "gzip or deflate" in said and s.engine.requests == []
        assert reply.headers["Accept-Encoding"] == ", ".join(ENCODINGS)
        assert reply.headers["x-request-id"].startswith("req_")
        await s.settle()
        assert (await s.post("/v1/chat/completions", CHAT)).status == 200


@pytest.mark.parametrize("encoding", ["gzip", "GZip", "deflate", "identity", ""])
async def test_what_is_decoded(encoding: str) -> None:
    body = json.dumps(make_chat_body()).encode()
    encode = {"gzip": gzip.compress, "deflate": zlib.compress}.get(encoding.lower(), bytes)
    async with run_server(surfaces=ONLY) as s:
        assert (await s.post("/mini", encode(body), Content_Encoding=encoding)).status == 200


async def test_a_request_without_a_body_may_name_any() -> None:
    async with run_server(surfaces=ONLY) as s:
        assert (await s.get("/v1/status", Content_Encoding="nothing")).status == 200


@pytest.mark.parametrize("encoding", MISSING)
async def test_an_encoding_whose_library_is_missing_is_refused_by_aiohttp(encoding: str) -> None:
    async with run_server(surfaces=SURFACES) as s:
        assert (await s.post("/v1/messages", CHAT, Content_Encoding=encoding)).status == 400
