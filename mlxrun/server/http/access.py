"""The server's config, the ids of requests, and who may use it: API keys, host names and web pages."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Mapping, Set
from dataclasses import replace

from aiohttp import web

from mlxrun.config.server_settings import (
    ApiKeySettings,
    KeyRole,
    is_address,
    is_loopback,
    normalize_host,
    read_api_key,
)
from mlxrun.config.settings import Config, ServerSettings
from mlxrun.core.errors import ConfigError, Forbidden, Unauthorized
from mlxrun.core.field_errors import quote

CONFIG = web.AppKey("config", Config)
CONFIG_HASH = web.AppKey("config_hash", str)
ID_HEADER = "x-request-id"
_ID = web.RequestKey("id", str)
_VALID_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
ACTIVE_IDS = web.AppKey("active_ids", set[str])  # of all requests that are being answered


def request_id(request: web.BaseRequest, taken: Set[str] = frozenset()) -> str:
    """Return the id of a request. The first call chooses it: the client's `x-request-id` if that is valid and
    not in `taken`, else a new one."""
    if _ID not in request:
        wanted = request.headers.get(ID_HEADER, "")
        usable = _VALID_ID.fullmatch(wanted) is not None and wanted not in taken
        request[_ID] = wanted if usable else f"req_{secrets.token_hex(12)}"
    return request[_ID]


_KEY_NAME = web.RequestKey("key_name", str)
_KEY_ROLE = web.RequestKey("key_role", str)
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")  # which change nothing


class ApiKeys:
    """The API keys of a config, by name. If there are none, every request is accepted."""

    def __init__(self, keys: Mapping[str, str | ApiKeySettings]) -> None:
        self.settings: dict[str, ApiKeySettings] = {}  # by name; the keys themselves are left out
        self._digests: dict[str, bytes] = {}
        self.replace(keys)

    def replace(self, keys: Mapping[str, str | ApiKeySettings]) -> dict[str, list[str]]:
        """Use these keys from now on. Return the names that are new, gone and changed."""
        before = {name: (digest, self.settings[name]) for name, digest in self._digests.items()}
        given = {name: read_api_key(value) for name, value in keys.items()}
        role: KeyRole | None = "inference" if any(each.role == "admin" for each in given.values()) else None
        self._digests = {name: _hash_secret(each.key) for name, each in given.items()}
        self.settings = {name: replace(each, key="", role=each.role or role) for name, each in given.items()}
        after = {name: (digest, self.settings[name]) for name, digest in self._digests.items()}
        return {
            "new": [name for name in after if name not in before],
            "gone": [name for name in before if name not in after],
            "changed": [name for name in after if name in before and after[name] != before[name]],
        }

    def __bool__(self) -> bool:
        return bool(self._digests)

    def find_name(self, secret: str) -> str | None:
        """Return the name of a key, or None. All keys are compared, so the time tells nothing about them."""
        given, found = _hash_secret(secret), None
        for name, digest in self._digests.items():
            if hmac.compare_digest(given, digest):
                found = name
        return found

    def check(self, request: web.Request, role: KeyRole | None) -> None:
        """Raise Unauthorized unless the request has a valid key, and Forbidden unless that key has the role;
        None: any. Afterwards `key_name` returns its name."""
        if not self._digests:
            return
        secrets = _read_secrets(request)
        if not secrets:
            raise Unauthorized("no API key was given: send `Authorization: Bearer KEY` or `x-api-key: KEY`")
        names = [name for secret in secrets if (name := self.find_name(secret)) is not None]
        if not names:
            raise Unauthorized("the API key is not valid")
        name = request[_KEY_NAME] = names[0]
        own = self.settings[name].role
        request[_KEY_ROLE] = own or ""
        if role is not None and own not in (None, role, "admin"):
            needed = role if role == "admin" else f"{role} or admin"
            raise Forbidden(
                f"the API key {name!r} has the role {own}; {request.method} {request.path} "
                f"needs a key with the role {needed}"
            )


API_KEYS = web.AppKey("api_keys", ApiKeys)


def key_name(request: web.Request) -> str:
    """Return the name of the request's API key; empty if the server has no keys."""
    return request.get(_KEY_NAME) or ""


NO_KEY = '["", ""]'  # as `write_key` writes it for a request without a key


def write_key(request: web.Request) -> str:
    """Write who sent a request, for a header to another process of this server."""
    return json.dumps([key_name(request), request.get(_KEY_ROLE) or ""])


def adopt_key(request: web.Request, text: str) -> None:
    """Take over who sent a request from the process that has checked it."""
    request[_KEY_NAME], request[_KEY_ROLE] = json.loads(text)


def may_end(request: web.Request, owner: str) -> bool:
    """Tell whether a request may end those of the key named `owner`."""
    return may_access(key_name(request), owner) or request.get(_KEY_ROLE) == "admin"


def may_access(key: str, owner: str) -> bool:
    """Tell whether requests with the key of this name may see what the key named `owner` created. Without
    keys all may see all."""
    return not key or owner in ("", key)


def _read_secrets(request: web.Request) -> list[str]:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    token = _read_password(token) if scheme.lower() == "basic" else token.strip()
    found = [token] if scheme.lower() in ("bearer", "basic") and token else []
    other = request.headers.get("x-api-key", "").strip()
    return [*found, other] if other and other not in found else found


def _read_password(token: str) -> str:
    """The password that a browser has asked for; empty if it cannot be read."""
    try:
        return base64.b64decode(token, validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


def is_same_secret(given: str, secret: str) -> bool:
    """Tell whether two texts are equal, in a time that tells nothing about them. A header's text may have
    lone surrogates, for bytes that are not UTF-8."""
    return hmac.compare_digest(_hash_secret(given), _hash_secret(secret))


def _hash_secret(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


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
