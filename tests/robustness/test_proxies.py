"""Caddy and nginx before a server, with the configs of docs/https.md. Skipped without the programs."""

from __future__ import annotations

import asyncio
import getpass
import io
import json
import os
import re
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.helpers.batches_server import ServerSetup, with_keys
from tests.helpers.certificates import make_trusting_context, write_certificate
from tests.helpers.command_processes import ROOT
from tests.helpers.raw_clients import cut, until
from tests.helpers.server_fakes import Serving, make_chat_body, make_script, run_server, server_config

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.parametrize("proxy", ["caddy", "nginx"]),
]
KEY = "sesame-ann-0123456789"
_NGINX = """
daemon off;
master_process off;
pid {folder}/pid;
error_log stderr;
user {user};
events {{}}
http {{
access_log off;
client_body_temp_path {folder}/body;
proxy_temp_path {folder}/proxy;
fastcgi_temp_path {folder}/fastcgi;
uwsgi_temp_path {folder}/uwsgi;
scgi_temp_path {folder}/scgi;
{server}
}}
"""
_CADDY = "{{\nadmin off\nauto_https disable_redirects\n}}\n{server}"


def find_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def write_config(folder: Path, proxy: str, port: int, upstream: str, tls: dict[str, str]) -> list[str]:
    """Write the config of the page with these addresses and files. Returns the arguments."""
    fence = {"caddy": "caddyfile", "nginx": "nginx"}[proxy]
    (server,) = re.findall(rf"```{fence}\n(.+?)```", (ROOT / "docs/https.md").read_text(), re.DOTALL)
    files = f"tls {tls['certificate']} {tls['key']}"
    for own, here in {
        "127.0.0.1:8000": upstream.partition("://")[2],
        "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
        "/etc/mlxrun/fullchain.pem": tls["certificate"],
        "/etc/mlxrun/privkey.pem": tls["key"],
        "ai.example.com {": f"https://127.0.0.1:{port} {{\n{files}",
    }.items():
        server = server.replace(own, here)
    path, whole = folder / proxy, _CADDY if proxy == "caddy" else _NGINX
    path.write_text(whole.format(folder=folder, user=getpass.getuser(), server=server))
    if proxy == "caddy":
        return ["run", "--adapter", "caddyfile", "--config", str(path)]
    return ["-p", str(folder), "-e", "stderr", "-c", str(path)]


@asynccontextmanager
async def run_proxy(folder: Path, proxy: str, upstream: str) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of the proxy before the server at `upstream`."""
    program = shutil.which(proxy, path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        pytest.skip(f"{proxy} is not installed")
    port, tls = find_port(), write_certificate(folder)
    arguments = write_config(folder, proxy, port, upstream, tls)
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            program, *arguments, stdout=log, stderr=log, env={"HOME": str(folder)}
        )
    context = ssl.create_default_context(cafile=tls["certificate"])
    try:
        await until(lambda: can_connect(port) or process.returncode is not None)
        assert process.returncode is None, (folder / "log").read_text()
        connector = aiohttp.TCPConnector(ssl=context)
        timeout = aiohttp.ClientTimeout(total=120)
        url, headers = f"https://127.0.0.1:{port}", {"Authorization": f"Bearer {KEY}"}
        async with aiohttp.ClientSession(url, connector=connector, timeout=timeout, headers=headers) as http:
            yield http
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def can_connect(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@asynccontextmanager
async def serve(folder: Path, proxy: str, *acts: Any) -> AsyncIterator[tuple[Serving, aiohttp.ClientSession]]:
    """A server that does this with each request, and a client of the proxy before it."""
    config = server_config(api_keys={"ann": KEY}, keepalive=0.2)
    async with (
        run_server(config, script=make_script(*acts)) as s,
        run_proxy(folder, proxy, s.url) as http,
    ):
        yield s, http


@pytest.mark.parametrize(
    ("path", "first"),
    [("/v1/chat/completions", b"data: "), ("/api/chat", b'{"model":')],
    ids=["sse", "lines"],
)
async def test_each_token_of_a_stream_comes_at_once(
    tmp_path: Path, proxy: str, path: str, first: bytes
) -> None:
    """The engine goes on only when the client has what it has generated. Comments come too."""
    gate = asyncio.Event()
    body = make_chat_body(model="fake", stream=True)
    async with (
        serve(tmp_path, proxy, "ab", gate.wait, "c") as (_, http),
        http.post(path, json=body) as response,
    ):
        assert response.status == 200
        async for line in response.content:
            if line.startswith(first) and b"b" in line.partition(b'"content"')[2][:8]:
                break
        if path == "/v1/chat/completions":
            while not (line := await response.content.readline()).startswith(b": decode 2"):
                assert line, "the stream was cut"
        gate.set()
        assert b'"c"' in await response.read()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_that_leaves_ends_its_request(tmp_path: Path, proxy: str, stream: bool) -> None:
    forever = asyncio.Event()
    async with serve(tmp_path, proxy, "ab", forever.wait) as (s, http):
        host, port, context = "127.0.0.1", http._base_url.port, make_trusting_context()
        _, writer = await asyncio.open_connection(host, port, ssl=context)
        data = json.dumps(make_chat_body(stream=stream))
        head = f"Host: {host}:{port}\r\nx-api-key: {KEY}\r\nContent-Length: {len(data)}"
        writer.write(f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n\r\n{data}".encode())
        await until(lambda: [live.phase for live in s.live] == ["decode"])
        cut(writer)
        await s.settle()
        assert len(s.engine.aborted) == 1


async def test_errors_and_sizes_are_those_of_the_server(tmp_path: Path, proxy: str) -> None:
    """A body of 20 MB arrives, which is over the limit of the server, and not over one of the proxy."""
    async with serve(tmp_path, proxy, "a") as (_, http):
        body = io.BytesIO(json.dumps(make_chat_body(padding="x" * 20_000_000)).encode())
        headers = {"Content-Type": "application/json"}
        async with http.post("/v1/chat/completions", data=body, headers=headers) as response:
            found = await response.json()
            assert (response.status, found["error"]["code"]) == (413, "request_too_large")
        async with http.get("/v1/nothing", headers={"x-request-id": "mine"}) as response:
            assert (response.status, response.headers["x-request-id"]) == (404, "mine")


async def test_the_page_and_its_requests_have_the_public_name(tmp_path: Path, proxy: str) -> None:
    """A page of the name that is called may send requests, others may not."""
    async with serve(tmp_path, proxy, "a") as (_, http):
        for origin, status in ((str(http._base_url).rstrip("/"), 200), ("https://127.0.0.1", 403)):
            headers = {"Origin": origin}
            async with http.post("/v1/chat/completions", json=make_chat_body(), headers=headers) as response:
                assert response.status == status


async def test_100_megabytes_are_uploaded(tmp_path: Path, proxy: str) -> None:
    """And the address of results is that of the proxy."""
    (tmp_path / "data").mkdir()
    setup = ServerSetup(tmp_path / "data", with_keys(ann=KEY), headers={"x-api-key": KEY})
    async with setup.run() as site, run_proxy(tmp_path, proxy, site.url.rstrip("/")) as http:
        form = aiohttp.FormData({"purpose": "user_data"})
        form.add_field("file", io.BytesIO(b"x" * 100_000_000), filename="a.txt")
        async with http.post("/v1/files", data=form) as response:
            assert response.status == 200, await response.text()
            found = await response.json()
            assert found["bytes"] == 100_000_000
        item = {"custom_id": "a", "params": make_chat_body(model="m", max_tokens=9)}
        async with http.post("/v1/messages/batches", json={"requests": [item]}) as response:
            made = await response.json()
        path = f"/v1/messages/batches/{made['id']}"
        while made["processing_status"] != "ended":
            async with http.get(path) as response:
                made = await response.json()
        assert made["results_url"] == f"{str(http._base_url).rstrip('/')}{path}/results"
