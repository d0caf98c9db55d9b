"""Rules against contradictions among the settings of the server and of its APIs (see contradictions.py)."""

from __future__ import annotations

import re

from mlxrun.config.hosts import is_loopback, normalize_host
from mlxrun.config.rules import NAME, reads
from mlxrun.config.settings import Config, ServerSettings

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")


@reads("server.host", "server.api_keys", "server.allow_public")
def check_public_host(config: Config) -> str | None:
    """Everyone who can reach a server without keys can use it."""
    server = config.server
    if server.api_keys or server.allow_public or is_loopback(server.host):
        return None
    return f"{server.host} can be reached from other machines: set server.api_keys or server.allow_public"


@reads("server.api_keys")
def check_api_keys(config: Config) -> str | None:
    """A client must be able to send each key, and each key must have one owner."""
    keys = config.server.api_keys
    for name, secret in keys.items():
        if not NAME.fullmatch(name):
            return f"{name!r} is not a name of letters, digits, '.', '_' and '-'"
        if secret != secret.strip():
            return f"the key of {name} begins or ends with white space, which no client sends"
    return None if len(set(keys.values())) == len(keys) else "two names have the same key"


@reads("server.cors_origins")
def check_cors_origins(config: Config) -> str | None:
    """An origin is scheme, host and port, as browsers send it."""
    for origin in config.server.cors_origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            return f"{origin!r} is not an origin such as https://chat.example.com, or '*'"
    return None


@reads("server.allowed_hosts")
def check_allowed_hosts(config: Config) -> str | None:
    """A host is a name or an address as in a URL, without scheme and port."""
    for host in config.server.allowed_hosts:
        if normalize_host(host) is None:
            return f"{host!r} is neither a name such as ai.example.com, without scheme and port, nor '*'"
    return None


@reads("server.store_bytes", "server.store_responses")
def check_response_store(config: Config) -> str | None:
    server = config.server
    if server.store_responses or server.store_bytes == ServerSettings().store_bytes:
        return None
    return "has no effect while server.store_responses is 0"


# Keys that only one API of the server reads.
_API_KEYS = {
    "batches": ("server.data_path", "server.files_max_bytes", "batch.max_file_bytes"),
    "responses": ("server.store_responses", "server.store_bytes"),
}


def _register_api_rule(api: str, path: str) -> None:
    """Register the rule that a key is not set while the only API that reads it is off."""
    section, key = path.split(".")

    @reads(path, f"apis.{api}")
    def check_api_key(config: Config) -> str | None:
        value, default = (getattr(getattr(each, section), key) for each in (config, Config()))
        is_read = getattr(config.apis, api) or value == default
        return None if is_read else f"has no effect while apis.{api} is false"


for _api, _paths in _API_KEYS.items():
    for _path in _paths:
        _register_api_rule(_api, _path)
