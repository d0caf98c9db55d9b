"""Uploads that end anywhere, and requests that are answered before they are read."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from tests.helpers.server_fakes import server_config
from tests.helpers.tokenizers import TOOLS, FakeModelInfo
from tests.robustness.test_server_fuzz import nothing_left, site
from tests.robustness.test_server_fuzz_bodies import CHAT, HI, MESSAGES

# aiohttp warns of forms that are none, besides raising.
pytestmark = pytest.mark.filterwarnings("ignore::aiohttp.multipart.BadContentDispositionHeader")

MODEL = FakeModelInfo(chat_template=TOOLS)
SHORT = {"messages": HI, "max_tokens": 3}
WITHIN = 60  # seconds: a hang, on whatever machine


# -- requests that are answered before they are read -------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/health", "/nothing"])
async def test_an_unknown_expectation_has_the_shape_of_its_surface(tmp_path: Path, path: str) -> None:
    async with site(tmp_path, config=server_config(), model_info=MODEL) as s:
        reply = await s.request("POST", path, b"{}", Expect="x")
        assert reply.status == 417 and reply.headers["Content-Type"].startswith("application/json")
        error = reply.json["error"]
        assert "'x'" in error["message"] and ("request_id" in reply.json) == (path == MESSAGES)
        assert (await s.post(CHAT, SHORT, Expect="100-continue")).status == 200
        await nothing_left(s)


async def test_options_name_the_methods_of_the_path(tmp_path: Path) -> None:
    config = server_config(cors_origins=("http://a",))
    cross = {"Origin": "http://a", "Access_Control_Request_Method": "POST"}
    async with site(tmp_path, config=config, model_info=MODEL) as s:
        for path, methods in {
            CHAT: "POST",
            "/health": "GET, HEAD",
            "/v1/responses/input_tokens": "POST",  # which also looks like the id of a response
            "/v1/responses/resp_1": "DELETE, GET, HEAD",
            "/v1/files": "GET, HEAD, POST",
        }.items():
            plain = await s.request("OPTIONS", path)
            assert plain.status == 204 and set(plain.headers["Allow"].split(", ")) == {
                *methods.split(", "),
                "OPTIONS",
            }
            assert "Access-Control-Allow-Methods" not in plain.headers
            preflight = await s.request("OPTIONS", path, **cross)
            assert preflight.headers["Access-Control-Allow-Methods"] == methods
            refused = await s.request("PATCH", path, Origin="http://a")
            assert (refused.status, refused.headers["Allow"]) == (405, methods)
        assert (await s.request("OPTIONS", "/nothing")).status == 404


# -- uploads ----------------------------------------------------------------------------------------------

FORM = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="x.jsonl"\r\n\r\n'
    + b'{"a": 1}\n' * 9
    + b"\r\n--b--\r\n"
)


@pytest.mark.parametrize("end", ["leaves", "says so", "chunks"])
async def test_an_upload_that_ends_anywhere(
    tmp_path: Path, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A 400, or nothing if the client left; no error in the log, and nothing on the disk."""
    async with site(tmp_path, config=server_config(), model_info=MODEL) as s:
        host, port = s.url.removeprefix("http://").split(":")
        for cut in range(0, len(FORM) - 4, 3):
            reader, writer = await asyncio.open_connection(host, int(port))
            body = FORM[:cut]
            length = b"Content-Length: %d" % (len(FORM) if end == "leaves" else cut)
            if end == "chunks":
                length, body = (
                    b"Transfer-Encoding: chunked",
                    (b"%x\r\n%s\r\n" % (cut, body) if cut else b"") + b"0\r\n\r\n",
                )
            kind = b"Content-Type: multipart/form-data; boundary=b\r\n"
            head = b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\n" + kind
            writer.write(head + length + b"\r\n\r\n" + body)
            await writer.drain()
            if end == "leaves":
                await asyncio.sleep(0.002)
                writer.transport.abort()
            else:
                answer = await asyncio.wait_for(reader.readuntil(b"\r\n"), WITHIN)
                assert b" 400 " in answer, (cut, answer)
            writer.close()
        await nothing_left(s)
        assert (await s.get("/v1/files")).json["data"] == []
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", b"{}\n", filename="x.jsonl")
        async with s.http.post(s.url + "/v1/files", data=form) as response:
            assert response.status == 200
    assert [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"] == []
