"""Reads the bytes of media: data URLs, files under the allowed folders, URLs if allowed.

The bytes of a file are limited before it is read. A URL must not let its sender reach into our network
(SSRF). So the resolver drops every address that is not public. The address of each connection is checked too,
before anything is sent. There are no redirects, cookies, compressed bodies, or proxies from the environment.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import re
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxrun.api.text.media.media_kinds import (
    AUDIO,
    BASE64_PDF,
    IMAGE,
    PDF,
    VIDEO,
    MediaLimit,
    Medium,
    find_medium,
    find_named_medium,
)
from mlxrun.config.settings import MediaSettings
from mlxrun.core.errors import MediaError
from mlxrun.core.field_errors import shorten

if TYPE_CHECKING:
    from aiohttp import ClientResponse, TCPConnector
    from aiohttp.abc import AbstractResolver
    from aiohttp.connector import Connection
    from yarl import URL

_DATA = re.compile(r"data:(?P<type>[^;,]*)(?P<options>(?:;[^;,]*)*),", re.IGNORECASE)
# How base64 of PNG, JPEG, GIF, WebP, WAV, MP3, Ogg, FLAC, MP4 and WebM begins.
_BARE_BASE64 = re.compile(
    r"(?:iVBORw0KGg|/9j/|R0lGOD|UklGR|SUQz|T2dnU|ZkxhQ|AAAA.GZ0eX|GkXfo)[A-Za-z0-9+/=]{16}"
)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")
_ANY_TYPES = ("", "application/octet-stream", "binary/octet-stream")  # the data itself says what it is
_GLOBAL = ipaddress.ip_network("2000::/3")  # all that is assigned to the public internet so far
# Prefixes of addresses that have an IPv4 address in their last 32 bits: compatible, mapped and translated
# (RFC 4291, RFC 2765), and NAT64's well-known one (RFC 6052). Its local-use one, 64:ff9b:1::/48, is private.
_EMBEDDING = tuple(
    ipaddress.ip_network(prefix) for prefix in ("::/96", "::ffff:0:0/96", "::ffff:0:0:0/96", "64:ff9b::/96")
)


def is_public(address: str) -> bool:
    """Tell whether an IP address is on the public internet. An IPv6 address that embeds IPv4 addresses is
    judged by those. ValueError if it is no address."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv4Address):
        return ip.is_global and not ip.is_multicast
    inner = [ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)] if any(ip in net for net in _EMBEDDING) else []
    inner += [ip.sixtofour] if ip.sixtofour else []
    inner += ip.teredo or ()
    if inner:
        return all(is_public(str(each)) for each in inner)
    return ip in _GLOBAL and ip.is_global and not ip.is_multicast


class MediaSources:
    """Reads the bytes of media. `base`: the folder of relative paths; None refuses paths. `public`: tells
    whether an address may be connected to."""

    def __init__(
        self, settings: MediaSettings, base: Path | None, public: Callable[[str], bool] = is_public
    ) -> None:
        self._settings = settings
        self._base = base.resolve() if base is not None else None
        self._roots = (
            [(self._base / root).resolve() for root in settings.roots] if self._base is not None else []
        )
        self._public = public

    def is_remote(self, url: str) -> bool:
        """Tell whether `read` downloads the URL."""
        scheme = _SCHEME.match(url)
        return scheme is not None and scheme[1].lower() in ("http", "https") and self._settings.allow_urls

    async def read(self, url: str, medium: Medium) -> bytes:
        if self.is_remote(url):
            return await fetch_media(
                url, self._settings, medium.find_limit(self._settings, "max_bytes"), self._public
            )
        return await asyncio.to_thread(self.read_local, url, medium)

    def read_local(self, url: str, medium: Medium = IMAGE) -> bytes:
        """Return the bytes of a data URL or a path; blocks. MediaError if they cannot be read, and for other
        URLs."""
        if not url:
            expected = f"the file is empty; expected data:{PDF.mime};base64,..."
            raise MediaError(expected if medium is PDF else "the url is empty")
        if medium is PDF and url.startswith(BASE64_PDF):
            url = f"data:{PDF.mime};base64,{url}"
        scheme = _SCHEME.match(url)
        most = medium.find_limit(self._settings, "max_bytes")
        if scheme is None and _BARE_BASE64.match(url):
            raise MediaError(f"it is base64 without its beginning; expected data:{medium.mime};base64,...")
        if scheme is None:
            return self._read_file(url, most)
        if scheme[1].lower() == "data":
            return _read_data(url, medium, most)
        if scheme[1].lower() in ("http", "https"):
            raise MediaError("URLs are not fetched; send a data: URL, or set media.allow_urls: true")
        usable = ["a data: URL"]
        if self._base is not None:
            usable.append("a path")
        if self._settings.allow_urls:
            usable.append("an http(s) URL")
        raise MediaError(f"{scheme[1]}: URLs are not supported; use {' or '.join(usable)}")

    def _read_file(self, name: str, most: MediaLimit) -> bytes:
        """Reads a file. Links are resolved before the check, so that none leads out of the roots."""
        name_shown = shorten(name)
        if self._base is None:
            raise MediaError("file paths are not supported on the server; send a data: URL")
        try:
            path = (self._base / name).resolve()
            if not any(path.is_relative_to(root) for root in self._roots):
                raise MediaError(f"{name_shown!r} is outside media.roots")
            info = path.stat()
            if not stat.S_ISREG(info.st_mode):
                raise MediaError(f"{name_shown!r} is not a file")
            most.check(info.st_size)
            with path.open("rb") as file:
                data = file.read(most.size + 1)
        except FileNotFoundError as exc:
            raise MediaError(f"{name_shown!r} does not exist (paths are relative to the job file)") from exc
        except (OSError, ValueError, RuntimeError) as exc:  # unreadable, a NUL in the name, a loop of links
            reason = exc.strerror if isinstance(exc, OSError) else str(exc)
            raise MediaError(f"{name_shown!r} cannot be read: {reason}") from exc
        most.check(len(data))
        return data


def _read_data(url: str, medium: Medium, most: MediaLimit) -> bytes:
    head = _DATA.match(url)
    wrong = MediaError(f"expected data:{medium.mime};base64,...")
    if head is None:
        raise wrong
    usable = (AUDIO, VIDEO) if medium is AUDIO else (medium,)  # of a video, the sound is read
    kind = head["type"].lower()
    named = find_named_medium(kind)
    if kind not in _ANY_TYPES and named not in usable:
        raise wrong if named is None else MediaError(f"{wrong}; the part {named.part} takes {shorten(kind)}")
    if not head["options"].lower().endswith(";base64"):
        raise MediaError("data URLs must be base64")
    most.check((len(url) - head.end()) * 3 // 4 - 2)  # at most two bytes are padding
    try:
        data = base64.b64decode(url[head.end() :].encode("ascii"), validate=True)
    except (ValueError, binascii.Error) as exc:
        raise MediaError("not valid base64") from exc
    most.check(len(data))
    if kind in _ANY_TYPES and find_medium(data, "") not in usable:
        raise wrong
    return data


async def fetch_media(
    url: str, settings: MediaSettings, most: MediaLimit, public: Callable[[str], bool] = is_public
) -> bytes:
    """Download the body of an http(s) URL within the limits of `settings`. MediaError if that fails."""
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
                headers={
                    "Accept": "image/*, application/pdf, video/*, audio/*",
                    "Accept-Encoding": "identity",
                },
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


async def _read_body(response: ClientResponse, most: MediaLimit) -> bytes:
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

    return PublicConnector(resolver=make_resolver(public), use_dns_cache=False, force_close=True)


def make_resolver(public: Callable[[str], bool]) -> AbstractResolver:
    """A resolver of names that gives only addresses for which `public` is true."""
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
