"""Who asks: a key in `Authorization: Bearer` or `x-api-key`, compared with all keys in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

from aiohttp import web

from mlxrun.errors import Unauthorized

_KEY = web.RequestKey("key", str)


class ApiKeys:
    """The keys of a config, by the names of who has them."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._digests = {name: _digest(secret) for name, secret in keys.items()}

    def __bool__(self) -> bool:
        return bool(self._digests)

    def name_of(self, secret: str) -> str | None:
        """Whose key this is. Takes as long for a wrong key as for any right one."""
        given, found = _digest(secret), None
        for name, digest in self._digests.items():
            if hmac.compare_digest(given, digest):
                found = name
        return found

    def check(self, request: web.Request) -> None:
        """Unauthorized unless the request has a right key; then `key_name` says whose. Without any keys in
        the config everybody is let in, without a name."""
        if not self._digests:
            return
        secrets = _given(request)
        if not secrets:
            raise Unauthorized("no API key was given: send `Authorization: Bearer KEY` or `x-api-key: KEY`")
        names = [name for secret in secrets if (name := self.name_of(secret)) is not None]
        if not names:
            raise Unauthorized("the API key is not valid here")
        request[_KEY] = names[0]


def key_name(request: web.Request) -> str:
    """Name of the key that a request came with; empty without keys."""
    return request.get(_KEY) or ""


def _given(request: web.Request) -> list[str]:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    found = [token.strip()] if scheme.lower() == "bearer" and token.strip() else []
    own = request.headers.get("x-api-key", "").strip()
    return [*found, own] if own and own not in found else found


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()
