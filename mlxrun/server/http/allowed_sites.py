"""Which web pages may use the server, and by which host names it may be called."""

from __future__ import annotations

import re

from aiohttp import web

from mlxrun.config.server_settings import is_address, is_loopback, normalize_host
from mlxrun.config.settings import ServerSettings
from mlxrun.core.errors import ConfigError, Forbidden
from mlxrun.core.field_errors import quote
from mlxrun.server.http.access import SAFE_METHODS


class AllowedSites:
    """The host names by which the server may be called, and the web pages that may use it.

    A page can make its own name resolve to this machine (DNS rebinding). Its browser then takes the server
    for the page's own site, but the Host header still has that name. ConfigError for an item of
    server.allowed_hosts that is not a host name.
    """

    def __init__(self, settings: ServerSettings) -> None:
        names = [_parse_allowed_host(host) for host in settings.allowed_hosts]
        self._any_host = "*" in names
        self._names = frozenset(names) | ({_strip_port(settings.host)} - {"0.0.0.0", "::"})
        self._origins = settings.cors_origins
        self._has_keys = bool(settings.api_keys)
        # With API keys the key protects the server. Names for other machines are known to the operator alone.
        is_limited = is_loopback(settings.host) or bool(names)
        self._checks_hosts = is_limited and not self._has_keys and not self._any_host

    def check_host(self, request: web.Request) -> None:
        """Raise Forbidden if the Host header has a name that is not allowed.

        IP addresses are allowed, since no page can make one resolve to this machine. So are requests without
        a Host header, since no browser sends them."""
        if not self._checks_hosts:
            return
        for host in request.headers.getall("Host", ()):
            name = _strip_port(host)
            if not self._is_allowed_host(name):
                raise Forbidden(
                    f"the host name {quote(name)} (the Host header) is not allowed: add it to "
                    "server.allowed_hosts, or have clients send API keys (server.api_keys)"
                )

    def check_origin(self, request: web.Request) -> None:
        """Raise Forbidden if a page of another site makes a browser change something here. The browser's
        question whether the page may do so (a preflight) is refused too.

        Browsers send some requests without asking first, and only hide the response from the page. With API
        keys, a page of the Host header's name is the server's own under any name: other pages have no key."""
        origin = request.headers.get("Origin")
        if origin is None or (request.method in SAFE_METHODS and not is_preflight(request)):
            return
        is_named = self._has_keys or self._is_allowed_host(_strip_port(request.host))
        is_own = is_named and origin.partition("://")[2] == request.host
        if not is_own and self.find_allowed_origin(request) is None:
            text = f"web pages of {quote(origin)} may not use this server: add it to server.cors_origins"
            raise Forbidden(text)

    def find_allowed_origin(self, request: web.Request) -> str | None:
        """Return the Access-Control-Allow-Origin for the request's page; None if the page is not allowed."""
        origin = request.headers.get("Origin")
        if origin is None:
            return None
        return "*" if "*" in self._origins else origin if origin in self._origins else None

    def _is_allowed_host(self, name: str) -> bool:
        """Whether no stranger can make this name resolve to this machine."""
        if self._any_host or name in self._names or is_address(name):
            return True
        return is_loopback(name) or name.endswith(".localhost")


ALLOWED_SITES = web.AppKey("allowed_sites", AllowedSites)


def is_preflight(request: web.Request) -> bool:
    """Tell whether a browser asks if a page may send a request."""
    return request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers


def _strip_port(host: str) -> str:
    """The name or address of a Host header, without port and brackets."""
    name = host.rpartition(":")[0] if re.search(r"(^[^:]*|\]):\d*$", host) else host
    return name.strip("[]").lower().removesuffix(".")


def _parse_allowed_host(host: str) -> str:
    name = normalize_host(host)
    if name is None:
        raise ConfigError(f"server.allowed_hosts: {host!r} is neither a host name, an IP address nor '*'")
    return name
