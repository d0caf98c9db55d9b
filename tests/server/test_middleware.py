"""The server's frame: routes, ids, keys, origins, bodies, errors and their shapes."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from typing import Any

import pytest

from mlxrun.config.settings import ApiSettings, Config, LogSettings, ServerSettings
from mlxrun.errors import (
    EngineDead,
    MlxrunError,
    OutOfMemory,
    Overloaded,
    PromptTooLong,
    RequestError,
)
from mlxrun.scheduler.request import Request
from mlxrun.server import json_bodies
from mlxrun.server.access import ApiKeys
from mlxrun.server.endpoints import admin
from mlxrun.server.routes import ROUTES
from mlxrun.server.surface import Endpoint, Surface
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


async def test_every_get_endpoint_answers_head() -> None:
    async with run_server(surfaces=ONLY) as s:
        for path in ("/health", "/v1/status"):
            reply = await s.request("HEAD", path)
            assert (reply.status, reply.body) == (200, b"")
        assert (await s.request("HEAD", "/mini")).status == 405


async def test_every_surface_is_registered_and_can_be_switched_off() -> None:
    from mlxrun.server.app import list_surfaces

    surfaces = list_surfaces()
    names = [surface.name for surface in surfaces]
    assert sorted(names) == sorted(ApiSettings.__dataclass_fields__)
    off = Config(server=ServerSettings(port=0), apis=ApiSettings(**dict.fromkeys(names, False)))
    async with run_server(off) as s:
        for surface in surfaces:
            for endpoint in surface.endpoints:
                path = endpoint.path.replace("{", "").replace("}", "")
                reply = await s.request(endpoint.method, path)
                assert reply.status == 404, endpoint.path
                assert f"apis.{surface.name}" in reply.json["error"]["message"]
        assert (await s.get("/health")).status == 200


async def test_openapi_has_every_endpoint() -> None:
    async with run_server(server_config(api_keys={"a": "secret"})) as s:
        document = (await s.get("/openapi.json", x_api_key="secret")).json
        for surface in s.app[ROUTES].surfaces:
            for endpoint in surface.endpoints:
                operation = document["paths"][endpoint.path][endpoint.method.lower()]
                assert ("security" in operation) == (not endpoint.public)
                assert ("requestBody" in operation) == (endpoint.body is not None)
        chat = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]
        assert "messages" in chat["application/json"]["schema"]["properties"]
        assert document["openapi"].startswith("3.1")


# -- ids ------------------------------------------------------------------------------------------------


async def test_every_response_has_a_request_id() -> None:
    async with run_server(surfaces=ONLY) as s:
        seen = set()
        for path in ("/health", "/nope", "/v1/status"):
            seen.add((await s.get(path)).headers["x-request-id"])
        stream = await s.post("/mini", make_chat_body(stream=True))
        seen.add(stream.headers["x-request-id"])
        assert len(seen) == 4
        assert all(rid.startswith("req_") for rid in seen)
        reply = await s.post("/mini", make_chat_body(), x_request_id="mine-1")
        assert reply.headers["x-request-id"] == reply.json["id"] == "mine-1"


@pytest.mark.parametrize("bad", ["a b", "x" * 129, "\u00e9", "a;b", ""])
async def test_an_odd_request_id_is_replaced(bad: str) -> None:
    async with run_server(surfaces=ONLY) as s:
        reply = await s.get("/health", x_request_id=bad)
        assert reply.headers["x-request-id"].startswith("req_")


async def test_the_id_of_a_request_in_flight_is_not_reused() -> None:
    gate = asyncio.Event()
    async with run_server(surfaces=ONLY, script=make_script(gate.wait, "ok")) as s:
        tasks = [
            asyncio.create_task(s.post("/mini", make_chat_body(), x_request_id="same")) for _ in range(2)
        ]
        while len(s.live) < 2:
            await asyncio.sleep(0)
        gate.set()
        ids = {(await task).headers["x-request-id"] for task in tasks}
        assert len(ids) == 2
        assert "same" in ids


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

    monkeypatch.setattr("mlxrun.server.access.hmac.compare_digest", compare)
    keys = ApiKeys({"a": "1", "b": "2", "c": "3"})
    assert [keys.find_name(secret) for secret in ("1", "3", "x")] == ["a", "c", None]
    assert len(calls) == 9


# -- browsers -------------------------------------------------------------------------------------------


async def test_cors_is_off_by_default() -> None:
    async with run_server(surfaces=ONLY) as s:
        reply = await s.request(
            "OPTIONS", "/mini", Origin="https://evil.example", Access_Control_Request_Method="POST"
        )
        assert reply.status == 204
        assert "Access-Control-Allow-Origin" not in reply.headers
        reply = await s.post("/mini", make_chat_body(), Origin="https://evil.example")
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
        refused = await s.post("/mini", make_chat_body(), **origin)  # an error can be read by the page too
        assert refused.headers["Access-Control-Allow-Origin"] == "https://chat.example.com"
        other = await s.get("/health", Origin="https://evil.example")
        assert "Access-Control-Allow-Origin" not in other.headers


async def test_cors_for_all() -> None:
    async with run_server(server_config(cors_origins=("*",)), surfaces=ONLY) as s:
        reply = await s.post("/mini", make_chat_body(), Origin="https://any.example")
        assert (reply.status, reply.headers["Access-Control-Allow-Origin"]) == (200, "*")


# -- bodies ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "the body is empty"),
        (b" \n", "the body is empty"),
        (b"{", "not JSON: Expecting property name"),
        (b'{"a": 1,}', "not JSON"),
        (b"{'a': 1}", "not JSON"),
        (b'{"a": 1} x', "not JSON: Extra data at line 1 column 10"),
        (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
        (b'\xef\xbb\xbf{"a": 1}', "not JSON"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": [-Infinity]}', "-Infinity is not a JSON number"),
        (b'{"a": 1e999}', "1e999 is too large"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' occurs twice"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"a": "tab\there"}', "not JSON: Invalid control character"),
    ],
    ids=lambda value: repr(value)[:30],
)
async def test_bad_json(raw: bytes, said: str) -> None:
    """A 400 that says where, in the surface's shape; also where a worker thread parses."""
    async with run_server(surfaces=ONLY) as s:
        for data in (raw, raw + b" " * (json_bodies.SMALL_BODY + 1)):
            reply = await s.post("/mini", data)
            assert reply.status == 400
            assert reply.json["mini"] == "invalid_json"
            assert said in reply.json["text"]
        assert s.engine.requests == []


async def test_the_body_is_limited_however_it_comes() -> None:
    async with run_server(server_config(max_body_bytes=1000), surfaces=ONLY) as s:
        fits = json.dumps(make_chat_body()).encode().ljust(1000)
        assert (await s.post("/mini", fits)).status == 200

        async def pieces() -> Any:
            for _ in range(200):
                yield b" " * 10

        for data in (fits + b" ", pieces()):
            async with s.http.post(s.url + "/mini", data=data) as response:
                assert response.status == 413
                assert "1000" in (await response.json())["text"]
                assert response.headers["Connection"] == "close"
        bomb = gzip.compress(b" " * 1_000_000)
        reply = await s.post("/mini", bomb[:900], Content_Encoding="gzip")
        assert reply.status in (400, 413)
        assert (await s.post("/mini", fits)).status == 200


async def test_messages_are_limited() -> None:
    async with run_server(server_config(max_messages=3), surfaces=ONLY) as s:
        message = {"role": "user", "content": "x"}
        assert (await s.post("/mini", {"messages": [message] * 3})).status == 200
        for name in ("messages", "input"):
            reply = await s.post("/mini", {name: [message] * 4})
            assert reply.status == 400
            assert f"{name}: 4 items are more than 3" in reply.json["text"]


async def test_prompts_are_limited() -> None:
    """With the numbers, and before the engine sees it."""
    async with run_server(server_config(max_prompt_tokens=15), surfaces=ONLY) as s:
        reply = await s.post("/mini", make_chat_body())
        assert (reply.status, reply.json["mini"]) == (400, "context_length_exceeded")
        assert reply.json["text"] == "the prompt has 20 tokens; server.max_prompt_tokens is 15"
        assert s.engine.requests == []
        await s.settle()


async def test_a_body_that_stops_arriving_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_bodies, "BODY_TIMEOUT", 0.05)
    async with run_server(surfaces=ONLY) as s:
        host, port = s.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /mini HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        assert b" 504 " in await reader.readline()
        writer.close()
        await s.settle()


# -- errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "code", "retry"),
    [
        (RequestError("no", param="x"), 400, "invalid_request", None),
        (PromptTooLong("long"), 400, "context_length_exceeded", None),
        (OutOfMemory("huge"), 503, "out_of_memory", None),
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
        assert "test_middleware.py" in caplog.text
        assert "TOP SECRET" not in caplog.text
        assert (await s.get("/health")).status == 200


async def test_errors_of_aiohttp_have_the_shape_of_the_surface(caplog: pytest.LogCaptureFixture) -> None:
    async def handler(request: Any) -> Any:
        from aiohttp import web

        raise web.HTTPUnsupportedMediaType(reason="no form")

    refusing = Surface("refusing", (Endpoint("POST", "/refuse", handler, "x"),), MINI.error_body)
    async with run_server(surfaces=[refusing]) as s:
        reply = await s.post("/refuse", {})
        assert (reply.status, reply.json["text"]) == (415, "no form")


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
    caplog.set_level(logging.INFO, "mlxrun.server.request_log")
    async with run_server() as s:
        assert (await s.post("/v1/chat/completions", {"messages": [], "temperature": 9})).status == 400
    (said,) = [each.getMessage() for each in caplog.records if each.name == "mlxrun.server.request_log"]
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
