"""What operators ask the server: health, status, metrics and the cache."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from mlxrun.api.prepared import ApiContext
from mlxrun.api.text.media.images import MediaLoader
from mlxrun.engine.client import EngineClient
from mlxrun.model.load_check.report import LoadCheckReport
from mlxrun.model.run.compute_methods import ComputeMethods
from mlxrun.server.endpoints import admin
from mlxrun.server.engine_state import LoadedEngine
from mlxrun.server.http.access import CONFIG
from tests.helpers.server_fakes import MINI, make_chat_body, run_server

ONLY = [MINI, admin.SURFACE]


# -- what an operator asks ------------------------------------------------------------------------------


async def test_health() -> None:
    async with run_server(surfaces=ONLY) as s:
        for path in ("/health", "/health/ready", "/health/live"):
            reply = await s.get(path)
            assert (reply.status, reply.json["status"]) == (200, "ok")
        s.state.draining = True
        reply = await s.get("/health")
        assert (reply.status, reply.json["status"]) == (503, "draining")
        assert (await s.get("/health/live")).status == 200


async def test_a_load_check_that_differs_later_is_said() -> None:
    """The process must be restarted, as methods that are in use are wrong. New requests are refused."""
    async with run_server(surfaces=ONLY) as s:
        s.engine.load_check = LoadCheckReport(ComputeMethods(), ())
        assert (await s.get("/health")).status == 200
        s.engine.load_check = replace(s.engine.load_check, surprise="decode ragged: logits differ")
        for path in ("/health", "/health/ready", "/health/live"):
            reply = await s.get(path)
            assert (reply.status, reply.json["status"]) == (503, "dead")
            assert "decode ragged: logits differ; start again" in reply.json["reason"]
        assert (await s.post("/mini", make_chat_body())).status == 503
        assert (await s.get("/v1/status")).json["load_check"]["surprise"] == "decode ragged: logits differ"


async def test_while_the_model_loads() -> None:
    """Requests get 503 and Retry-After in their surface's shape; health says why."""
    async with run_server(surfaces=ONLY, loaded=False) as s:
        reply = await s.get("/health")
        assert (reply.status, reply.json["status"], reply.headers["Retry-After"]) == (503, "loading", "5")
        assert (await s.get("/health/live")).status == 200
        reply = await s.post("/mini", make_chat_body())
        assert (reply.status, reply.json["mini"], reply.headers["Retry-After"]) == (503, "loading", "5")
        for path in ("/v1/status", "/v1/cache", "/metrics", "/openapi.json"):
            assert (await s.get(path)).status == 200
        config = s.app[CONFIG]
        context = ApiContext(s.engine.model_info, config, MediaLoader(config.media, None))
        s.state.attach(LoadedEngine(cast(EngineClient, s.engine), context, {}))
        assert (await s.post("/mini", make_chat_body())).status == 200


async def test_the_cache_is_shown_and_cleared() -> None:
    async with run_server(surfaces=ONLY) as s:
        s.engine.counts = {"entries": 4, "memory_bytes": 400}
        shown = {"backend": "memory", "entries": 4, "memory_bytes": 400, "pinned": []}
        assert (await s.get("/v1/cache")).json == shown
        for method, path in (("DELETE", "/v1/cache"), ("POST", "/v1/cache/clear")):
            before = s.engine.cleared
            reply = await s.request(method, path)
            assert (reply.status, reply.json["cleared"]) == (200, True)
            assert s.engine.cleared == before + 1


@pytest.mark.parametrize("path", ["/v1/cache/clear", "/v1/requests/x/cancel"])
async def test_endpoints_without_fields_refuse_fields(path: str) -> None:
    """Nothing is ignored; an empty object is what some clients send."""
    async with run_server(surfaces=ONLY) as s:
        for body, said in ((b'{"x": 1}', "x: unknown parameter"), (b"[1]", "body: expected"), (b"{", "JSON")):
            reply = await s.request("POST", path, body)
            assert reply.status == 400 and said in reply.json["error"]["message"], body
        assert s.engine.cleared == 0
        for body in (b"", b" {} "):
            assert (await s.request("POST", path, body)).status == (404 if "cancel" in path else 200)
