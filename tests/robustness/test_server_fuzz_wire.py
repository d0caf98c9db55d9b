"""What comes over the wire and is not quite HTTP, or not quite a body: answered or closed, never a 5xx, never
a hang; and named mistakes, each told in its surface's own shape, with its place.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

from mlxrun.config.settings import Config, ServerSettings
from tests.helpers.server_fakes import Serving, make_chat_body
from tests.helpers.tokenizers import STRICT, FakeModelInfo
from tests.robustness.test_server_fuzz import CONFIG, VISION, nothing_left, site
from tests.robustness.test_server_fuzz_bodies import CHAT, COMPLETION, COUNT, HI, MESSAGES, RESPONSES

SECRET = b"the-secret-of-a-prompt"
BODY = json.dumps({"messages": [{"role": "user", "content": SECRET.decode()}], "max_tokens": 2}).encode()
POST = b"POST /v1/chat/completions HTTP/1.1"
CHUNKED = b"Transfer-Encoding: chunked\r\n"


def http(head: bytes = b"", body: bytes = BODY, line: bytes = POST, *, length: int | None = -1) -> bytes:
    """A request as bytes. `length`: of the body as announced; -1: as it is."""
    size = b"" if length is None else b"Content-Length: %d\r\n" % (len(body) if length == -1 else length)
    return line + b"\r\nHost: localhost\r\n" + size + head + b"\r\n" + body


# Each with the statuses that may come; 0: the connection is closed without one.
WIRE: dict[str, tuple[bytes, tuple[int, ...]]] = {
    "as it should be": (http(), (200,)),
    "in chunks": (http(CHUNKED, b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY), length=None), (200,)),
    "an early end": (http(length=len(BODY) + 50), (0,)),
    "chunks that end early": (http(CHUNKED, b"%x\r\n%s" % (len(BODY), BODY), length=None), (0,)),
    "a chunk that ends early": (http(CHUNKED, b"ff\r\n{", length=None), (0,)),
    "only the head": (http(body=b"", length=50), (0,)),
    "half a head": (POST + b"\r\nHo", (0,)),
    "no chunk": (http(CHUNKED, b"zz\r\nabc\r\n0\r\n\r\n" + BODY, length=None), (400,)),
    "a chunk without end": (http(CHUNKED, b'3\r\n{"m' + BODY, length=None), (400,)),
    "a huge chunk": (http(CHUNKED, b"F" * 18 + b"\r\n{\r\n", length=None), (400,)),
    "two lengths": (http(b"Content-Length: 5\r\n"), (400,)),
    "length and chunks": (http(CHUNKED), (400,)),
    "a negative length": (http(b"Content-Length: -5\r\n", length=None), (400,)),
    "no length": (http(length=None), (400,)),
    "a huge length": (http(length=10**15), (413,)),
    "an unknown transfer": (http(b"Transfer-Encoding: nothing\r\n", length=None), (400,)),
    "no gzip": (http(b"Content-Encoding: gzip\r\n"), (400,)),
    "gzip that ends early": (
        http(b"Content-Encoding: gzip\r\n", zlib.compress(BODY, wbits=31)[:-20]),
        (400,),
    ),
    "an unknown encoding": (http(b"Content-Encoding: nothing\r\n"), (415,)),
    "an encoding without its library": (http(b"Content-Encoding: br\r\n"), (400, 415)),
    "an unknown expectation": (http(b"Expect: nothing\r\n"), (417,)),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", (400,)),
    "a version to come": (http(line=b"GET /health HTTP/9.9"), (400,)),
    "bytes": (b"\x00\x01" + SECRET + b"\r\n\r\n", (400,)),
    "TLS": (bytes.fromhex("16030100a5010000a10303") + bytes(90) + b"\r\n\r\n", (400,)),
    "a header without colon": (http(b"a b c\r\n"), (400,)),
    "a header of 100 kB": (http(b"x: " + b"y" * 100_000 + b"\r\n"), (400,)),
    "5,000 headers": (http(b"".join(b"x%d: y\r\n" % i for i in range(5000))), (400,)),
    "a NUL in a header": (http(b"x-request-id: a\x00b\r\n"), (400,)),
    "a key of bytes": (http(b"Authorization: Bearer \xff\xfe\r\n"), (200,)),
    "an id of bytes": (http(b"x-request-id: \xff\xfe\r\n"), (200,)),
    "a path of bytes": (http(line=b"GET /v1/\xff\xfe HTTP/1.1", body=b""), (400,)),
    "a long path": (http(line=b"GET /" + b"a" * 9000 + b" HTTP/1.1", body=b""), (400,)),
    "a method that is none": (http(line=b"G@T /health HTTP/1.1", body=b""), (400,)),
    "another method": (http(line=POST.replace(b"POST", b"PUT")), (405,)),
    "a proxy's path": (http(line=b"CONNECT a:1 HTTP/1.1", body=b""), (404,)),
    "no path": (http(line=b"OPTIONS * HTTP/1.1", body=b""), (404,)),
    "a preflight of bytes": (
        http(
            b"Origin: http://a\r\nAccess-Control-Request-Method: POST\r\n"
            b"Access-Control-Request-Headers: \xff\r\n",
            b"",
            POST.replace(b"POST", b"OPTIONS"),
        ),
        (204,),
    ),
    "bytes behind": (http() + b"\x00\xff\r\n\r\n", (200, 400)),
}


async def send(s: Serving, raw: bytes, *, over: bool) -> tuple[int, bytes]:
    """The status of the first answer, 0 if none comes before the connection is closed; and all that came.
    `over`: the client closes its side."""
    host, port = s.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    got = b""
    try:
        writer.write(raw)
        if over:
            writer.write_eof()
        async with asyncio.timeout(60):
            while part := await reader.read(65_536):
                got += part
                if got.count(b"\r\n\r\n") > got.count(b" 100 Continue"):
                    break
    except ConnectionError:
        pass
    finally:
        writer.close()
    return int(got.split(b" ", 2)[1]) if got else 0, got


async def test_what_is_not_quite_http(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing of what was sent is in the log, and no traceback."""
    caplog.set_level(logging.INFO)
    config = Config(server=ServerSettings(port=0, max_body_bytes=10_000, cors_origins=("http://a",)))
    async with site(tmp_path, config=config) as s:
        for name, (raw, wanted) in WIRE.items():
            status, got = await send(s, raw, over=wanted == (0,))
            assert status in wanted, (name, status, got[:300])
        await nothing_left(s)
    for record in caplog.records:
        assert record.levelno < logging.ERROR and record.exc_info is None, record
        assert SECRET.decode() not in record.getMessage(), record


# -- named mistakes -------------------------------------------------------------------------------------


def bomb(side: int = 30_000) -> str:
    """A small PNG of many pixels."""

    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    raw = b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head)
    raw += part(b"IDAT", zlib.compress(bytes((side // 8 + 1) * 1000), 9)) + part(b"IEND", b"")
    return f"data:image/png;base64,{base64.b64encode(raw).decode()}"


def shows(url: str) -> dict[str, Any]:
    """Bodies of the three surfaces that show an image."""
    kind, _, data = url.partition(";base64,")
    source = {"type": "base64", "media_type": kind.removeprefix("data:"), "data": data}
    return {
        CHAT: said([{"type": "image_url", "image_url": {"url": url}}]),
        MESSAGES: said([{"type": "image", "source": source}]) | CLAUDE,
        RESPONSES: {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]},
    }


def said(content: Any, role: Any = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}]}


CLAUDE = {"model": "claude-x", "max_tokens": 4}
# Of each: its path, the body, and what the message names.
MISTAKES: dict[str, tuple[str, Any, str]] = {
    "no messages": (CHAT, {"messages": []}, "messages"),
    "no messages (A)": (MESSAGES, {"messages": []} | CLAUDE, "messages"),
    "no input": (RESPONSES, {"input": []}, "input"),
    "role": (CHAT, said("x", "wizard"), "messages[0].role"),
    "role (A)": (MESSAGES, said("x", "wizard") | CLAUDE, "messages.0.role"),
    "role (R)": (RESPONSES, {"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
    "part": (CHAT, said([{"type": "hologram"}]), "messages[0].content[0]"),
    "part (A)": (MESSAGES, said([{"type": "hologram"}]) | CLAUDE, "messages.0.content.0"),
    "part (R)": (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "hologram"}]}]},
        "input[0].content[0]",
    ),
    "a message": (CHAT, {"messages": ["x"]}, "messages[0]"),
    "a message (A)": (MESSAGES, {"messages": ["x"]} | CLAUDE, "messages.0"),
    "an item": (RESPONSES, {"input": [5]}, "input[0]"),
    "content": (CHAT, said(5), "messages[0].content"),
    "stops": (CHAT, {"messages": HI, "stop": ["x"] * 10_000}, "stop"),
    "stops (A)": (MESSAGES, {"messages": HI, "stop_sequences": ["x"] * 10_000} | CLAUDE, "stop_sequences"),
    "biases": (CHAT, {"messages": HI, "logit_bias": {str(i): 1 for i in range(9000)}}, "logit_bias"),
    "length": (CHAT, {"messages": HI, "max_tokens": -1}, "max_tokens"),
    "length (A)": (MESSAGES, {"messages": HI, "model": "claude-x", "max_tokens": -1}, "max_tokens"),
    "length (R)": (RESPONSES, {"input": "x", "max_output_tokens": -1}, "max_output_tokens"),
    "temperature": (CHAT, {"messages": HI, "temperature": -0.1}, "temperature"),
    "NaN": (CHAT, b'{"messages": [], "temperature": NaN}', "NaN"),
    "infinity (A)": (MESSAGES, b'{"temperature": -Infinity}', "-Infinity"),
    "a large number (R)": (RESPONSES, b'{"temperature": 1e999}', "1e999"),
    "token ids": (COMPLETION, {"prompt": [65, 99_999]}, "prompt[1]"),
    "negative ids": (COMPLETION, {"prompt": [[65], [-1]]}, "prompt[1][0]"),
    "ids to text": ("/detokenize", {"tokens": [99_999]}, "tokens[0]"),
    "the context": (CHAT, said("word " * 5000), "4096"),
    "the context (A)": (MESSAGES, said("word " * 5000) | CLAUDE, "4096"),
    "the context (R)": (RESPONSES, {"input": "word " * 5000}, "4096"),
    "prompt and answer": (CHAT, {"messages": HI, "max_tokens": 4096}, "4096"),
    "a model": (CHAT, {"messages": HI, "model": "gpt-9"}, "gpt-9"),
    "a model (A)": (MESSAGES, {"messages": HI} | CLAUDE, "claude-x"),
    "a model (R)": (RESPONSES, {"input": "x", "model": "gpt-9"}, "gpt-9"),
    "JSON": (CHAT, b'{"messages": [}', "line 1 column 15"),
    "JSON (A)": (MESSAGES, b'{"messages"', "line 1"),
    "JSON (R)": (RESPONSES, b"", "empty"),
    "UTF-8": (CHAT, b'{"a": "\xff"}', "byte 7"),
    "keys": (CHAT, b'{"messages": [], "n": 1, "n": 2}', "'n'"),
    "keys (A)": (MESSAGES, b'{"a": {"b": 1, "b": 1}}', "'b'"),
    "depth": (CHAT, b"[" * 90_000, "nested"),
    "depth (A)": (MESSAGES, b'{"a":' * 9_000, "nested"),
    "halves": (CHAT, said("\ud800"), "messages[0].content"),
    "halves (A)": (MESSAGES, said("\udfff") | CLAUDE, "messages.0.content"),
    "halves (R)": (RESPONSES, {"input": "\ud800"}, "input"),
    "an array": (CHAT, b"[1]", "object"),
    "a word": (MESSAGES, b'"x"', "object"),
    "null": (RESPONSES, b"null", "object"),
    "fields": (CHAT, {"messages": HI, "max_token": 5}, "max_tokens"),
    "fields (A)": (MESSAGES, {"messages": HI, "max_token": 5} | CLAUDE, "max_token"),
    "fields (R)": (RESPONSES, {"input": "x", "max_output_token": 5}, "max_output_token"),
    "size": (CHAT, b" " * 100_001, "100000"),
    "size (A)": (MESSAGES, b" " * 100_001, "100000"),
    "count (A)": (COUNT, said("x", "wizard") | {"model": "claude-x"}, "messages.0.role"),
}
IMAGES = {"base64": "data:image/png;base64,%%%%", "no image": "data:image/png;base64,AAAA", "a bomb": bomb()}
PLACES = {CHAT: "messages[0].content[0]", MESSAGES: "messages.0.content.0", RESPONSES: "input[0].content[0]"}
MISTAKES |= {
    f"{name} {path}": (path, body, PLACES[path])
    for name, url in IMAGES.items()
    for path, body in shows(url).items()
}
NAMED = FakeModelInfo(names=("served",))


def host_of(name: str) -> FakeModelInfo:
    """Names are only asked for where a mistake is about them."""
    return NAMED if name.startswith("a model") else VISION


def reported(path: str, raw: bytes) -> str:
    """The message and the field, once the shape is that of the surface."""
    found = json.loads(raw)
    error = found["error"]
    if path in (MESSAGES, COUNT):
        assert found["type"] == "error" and set(error) == {"type", "message"} and found["request_id"]
        return str(error["message"])
    assert set(error) == {"message", "type", "param", "code"}
    return f"{error['param']}: {error['message']}"


@pytest.mark.parametrize("name", MISTAKES)
async def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, name: str) -> None:
    path, body, place = MISTAKES[name]
    async with site(tmp_path, model_info=host_of(name)) as s:
        reply = await s.post(path, body)
        wanted = {"size": 413, "size (A)": 413}.get(name, 404 if name.startswith("a model") else 400)
        assert reply.status == wanted, reply.body[:300]
        assert place in reported(path, reply.body), reply.body[:500]
        assert s.engine.requests == []
        await nothing_left(s) if wanted != 404 else await s.settle()


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_a_template_that_refuses_the_roles(tmp_path: Path, path: str) -> None:
    """What the template says is told, and the place."""
    turns = [{"role": "assistant", "content": "x"}, *HI]
    body = (
        {"input": turns} if path == RESPONSES else {"messages": turns} | (CLAUDE if path == MESSAGES else {})
    )
    async with site(tmp_path, model_info=FakeModelInfo(chat_template=STRICT)) as s:
        reply = await s.post(path, body)
        assert reply.status == 400
        assert "Roles must alternate" in reported(path, reply.body)
        await nothing_left(s)


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_a_wrong_key(tmp_path: Path, path: str) -> None:
    config = Config(server=ServerSettings(port=0, api_keys={"alice": "k" * 32}))
    async with site(tmp_path, config=config) as s:
        for headers in (
            {},
            {"Authorization": "Bearer x"},
            {"x_api_key": "k" * 31},
            {"Authorization": "k" * 32},
        ):
            reply = await s.post(path, {}, **headers)
            assert reply.status == 401 and "key" in reported(path, reply.body)


async def test_a_key_that_comes_twice_among_many(tmp_path: Path) -> None:
    """Found in one pass: it would be hours otherwise, on a thread that holds the others up."""
    pairs = ",".join(f'"a{i}":1' for i in range(99_000))
    config = Config(server=ServerSettings(port=0, max_body_bytes=CONFIG.server.max_body_bytes * 100))
    async with site(tmp_path, config=config) as s:
        data = io.BytesIO(f'{{{pairs},"a98999":2}}'.encode())
        async with asyncio.timeout(60), s.http.post(s.url + CHAT, data=data) as response:
            assert response.status == 400 and "'a98999'" in reported(CHAT, await response.read())
        assert (await s.post(CHAT, make_chat_body())).status == 200
