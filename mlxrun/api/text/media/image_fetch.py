"""Fetches an image, a PDF or a video from a URL without letting the sender reach into our network (SSRF).

What counts is the address that a connection has: it is checked before anything is sent over it. Before, the
resolver drops every address that is not public. No redirects, no cookies, no proxies from the environment, no
compressed bodies.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxrun.config.settings import MediaSettings
from mlxrun.core.errors import MediaError

if TYPE_CHECKING:
    from aiohttp import ClientResponse, TCPConnector
    from aiohttp.abc import AbstractResolver
    from aiohttp.connector import Connection
    from yarl import URL

_GLOBAL = ipaddress.ip_network("2000::/3")  # all that is assigned to the public internet so far
# Prefixes of addresses that have an IPv4 address in their last 32 bits: compatible, mapped and translated
# (RFC 4291, RFC 2765), and NAT64's well-known one (RFC 6052). Its local-use one, 64:ff9b:1::/48, is private.
_EMBEDDING = tuple(
    ipaddress.ip_network(prefix) for prefix in ("::/96", "::ffff:0:0/96", "::ffff:0:0:0/96", "64:ff9b::/96")
)


def is_public(address: str) -> bool:
    """Whether an address is on the public internet; an address that embeds others is judged by those."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv4Address):
        return ip.is_global and not ip.is_multicast
    inner = [ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)] if any(ip in net for net in _EMBEDDING) else []
    inner += [ip.sixtofour] if ip.sixtofour else []
    inner += ip.teredo or ()
    if inner:
        return all(is_public(str(each)) for each in inner)
    return ip in _GLOBAL and ip.is_global and not ip.is_multicast


@dataclass(frozen=True, slots=True)
class SizeLimit:
    """`size`: the maximum number of bytes of a file; `name`: of the setting."""

    name: str
    size: int

    def check(self, size: int) -> None:
        """Raise MediaError for a larger file."""
        if size > self.size:
            raise MediaError(f"it has more than {self.name} ({self.size})")


async def fetch_media(
    url: str, settings: MediaSettings, most: SizeLimit, public: Callable[[str], bool] = is_public
) -> bytes:
    """Downloads the body of an http(s) URL within the limits of `settings`. Raises MediaError."""
    import aiohttp

    target = _check_url(url, settings, public)
    connector = _make_connector(public)
    try:
        async with (
            aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=settings.timeout),
                auto_decompress=False,
                headers={"Accept": "image/*, application/pdf, video/*", "Accept-Encoding": "identity"},
            ) as session,
            session.get(target, allow_redirects=False) as response,
        ):
            return await _read_body(response, most)
    except TimeoutError as exc:
        raise MediaError(f"the URL took longer than media.timeout ({settings.timeout:g} s)") from exc
    except (aiohttp.ClientError, OSError, ValueError) as exc:
        raise MediaError(f"the URL cannot be fetched ({type(exc).__name__})") from exc


def _check_url(url: str, settings: MediaSettings, public: Callable[[str], bool]) -> URL:
    """Checks and parses the URL, with the same library that connects to it."""
    from yarl import URL

    try:
        target = URL(url)
        host = target.host
    except ValueError as exc:
        raise MediaError("not a valid URL") from exc
    if not host or target.user is not None or target.password is not None:
        raise MediaError("the URL must have a host, and no user or password")
    if settings.allow_hosts and host.lower() not in {name.lower() for name in settings.allow_hosts}:
        raise MediaError(f"the host {host!r} is not among media.allow_hosts")
    try:
        is_allowed = public(host)  # a literal address never reaches the resolver
    except ValueError:
        return target
    if not is_allowed:
        raise MediaError(f"{host!r} is not a public address")
    return target


async def _read_body(response: ClientResponse, most: SizeLimit) -> bytes:
    if 300 <= response.status < 400:
        raise MediaError("the URL redirects, which is not followed; give the final address")
    if response.status != 200:
        raise MediaError(f"the URL answers with status {response.status}")
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise MediaError("the URL answers with a compressed body")
    data = bytearray()
    most.check(response.content_length or 0)
    while chunk := await response.content.readany():
        data += chunk
        most.check(len(data))
    return bytes(data)


def _make_connector(public: Callable[[str], bool]) -> TCPConnector:
    import aiohttp

    class PublicConnector(aiohttp.TCPConnector):
        """Connects to public addresses only."""

        async def connect(self, *args: Any, **kwargs: Any) -> Connection:
            connection = await super().connect(*args, **kwargs)
            peer = connection.transport.get_extra_info("peername") if connection.transport else None
            if not peer or not public(peer[0]):
                connection.close()
                raise MediaError("the URL leads to no public address")
            return connection

    return PublicConnector(resolver=_make_resolver(public), use_dns_cache=False, force_close=True)


def _make_resolver(public: Callable[[str], bool]) -> AbstractResolver:
    from aiohttp.abc import AbstractResolver, ResolveResult
    from aiohttp.resolver import ThreadedResolver

    class PublicResolver(AbstractResolver):
        """Resolves a name to its public addresses only."""

        def __init__(self) -> None:
            self._inner = ThreadedResolver()

        async def resolve(
            self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
        ) -> list[ResolveResult]:
            found = [
                result for result in await self._inner.resolve(host, port, family) if public(result["host"])
            ]
            if not found:
                raise MediaError(f"{host!r} has no public address")
            return found

        async def close(self) -> None:
            await self._inner.close()

    return PublicResolver()
