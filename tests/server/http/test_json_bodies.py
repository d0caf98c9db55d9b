"""JSON bodies: strict, limited, and refused with the place of the mistake."""

from __future__ import annotations

import asyncio
import codecs
import gzip
import json
from typing import Any

import pytest

from mlxrun.server.endpoints import admin
from mlxrun.server.http import json_bodies
from mlxrun.server.http.json_bodies import json_response
from tests.helpers.server_fakes import (
    MINI,
    make_chat_body,
    run_server,
    server_config,
)

ONLY = [MINI, admin.SURFACE]


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
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": [-Infinity]}', "-Infinity is not a JSON number"),
        (b'{"a": 1e999}', "1e999 is too large"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' occurs twice"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "thousands of digits"),
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


@pytest.mark.parametrize("path", ["/mini", "/v1/requests/req_1/cancel", "/v1/cache/clear"])
@pytest.mark.parametrize("kind", ["text/plain", "Text/Plain; charset=utf", "multipart/form-data; boundary=b"])
async def test_the_types_of_forms_are_refused(path: str, kind: str) -> None:
    """A form of any web page may have one, and its body may be JSON."""
    async with run_server(surfaces=ONLY) as s:
        reply = await s.post(path, make_chat_body() if path == "/mini" else b"", Content_Type=kind)
        error = reply.json.get("error", reply.json)
        assert (reply.status, error.get("mini") or error["code"]) == (415, "unsupported_content_type")
        assert "send application/json" in (error.get("text") or error["message"])
        assert (s.engine.requests, s.engine.cleared) == ([], 0)


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "application/x-www-form-urlencoded", ""])
async def test_other_types_are_read_as_json(kind: str) -> None:
    """curl declares the body of `-d` as a URL-encoded form, and other clients declare nothing."""
    async with run_server(surfaces=ONLY) as s:
        assert (await s.post("/mini", make_chat_body(), Content_Type=kind)).status == 200


async def test_a_byte_order_mark_is_no_part_of_the_body() -> None:
    """Editors and shells of Windows write one. Files of jobs may have it too."""
    body = codecs.BOM_UTF8 + json.dumps(make_chat_body()).encode()
    async with run_server(surfaces=ONLY) as s:
        for data in (body, body + b" " * json_bodies.SMALL_BODY):
            assert (await s.post("/mini", data)).status == 200
        reply = await s.post("/mini", codecs.BOM_UTF8 + body)
        assert (reply.status, reply.json["mini"]) == (400, "invalid_json")


async def test_the_body_is_limited_however_it_comes() -> None:
    async with run_server(server_config(max_body_bytes=1000), surfaces=ONLY) as s:
        fits = json.dumps(make_chat_body()).encode().ljust(1000)
        assert (await s.post("/mini", fits)).status == 200

        async def parts() -> Any:
            for _ in range(200):
                yield b" " * 10

        for data in (fits + b" ", parts()):
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


async def test_a_body_that_stops_arriving_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_bodies, "BODY_TIMEOUT", 0.05)
    async with run_server(surfaces=ONLY) as s:
        host, port = s.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /mini HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        assert b" 504 " in await reader.readline()
        writer.close()
        await s.settle()


@pytest.mark.parametrize(
    "value", [0.1 + 0.2, -3.123456716537476, "é\u2028", "\ud800 alone", 2**70, {"a": [None]}]
)
def test_a_response_has_every_value_as_it_is(value: object) -> None:
    body = json_response({"value": value}).body
    assert isinstance(body, bytes) and json.loads(body) == {"value": value}
    assert b": " not in body and b", " not in body
