"""The server's frame: routes, ids, keys, origins, bodies, errors and their shapes."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from mlxrun.config.settings import ApiSettings, Config, LogSettings, ServerSettings
from mlxrun.core.errors import EngineDead, MlxrunError, OutOfMemory, Overloaded, PromptTooLong, RequestError
from mlxrun.core.request import Request
from mlxrun.core.visible_text import TextFormatter
from mlxrun.server.endpoints import admin
from mlxrun.server.http.access import ApiKeys
from mlxrun.server.http.surface import Endpoint, Surface
from tests.helpers.server_fakes import (
    MINI,
    FakeEngine,
    make_chat_body,
    make_script,
    run_server,
    server_config,
)

ONLY = [MINI, admin.SURFACE]


# -- routes ---------------------------------------------------------------------------------------------


async def test_an_answer_at_once_and_as_a_stream() -> None:
    async with run_server(surfaces=ONLY) as s:
        reply = await s.post("/mini", make_chat_body())
        assert (reply.status, reply.json["texts"]) == (200, ["Hello world!"])
        reply = await s.post("/mini", make_chat_body(stream=True))
        assert reply.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert "".join(data["text"] for _, data in reply.events) == "Hello world!"
        assert [data["end"] for _, data in reply.events][-2:] == [None, "stop"]
        await s.settle()


async def test_choices_are_merged_and_each_ends_once() -> None:
    """Several choices at once, whole and as a stream: the same texts."""
    async with run_server(surfaces=ONLY, script=lambda r: [f"answer {r.id[-1]}"]) as s:
        reply = await s.post("/mini", make_chat_body(n=5))
        assert reply.json["texts"] == [f"answer {i}" for i in range(5)]
        reply = await s.post("/mini", make_chat_body(n=5, stream=True))
        for at in range(5):
            mine = [data for _, data in reply.events if data["at"] == at]
            assert "".join(data["text"] for data in mine) == f"answer {at}"
            assert [data["end"] for data in mine if data["end"]] == ["stop"]
            assert mine[-1]["end"] == "stop"
        await s.settle()


async def test_one_choice_that_fails_ends_the_others() -> None:
    def script(request: Request) -> list[Any]:
        forever = asyncio.Event()
        return [Overloaded("no")] if request.id.endswith("-1") else ["abc", forever.wait]

    async with run_server(surfaces=ONLY, script=script) as s:
        reply = await s.post("/mini", make_chat_body(n=3))
        assert (reply.status, reply.json["mini"]) == (429, "overloaded")
        await s.settle()
        assert len(s.engine.aborted) >= 2


async def test_a_stop_string_ends_the_row() -> None:
    """The engine is told; nothing after the stop string comes out."""
    forever = asyncio.Event()
    async with run_server(surfaces=ONLY, script=make_script("one two", forever.wait)) as s:
        for stream in (False, True):
            reply = await s.post("/mini", make_chat_body(stop=" t", stream=stream))
            texts = reply.json["texts"] if not stream else ["".join(d["text"] for _, d in reply.events)]
            assert texts == ["one"]
            await s.settle()
        assert len(s.engine.aborted) == 2


async def test_unknown_paths_and_methods() -> None:
    config = Config(server=ServerSettings(port=0), apis=ApiSettings(admin=False))
    async with run_server(config, surfaces=ONLY) as s:
        reply = await s.get("/v1/chat")
        assert reply.status == 404
        assert reply.json["error"]["code"] == "not_found"
        assert "paths for GET: /health" in reply.json["error"]["message"]
        reply = await s.post("/v1/chat", b"{}")
        assert "/mini" in reply.json["error"]["message"]
        reply = await s.get("/v1/status")
        assert (reply.status, reply.json["error"]["message"]) == (
            404,
            "/v1/status is switched off (apis.admin: false)",
        )
        reply = await s.get("/mini")
        assert (reply.status, reply.headers["Allow"], reply.json["mini"]) == (
            405,
            "POST",
            "method_not_allowed",
        )


# -- keys -----------------------------------------------------------------------------------------------

KEYS = {"alice": "sesame-1", "bob": "sesame-2"}


async def test_a_key_is_accepted_in_either_header() -> None:
    async with run_server(server_config(api_keys=KEYS), surfaces=ONLY) as s:
        for headers in (
            {},
            {"Authorization": "Bearer"},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Basic sesame-1"},
            {"x_api_key": "sesame-"},
            {"x_api_key": "\u00e9"},
        ):
            reply = await s.post("/mini", make_chat_body(), **headers)
            assert (reply.status, reply.json["mini"]) == (401, "invalid_api_key"), headers
            assert reply.headers["WWW-Authenticate"] == "Bearer"
            assert "sesame" not in reply.body.decode()
        assert s.engine.requests == []
        for headers in (
            {"Authorization": "Bearer sesame-1"},
            {"Authorization": "bearer  sesame-1"},
            {"x_api_key": "sesame-1"},
            {"x_api_key": "sesame-1", "Authorization": "Bearer other"},
        ):
            assert (await s.post("/mini", make_chat_body(), **headers)).status == 200, headers
        assert (await s.get("/v1/status")).status == 401
        assert (await s.get("/health")).status == 200


async def test_keys_have_names() -> None:
    """Policy fair shares among the server's keys; without any, among the users of bodies."""
    async with run_server(server_config(api_keys=KEYS), surfaces=ONLY) as s:
        await s.post("/mini", make_chat_body(user="me"), x_api_key="sesame-2")
        assert s.engine.requests[-1].fairness_key == "bob"
    async with run_server(surfaces=ONLY) as s:
        await s.post("/mini", make_chat_body(user="me"))
        assert s.engine.requests[-1].fairness_key == "me"


def test_all_keys_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that it takes says nothing about which key is near."""
    calls: list[bytes] = []

    def compare(given: bytes, digest: bytes) -> bool:
        calls.append(digest)
        assert len(given) == len(digest) == 32
        return given == digest

    monkeypatch.setattr("mlxrun.server.http.access.hmac.compare_digest", compare)
    keys = ApiKeys({"a": "1", "b": "2", "c": "3"})
    assert [keys.find_name(secret) for secret in ("1", "3", "x")] == ["a", "c", None]
    assert len(calls) == 9


# -- browsers -------------------------------------------------------------------------------------------


async def test_cors_is_off_by_default() -> None:
    async with run_server(surfaces=ONLY) as s:
        for origin in ("https://evil.example", "null"):
            reply = await s.request("OPTIONS", "/mini", Origin=origin, Access_Control_Request_Method="POST")
            assert reply.status == 403 and "add it to server.cors_origins" in reply.json["text"]
            assert "Access-Control-Allow-Origin" not in reply.headers
            assert (await s.request("OPTIONS", "/mini", Origin=origin)).status == 204, "no preflight"
            reply = await s.post("/mini", make_chat_body(), Origin=origin)
            assert (reply.status, reply.json["mini"]) == (403, "forbidden")
        assert s.engine.requests == []
        own = s.url  # a page of this server itself
        assert (await s.post("/mini", make_chat_body(), Origin=own)).status == 200


async def test_a_rebound_name_is_refused() -> None:
    """DNS rebinding: a page whose own name now leads here is still a page of another site."""
    async with run_server(surfaces=ONLY) as s:
        for host, status in (
            ("evil.example:80", 403),
            ("evil.example", 403),
            ("localhost:80", 200),
            ("127.0.0.1", 200),
            ("[::1]:80", 200),
        ):
            reply = await s.post("/mini", make_chat_body(), Origin=f"http://{host}", Host=host)
            assert reply.status == status, host


async def test_cors_for_the_origins_of_the_config() -> None:
    config = server_config(cors_origins=("https://chat.example.com",), api_keys=KEYS)
    async with run_server(config, surfaces=ONLY) as s:
        origin = {"Origin": "https://chat.example.com"}
        reply = await s.request(
            "OPTIONS",
            "/mini",
            Access_Control_Request_Method="POST",
            Access_Control_Request_Headers="authorization,content-type",
            **origin,
        )
        assert reply.status == 204
        assert reply.headers["Access-Control-Allow-Origin"] == "https://chat.example.com"
        assert reply.headers["Access-Control-Allow-Methods"] == "POST"
        assert reply.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
        for stream in (False, True):
            reply = await s.post("/mini", make_chat_body(stream=stream), x_api_key="sesame-1", **origin)
            assert reply.status == 200
            assert reply.headers["Access-Control-Allow-Origin"] == "https://chat.example.com"
            assert reply.headers["Vary"] == "Origin"
            assert {"x-request-id", "request-id"} < {
                *reply.headers["Access-Control-Expose-Headers"].split(", ")
            }, "which the clients of both APIs read"
        refused = await s.post("/mini", make_chat_body(), **origin)  # an error can be read by the page too
        assert refused.headers["Access-Control-Allow-Origin"] == "https://chat.example.com"
        other = await s.get("/health", Origin="https://evil.example")
        assert "Access-Control-Allow-Origin" not in other.headers


async def test_cors_for_all() -> None:
    async with run_server(server_config(cors_origins=("*",)), surfaces=ONLY) as s:
        reply = await s.post("/mini", make_chat_body(), Origin="https://any.example")
        assert (reply.status, reply.headers["Access-Control-Allow-Origin"]) == (200, "*")


# -- bodies ---------------------------------------------------------------------------------------------


async def test_prompts_are_limited() -> None:
    """With the numbers, and before the engine sees it."""
    async with run_server(server_config(max_prompt_tokens=15), surfaces=ONLY) as s:
        reply = await s.post("/mini", make_chat_body())
        assert (reply.status, reply.json["mini"]) == (400, "context_length_exceeded")
        assert reply.json["text"] == "the prompt has 20 tokens; server.max_prompt_tokens is 15"
        assert s.engine.requests == []
        await s.settle()


# -- errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "code", "retry"),
    [
        (RequestError("no", param="x"), 400, "invalid_request", None),
        (PromptTooLong("long"), 400, "context_length_exceeded", None),
        (OutOfMemory("huge"), 400, "context_length_exceeded", None),
        (Overloaded("full"), 429, "overloaded", "1"),
        (EngineDead("gone"), 503, "engine_unavailable", "5"),
        (MlxrunError("odd"), 500, "internal_error", None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_errors_of_the_engine(
    error: MlxrunError, status: int, code: str, retry: str | None, stream: bool
) -> None:
    """429 with Retry-After where the queue is full, 503 for memory; before the first event a stream's
    error has its own status too."""
    async with run_server(surfaces=ONLY, script=make_script(error)) as s:
        reply = await s.post("/mini", make_chat_body(stream=stream))
        assert (reply.status, reply.json["mini"]) == (status, code)
        assert reply.headers.get("Retry-After") == retry
        assert reply.json["id"] == reply.headers["x-request-id"]
        await s.settle()


async def test_an_error_in_a_stream_is_an_event() -> None:
    async with run_server(surfaces=ONLY, script=make_script("ab", EngineDead("gone"))) as s:
        reply = await s.post("/mini", make_chat_body(stream=True))
        assert reply.status == 200
        assert reply.events[-1] == (None, {"error": "engine_unavailable"})
        assert "".join(data.get("text", "") for _, data in reply.events) == "ab"


def broken(started: bool) -> Surface:
    """A surface with a bug in it, which quotes a prompt."""

    async def handler(request: Any) -> Any:
        from aiohttp import web

        if started:
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(b"data: 1\n\n")
        raise KeyError("the prompt was: " + " ".join(("TOP", "SECRET")))

    return Surface("broken", (Endpoint("GET", "/broken", handler, "fails"),), MINI.error_body)


async def test_a_bug_is_a_500_and_is_logged_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with run_server(surfaces=[broken(False)]) as s:
        reply = await s.get("/broken")
        assert (reply.status, reply.json["mini"]) == (500, "KeyError")
        assert "KeyError" in caplog.text
        shown = "\n".join(map(TextFormatter().format, caplog.records))
        assert "test_middleware.py" in shown
        assert "TOP SECRET" not in shown
        assert (await s.get("/health")).status == 200


async def test_a_path_cannot_write_lines_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mlxrun")
    async with run_server(surfaces=ONLY) as s:
        assert (await s.get("/x%0Areq_1%20POST%20/admin%20200")).status == 404
    assert "req_1 POST" not in [line[:10] for line in caplog.text.split("\n")]
    assert "GET /x%0Areq_1%20POST%20/admin%20200 404" in caplog.text


async def test_a_field_cannot_write_lines_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mlxrun")
    async with run_server() as s:
        reply = await s.post("/v1/chat/completions", {"messages": [], "x\nreq_1 POST": 1})
    assert reply.status == 400
    assert "req_1 POST" not in [line[:10] for line in caplog.text.split("\n")]
    assert "x\\nreq_1" in caplog.text


async def test_a_refused_request_has_one_line_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mlxrun.server.http.request_log")
    async with run_server() as s:
        assert (await s.post("/v1/chat/completions", {"messages": [], "temperature": 9})).status == 400
    (said,) = [each.getMessage() for each in caplog.records if each.name == "mlxrun.server.http.request_log"]
    assert " POST /v1/chat/completions 400 - " in said and said.endswith("s invalid_value: temperature")


async def test_a_bug_in_a_stream_cuts_the_connection() -> None:
    """Nobody may take half an answer for a whole one."""
    import aiohttp

    async with run_server(surfaces=[broken(True)]) as s:
        with pytest.raises(aiohttp.ClientError):
            await s.get("/broken")
        await s.settle()
        assert (await s.get("/health")).status == 200


async def test_prompts_are_logged_only_with_log_prompts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "mlxrun")
    secret = make_chat_body(messages=[{"role": "user", "content": "XYZZY"}])
    wrong = {"messages": [{"role": "XYZZY", "content": "x"}]}
    for prompts in (False, True):
        caplog.clear()
        config = Config(server=ServerSettings(port=0), log=LogSettings(prompts=prompts))
        async with run_server(config, surfaces=ONLY, script=make_script("PLUGH")) as s:
            assert (await s.post("/mini", secret)).status == 200
            assert (await s.post("/mini", secret | {"stream": True})).status == 200
            assert (await s.post("/mini", wrong)).status == 400
        assert ("XYZZY" in caplog.text) == prompts
        assert ("PLUGH" in caplog.text) == prompts
        assert "POST /mini 200" in caplog.text


async def test_the_fields_of_the_body_reach_the_engine() -> None:
    """A twin of the fakes: what reaches the engine is the prepared request."""
    engine = FakeEngine(script=make_script("x" * 50))
    async with run_server(surfaces=ONLY, engine=engine) as s:
        reply = await s.post("/mini", make_chat_body(max_tokens=7, seed=3))
        assert reply.json["texts"] == ["x" * 7]
        assert engine.requests[0].params.max_tokens == 7
        assert engine.requests[0].params.seed == 3
