"""What operators ask the server: health, status, metrics and the cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from mlxrun.api.prepared import ApiContext
from mlxrun.api.text.media.images import MediaLoader
from mlxrun.config.settings import CacheSettings, Config, EngineSettings, SchedulerSettings, ServerSettings
from mlxrun.engine.client import EngineClient
from mlxrun.model.load.model_info import load_model_info
from mlxrun.model.load_check.report import LoadCheckReport
from mlxrun.model.run.compute_methods import ComputeMethods
from mlxrun.server.app import list_surfaces
from mlxrun.server.endpoints import admin
from mlxrun.server.engine_state import LoadedEngine
from mlxrun.server.http.access import CONFIG
from tests.api.test_prompt_prefix import BODIES, QUESTION, ask_again
from tests.helpers.server_fakes import MINI, Serving, make_chat_body, run_server

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


WARM = "/v1/cache/warm"
CHAT = BODIES["/v1/chat/completions"]


@pytest.mark.parametrize("url", BODIES)
async def test_a_body_of_each_api_is_warmed(url: str) -> None:
    """The endpoint is known by the body's form; nothing but the prefix is computed."""
    async with run_server(surfaces=ONLY) as s:
        reply = await s.post(WARM, {"body": BODIES[url], "name": "agent"})
        assert reply.status == 200, reply.json
        (request,) = s.engine.requests
        tokens = reply.json["prefix_tokens"]
        assert request.params.max_tokens == 0 and len(request.prompt) == tokens + 1
        assert reply.json["pinned"]["tokens"] == tokens and reply.json["pinned"]["name"] == "agent"
        assert reply.json["cached_tokens"] == 0 and reply.json["seconds"] >= 0
        assert (await s.get("/v1/cache")).json["pinned"] == [reply.json["pinned"]]


async def test_a_prefix_is_unpinned_once() -> None:
    async with run_server(surfaces=ONLY) as s:
        made = (await s.post(WARM, {"body": CHAT})).json["pinned"]
        path = f"/v1/cache/pinned/{made['id']}"
        assert (await s.request("DELETE", path)).json == {"id": made["id"], "unpinned": True}
        assert (await s.get("/v1/cache")).json["pinned"] == []
        reply = await s.request("DELETE", path)
        assert reply.status == 404 and "no pinned prefix" in reply.json["error"]["message"]


REFUSED: list[tuple[Any, str]] = [
    ({}, "body: is required"),
    ({"body": "text"}, "body"),
    ({"body": CHAT, "url": "/v1/completions"}, "url: '/v1/completions' is not one of"),
    ({"body": CHAT, "name": "x" * 101}, "name"),
    ({"body": CHAT, "ttl": 5}, "ttl"),
    ({"body": {**CHAT, "top_p": 7}}, "top_p"),
    ({"body": {**CHAT, "messages": [{"role": "user", "content": "x"}] * 4097}}, "server.max_messages"),
]


@pytest.mark.parametrize(("body", "text"), REFUSED)
async def test_refusals_name_the_field(body: Any, text: str) -> None:
    async with run_server(surfaces=ONLY) as s:
        reply = await s.post(WARM, body)
        assert reply.status == 400 and text in reply.json["error"]["message"], reply.json
        assert not s.engine.requests


async def test_a_cache_that_holds_nothing_says_so() -> None:
    async with run_server(surfaces=ONLY) as s:
        s.engine.pins = False
        reply = await s.post(WARM, {"body": CHAT})
        assert reply.status == 400 and reply.json["error"]["code"] == "not_cached"
        assert "cache.backend: none" in reply.json["error"]["message"]


# -- the embedded model ---------------------------------------------------------------------------------


async def ask(s: Serving, url: str, question: str) -> tuple[int, int]:
    """The tokens of the prompt, and those of it that were cached."""
    body = {**ask_again(BODIES[url], question), "stream": False}
    limit = "max_output_tokens" if url == "/v1/responses" else "max_tokens"
    reply = await s.post(url, {**body, limit: 2, **({"n": 1} if "n" in body else {})})
    assert reply.status == 200, reply.json
    usage = reply.json["usage"]
    if url == "/v1/messages":
        return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["cache_read_input_tokens"]
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    return usage.get("prompt_tokens") or usage["input_tokens"], details["cached_tokens"]


@pytest.mark.parametrize("reproducible", [False, True])
async def test_the_first_question_of_a_client_hits(reproducible: bool) -> None:
    """On every API, and after other prompts have filled the cache; without warming it does not."""
    cache, scheduler = CacheSettings(memory_bytes=8_000_000), SchedulerSettings(chunk=32)
    engine, server = EngineSettings(reproducible=reproducible), ServerSettings(port=0)
    config = Config(cache=cache, scheduler=scheduler, server=server, engine=engine)
    client = await EngineClient.start(config, load_model_info(config.model, weights=True))
    try:
        async with run_server(config, surfaces=list_surfaces(), engine=client) as s:
            for url in BODIES:
                assert (await s.request("DELETE", "/v1/cache")).status == 200
                assert (await ask(s, url, "Anything?"))[1] == 0
                assert (await s.request("DELETE", "/v1/cache")).status == 200
                made = (await s.post(WARM, {"body": BODIES[url]})).json
                assert "pinned" in made, made
                tokens = made["pinned"]["tokens"]
                whole = made["prefix_tokens"] // 32 * 32 if reproducible else made["prefix_tokens"]
                assert tokens == whole > 32
                await fill_cache(s, client)
                assert (await ask(s, url, QUESTION))[1] == tokens
            kept = (await s.get("/v1/cache")).json
            assert [each["tokens"] for each in kept["pinned"]] == [tokens] and kept["pinned_bytes"] > 0
            again = (await s.post(WARM, {"body": BODIES[url]})).json
            assert (
                again["cached_tokens"] >= tokens - 32 and len((await s.get("/v1/cache")).json["pinned"]) == 1
            )
    finally:
        await client.close()


async def fill_cache(s: Serving, client: EngineClient) -> None:
    """Ask other things until something was evicted."""
    before = client.read_cache_counters()["evicted"]
    for n in range(100):
        text = " ".join(str(n * i) for i in range(150))
        reply = await s.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
        )
        assert reply.status == 200, reply.json
        if client.read_cache_counters()["evicted"] >= before + 40:
            return
    raise AssertionError("the cache never came to its limit")
