"""By which names a server may be called, what an unknown path is told, and what is no HTTP at all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxrun.config.settings import ServerSettings
from mlxrun.core.errors import ConfigError
from mlxrun.server.endpoints import admin
from mlxrun.server.http.access import AllowedSites
from tests.helpers.server_fakes import MINI, Serving, make_chat_body, run_server, server_config
from tests.robustness.test_server_fuzz_wire import send

ONLY = [MINI, admin.SURFACE]
KEYS = {"alice": "sesame-1"}
GOOD = (
    "localhost",
    "localhost:8000",
    "LocalHost.:80",
    "chat.localhost:80",
    "127.0.0.1:8000",
    "127.8.9.1",
    "[::1]:8000",
    "[::1]",
    "192.168.1.7",
    "10.0.0.5:8000",
    "0.0.0.0:8000",
    "[::2]:80",
    "[fe80::1]",
)
EVIL = (
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "notlocalhost",
    "127.0.0.1.evil.example:80",
    "10.0.0.5.evil.example",
    "10.0.0",
    "10.0.0.256",
    "[::2].evil.example:80",
    "a:b:80",
    "",
)


# -- names ----------------------------------------------------------------------------------------------


async def ask(s: Serving, host: str | None, line: str = "GET /v1/status HTTP/1.1") -> tuple[int, bytes]:
    """A request with this Host, sent byte by byte as it is."""
    head = f"{line}\r\n" + ("" if host is None else f"Host: {host}\r\n") + "Connection: close\r\n\r\n"
    return await send(s, head.encode(), over=False)


async def test_a_page_with_a_rebound_name_reads_nothing() -> None:
    """DNS rebinding: a GET has no Origin then, and its answer is the page's to read. An address
    is no name that the page could have."""
    async with run_server(surfaces=ONLY) as s:
        for host in GOOD:
            assert (await ask(s, host))[0] == 200, host
        for host in EVIL:
            status, raw = await ask(s, host)
            error = json.loads(raw.partition(b"\r\n\r\n")[2])["error"]
            assert (status, error["code"]) == (403, "forbidden"), host
            assert "server.allowed_hosts" in error["message"]
            assert "config_hash" not in raw.decode()
            assert (await ask(s, host, "GET /health HTTP/1.1"))[0] == 200  # for probes


@pytest.mark.parametrize(
    ("line", "status"),
    [("GET /nothing", 404), ("OPTIONS /mini", 204), ("HEAD /v1/status", 200), ("DELETE /v1/cache", 200)],
)
async def test_a_foreign_host_name_is_refused_for_every_path(line: str, status: int) -> None:
    """Paths that are not there say nothing either; and the twin."""
    async with run_server(surfaces=ONLY) as s:
        assert (await ask(s, "evil.example", f"{line} HTTP/1.1"))[0] == 403
        assert (await ask(s, "localhost", f"{line} HTTP/1.1"))[0] == status


async def test_the_error_has_the_shape_of_its_surface() -> None:
    async with run_server(surfaces=ONLY) as s:
        reply = await s.post("/mini", make_chat_body(), Host="evil.example")
        assert (reply.status, reply.json["mini"]) == (403, "forbidden")
        assert "'evil.example'" in reply.json["text"] and "server.allowed_hosts" in reply.json["text"]
        assert s.engine.requests == []


async def test_a_request_without_a_host_header_is_served() -> None:
    """Probes and old proxies speak HTTP/1.0."""
    async with run_server(surfaces=ONLY) as s:
        assert (await ask(s, None, "GET /v1/status HTTP/1.0"))[0] == 200


@pytest.mark.parametrize("line", ["Host: localhost\r\nHost: evil.example", "Host: evil.example\r\nHost: x"])
async def test_a_second_host_header_is_refused(line: str) -> None:
    async with run_server(surfaces=ONLY) as s:
        raw = f"GET /v1/status HTTP/1.1\r\n{line}\r\n\r\n".encode()
        assert (await send(s, raw, over=False))[0] in (400, 403)


async def test_host_names_of_the_config_are_allowed() -> None:
    """Behind a proxy: the name in the browser's address line, also for pages of the server's own."""
    async with run_server(server_config(allowed_hosts=("AI.example.com", "::2")), surfaces=ONLY) as s:
        for host in (*GOOD, "ai.example.com", "ai.example.com:443", "[::2]:80"):
            assert (await ask(s, host))[0] == 200, host
        for host in ("example.com", "evil.ai.example.com"):
            assert (await ask(s, host))[0] == 403, host
        for origin, status in (("https://ai.example.com", 200), ("https://evil.example", 403)):
            reply = await s.post("/mini", make_chat_body(), Origin=origin, Host="ai.example.com")
            assert reply.status == status, origin


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({}, True),
        ({"api_keys": KEYS}, False),
        ({"allowed_hosts": ("*",)}, False),
        ({"host": "localhost"}, True),
        ({"host": "127.0.0.2"}, True),
        ({"host": "0.0.0.0", "allow_public": True}, False),
        ({"host": "0.0.0.0", "allow_public": True, "allowed_hosts": ("ai.example.com",)}, True),
        ({"host": "gpu-1.lan", "allow_public": True, "allowed_hosts": ("ai.example.com",)}, True),
    ],
    ids=str,
)
def test_when_host_names_are_checked(fields: dict[str, Any], refused: bool) -> None:
    """With keys the key is the protection; for other machines the names are the operator's to give."""
    sites = AllowedSites(ServerSettings(**fields))
    for host in ("evil.example", fields.get("host", "localhost"), "localhost:80"):
        request = _Request(host)
        if host == "evil.example" and refused:
            with pytest.raises(Exception, match="evil"):
                sites.check_host(request)  # type: ignore[arg-type]
        elif host != "0.0.0.0":
            sites.check_host(request)  # type: ignore[arg-type]


class _Request:
    """As much of a request as a name needs."""

    def __init__(self, host: str) -> None:
        from multidict import CIMultiDict

        self.headers = CIMultiDict({"Host": host})


@pytest.mark.parametrize(
    "name", ["http://ai.example.com", "ai.example.com:443", "ai.example.com/", "*.example.com", "", "a b"]
)
def test_an_invalid_allowed_host_is_a_config_error(name: str) -> None:
    """Said at the start, not by a refusal later on."""
    with pytest.raises(ConfigError, match=r"server\.allowed_hosts: .* is neither a host name"):
        AllowedSites(ServerSettings(allowed_hosts=("ok.example", name)))
