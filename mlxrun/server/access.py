"""What a request must pass before its handler runs: an id, and a host and an origin that are allowed."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection

from aiohttp import web

from mlxrun.config.contradictions import allowed_host, is_address, is_loopback
from mlxrun.config.settings import ServerSettings
from mlxrun.errors import ConfigError, Forbidden
from mlxrun.text.field_errors import quote

ID_HEADER = "x-request-id"
_ID = web.RequestKey("id", str)
_SANE = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


def give_id(request: web.BaseRequest, taken: Collection[str]) -> str:
    """Names the request: as the client wants where that is sane and free, else by a new id."""
    asked = request.headers.get(ID_HEADER, "")
    usable = _SANE.fullmatch(asked) is not None and asked not in taken
    request[_ID] = rid = asked if usable else f"req_{secrets.token_hex(12)}"
    return rid


def named(request: web.Request) -> bool:
    """Whether it has a name."""
    return _ID in request


def request_id(request: web.Request) -> str:
    """The id that `give_id` gave."""
    return request[_ID]


class AllowedSites:
    """By which names the server may be called, and which web pages may use it.

    A page can have its own name point to this machine (DNS rebinding); its browser then takes the server for
    the page's own, but the Host header has that name. ConfigError for an entry of server.allowed_hosts that
    is no name.
    """

    def __init__(self, settings: ServerSettings) -> None:
        names = [_allowed(host) for host in settings.allowed_hosts]
        self._any = "*" in names
        self._names = frozenset(names) | ({_plain(settings.host)} - {"0.0.0.0", "::"})
        self._origins = settings.cors_origins
        # With keys the key is the protection. Names for other machines are known to the operator alone.
        watched = is_loopback(settings.host) or bool(names)
        self._watching = watched and not settings.api_keys and not self._any

    def check_host(self, request: web.Request) -> None:
        """Forbidden if the request is for another name. One without a Host comes from no browser, and an
        address is no name that could be pointed here."""
        if not self._watching:
            return
        for host in request.headers.getall("Host", ()):
            name = _plain(host)
            if not self._is_fixed(name):
                raise Forbidden(
                    f"this server is not known as {quote(name)} (the Host header): name it in "
                    "server.allowed_hosts, or have clients send keys (server.api_keys)"
                )

    def check_origin(self, request: web.Request) -> None:
        """Forbidden if a page of another site has a browser change something here: browsers send such
        requests without asking, and only keep the answer from the page."""
        origin = request.headers.get("Origin")
        if origin is None or request.method in _SAFE_METHODS:
            return
        own = origin.partition("://")[2] == request.host and self._is_fixed(_plain(request.host))
        if not own and self.allowed_origin(request) is None:
            raise Forbidden(f"pages of {quote(origin)} may not use this server: see server.cors_origins")

    def allowed_origin(self, request: web.Request) -> str | None:
        """What a browser is told in Access-Control-Allow-Origin; None: nothing."""
        origin = request.headers.get("Origin")
        if origin is None:
            return None
        return "*" if "*" in self._origins else origin if origin in self._origins else None

    def _is_fixed(self, name: str) -> bool:
        """Whether no stranger can make this name mean this machine, by its DNS entry."""
        return self._any or name in self._names or is_address(name) or _is_loopback_name(name)


def _plain(host: str) -> str:
    """The name or address of a Host header, without port and brackets."""
    name = host.rpartition(":")[0] if re.search(r"(^[^:]*|\]):\d*$", host) else host
    return name.strip("[]").lower().removesuffix(".")


def _allowed(host: str) -> str:
    name = allowed_host(host)
    if name is None:
        raise ConfigError(f"server.allowed_hosts: {host!r} is neither a name nor an address nor '*'")
    return name


def _is_loopback_name(name: str) -> bool:
    return is_loopback(name) or name.endswith(".localhost")
