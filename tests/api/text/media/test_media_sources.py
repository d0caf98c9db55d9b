"""Image URLs: limits, and no way into the network behind us. Servers run on 127.0.0.1 only."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.resolver import ThreadedResolver
from aiohttp.test_utils import TestServer
from PIL import Image

from mlxrun.api.text.media import media_sources
from mlxrun.api.text.media.images import MediaLoader
from mlxrun.api.text.media.media_kinds import MediaRef
from mlxrun.api.text.media.media_sources import is_public
from mlxrun.config.settings import MediaSettings
from mlxrun.core.errors import MediaError
from tests.helpers.tokenizers import FakeModelInfo

SEEN = web.AppKey("seen", list[str])  # the paths of all requests
TestServer.__test__ = False  # type: ignore[attr-defined]


def png() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (3, 2), "red").save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
async def server() -> AsyncIterator[TestServer]:
    async def image(request: web.Request) -> web.Response:
        assert "Cookie" not in request.headers
        return web.Response(body=png(), content_type="image/png")

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(1000):
            await response.write(b"x" * 1000)
        return response

    async def slow(_: web.Request) -> web.Response:
        await asyncio.sleep(5)
        return web.Response()

    async def redirect(_: web.Request) -> web.Response:
        raise web.HTTPFound("/image")

    async def packed(_: web.Request) -> web.Response:
        return web.Response(body=b"x", headers={"Content-Encoding": "gzip"})

    @web.middleware
    async def count(request: web.Request, handler: Any) -> Any:
        app[SEEN].append(request.path)
        return await handler(request)

    app = web.Application(middlewares=[count])
    app[SEEN] = []
    for handler in (image, endless, slow, redirect, packed):
        app.router.add_get(f"/{handler.__name__}", handler)
    server = TestServer(app, host="127.0.0.1")
    await server.start_server()
    yield server
    await server.close()


async def load(url: Any, *, public: Any = lambda _: True, **options: Any) -> Image.Image:
    settings = MediaSettings(**{"allow_urls": True, "timeout": 5.0} | options)
    loader = MediaLoader(settings, None, public=public)
    async with loader.load_images([MediaRef(str(url), "p")], FakeModelInfo(vision=True)) as images:
        return images[0]


async def refused(url: Any, **options: Any) -> str:
    with pytest.raises(MediaError) as caught:
        await load(url, **options)
    assert caught.value.param == "p"
    return str(caught.value)


async def test_an_image_is_fetched(server: TestServer) -> None:
    assert (await load(server.make_url("/image"))).size == (3, 2)
    local = f"http://localhost:{server.port}/image"
    assert (await load(local, allow_hosts=("LOCALHOST",))).size == (3, 2)
    assert "not among media.allow_hosts" in await refused(
        server.make_url("/image"), allow_hosts=("localhost",)
    )


async def test_limits(server: TestServer) -> None:
    assert "media.max_bytes (10)" in await refused(server.make_url("/image"), max_bytes=10)
    assert "media.max_bytes (5000)" in await refused(server.make_url("/endless"), max_bytes=5000)
    assert "longer than media.timeout (0.2 s)" in await refused(server.make_url("/slow"), timeout=0.2)
    assert "redirects" in await refused(server.make_url("/redirect"))
    assert "compressed" in await refused(server.make_url("/packed"))
    assert "status 404" in await refused(server.make_url("/nothing"))
    assert "cannot be fetched" in await refused("http://127.0.0.1:1/x")


async def test_only_public_addresses_are_connected_to(server: TestServer) -> None:
    """Names are checked after they are resolved, by the very address; odd spellings of addresses too."""
    port = server.port
    assert "has no public address" in await refused(f"http://localhost:{port}/image", public=is_public)
    for host in ("127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "169.254.169.254", "10.0.0.1", "0.0.0.0"):
        assert "is not a public address" in await refused(f"http://{host}:{port}/image", public=is_public)
    for host in ("2130706433", "0x7f.1", "127.1"):
        assert re.search(
            "public address|Invalid", await refused(f"http://{host}:{port}/image", public=is_public)
        )


async def test_the_checked_address_is_the_one_that_is_used(server: TestServer) -> None:
    """A name that answers differently the second time gains nothing: it is resolved once."""
    received: list[str] = []

    def once(address: str) -> bool:
        if not address[0].isdigit() and ":" not in address:
            raise ValueError(address)  # a name, as ipaddress would say
        received.append(address)
        return True

    assert (await load(f"http://localhost:{server.port}/image", public=once)).size == (3, 2)
    assert received and set(received) <= {"127.0.0.1", "::1"}


@pytest.mark.parametrize(
    "url", ["http://", "http:///x", "http://a:b@example.com/x", "http://[bad/x", "http://h:99999/"]
)
async def test_bad_urls(url: str) -> None:
    assert await refused(url, public=is_public)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("::ffff:8.8.8.8", True),
        ("64:ff9b::808:808", True),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
        ("::ffff:10.0.0.1", False),
        ("fe80::1%eth0", False),
        ("224.0.0.1", False),
        ("100.64.0.1", False),
        ("192.168.1.1", False),
        ("::", False),
        ("::1", False),
        ("::127.0.0.1", False),
        ("::10.0.0.1", False),
        ("::8.8.8.8", True),
        ("::ffff:127.0.0.1", False),
        ("::ffff:0:127.0.0.1", False),
        ("::ffff:0:8.8.8.8", True),
        ("64:ff9b:1::1", False),
        ("64:ff9b:1:ffff:ffff:ffff:808:808", False),
        ("64:ff9b::10.0.0.1", False),
        ("fec0::1", False),
        ("feff::1", False),
        ("fc00::1", False),
        ("2002:808:808::", True),
        ("2002:a00:1::1", False),
        ("2001:0:808:808:0:0:f7f7:f7f7", True),  # Teredo: 8.8.8.8 is both server and client
        ("2001:0:808:808:0:0:80ff:fffe", False),  # its client is 127.0.0.1
        ("2001:0:7f00:1:0:0:f7f7:f7f7", False),  # its server is
        ("2001:db8::1", False),
        ("100::1", False),
        ("ff0e::1", False),
        ("4000::1", False),
        ("240.0.0.1", False),
        ("255.255.255.255", False),
    ],
)
def test_public_addresses(address: str, expected: bool) -> None:
    assert is_public(address) is expected


async def test_the_address_of_the_connection_is_what_counts(
    server: TestServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resolver that is deceived, or that checks nothing, does not help: nothing is sent."""
    monkeypatch.setattr(media_sources, "make_resolver", lambda public: ThreadedResolver())
    assert "leads to no public address" in await refused(
        f"http://localhost:{server.port}/image", public=is_public
    )
    assert server.app[SEEN] == []
    assert (await load(f"http://localhost:{server.port}/image")).size == (3, 2)
    assert server.app[SEEN] == ["/image"]
