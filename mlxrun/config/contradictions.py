"""Combinations of valid values that contradict each other or would do nothing.

One small function a rule: it gets the config and returns what is wrong, or None. A rule names the keys
it reads; it is skipped where one of them is invalid, and cited at the first of them that was given.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mlxrun.config.settings import CacheSettings, Config, ServerSettings

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")
_NAME = re.compile(r"[\w.-]{1,64}")
_HOST = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")  # in small letters
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class Contradiction:
    """A rule and the keys that it reads."""

    keys: tuple[str, ...]
    run: Callable[[Config], str | None]


def hosts_without_urls(config: Config) -> str | None:
    """Hosts are only for URLs."""
    if config.media.allow_hosts and not config.media.allow_urls:
        return "does nothing while media.allow_urls is false"
    return None


def busy_above_idle(config: Config) -> str | None:
    """The budget beside decoding rows is the smaller one."""
    busy, idle = config.scheduler.prefill_budget_busy, config.scheduler.prefill_budget
    if busy is None or busy <= idle:
        return None
    return f"prefill_budget_busy {busy} is more than prefill_budget {idle}"


def chunk_above_budget(config: Config) -> str | None:
    """A step must be able to prefill a whole chunk."""
    chunk, budget = config.scheduler.chunk, config.scheduler.prefill_budget
    if chunk is None or chunk <= budget:
        return None
    return f"chunk {chunk} is more than prefill_budget {budget}"


def chunk_above_busy_budget(config: Config) -> str | None:
    """With `engine.reproducible` a prompt is always cut at the same places, so a step takes whole chunks."""
    chunk, busy = config.scheduler.chunk, config.scheduler.prefill_budget_busy
    if not config.engine.reproducible or busy is None or chunk is None or chunk <= busy:
        return None
    return f"engine.reproducible takes whole chunks: {busy} is less than scheduler.chunk {chunk}"


def revision_of_a_folder(config: Config) -> str | None:
    """Only a hub id has revisions."""
    if config.model.revision is None or not _is_local(config.model.path):
        return None
    return f"does nothing: model.path {config.model.path!r} is no hub id"


def remote_code_of_embedded(config: Config) -> str | None:
    """The built-in model brings no code."""
    if config.model.trust_remote_code and config.model.path == "embedded":
        return "does nothing: the embedded model brings no code"
    return None


def answer_fills_context(config: Config) -> str | None:
    """A default answer length that leaves no room for a prompt."""
    answer, context = config.sampling.max_tokens, config.model.context_length
    if answer is None or context is None or answer < context:
        return None
    return f"sampling.max_tokens {answer} leaves no room for a prompt in model.context_length {context}"


def model_exists(config: Config) -> str | None:
    """A path that is a path must be a folder; anything else must look like a hub id."""
    path = config.model.path
    if path == "embedded" or (not Path(path).is_absolute() and _HUB_ID.fullmatch(path)):
        return None
    if not Path(path).is_absolute():
        return f"{path!r} is neither 'embedded' nor a folder nor a hub id such as Qwen/Qwen3-0.6B"
    return None if Path(path).is_dir() else f"{path} is not a folder"


def adapter_exists(config: Config) -> str | None:
    """The adapter's folder."""
    path = config.model.adapter
    return None if path is None or Path(path).is_dir() else f"{path} is not a folder"


def template_exists(config: Config) -> str | None:
    """The template's file."""
    path = config.model.chat_template
    return None if path is None or Path(path).is_file() else f"{path} is not a file"


def _is_local(path: str) -> bool:
    return path == "embedded" or Path(path).is_absolute()  # the loader made folders absolute


def folder_without_disk(config: Config) -> str | None:
    """A folder is for the disk backend."""
    if config.cache.disk_path is None or config.cache.backend == "disk":
        return None
    return f"does nothing while cache.backend is {config.cache.backend}; set cache.backend: disk"


def budgets_without_cache(config: Config) -> str | None:
    """Nothing is kept."""
    cache, default = config.cache, CacheSettings()
    given = [
        key
        for key in ("memory_bytes", "stored_bits", "checkpoint_every", "disk_bytes")
        if getattr(cache, key) != getattr(default, key)
    ]
    if cache.backend != "none" or not given:
        return None
    return f"nothing is kept, so that cache.{given[0]} does nothing; remove one of them"


def quantised_reproducible(config: Config) -> str | None:
    """What was quantised is not what was computed."""
    if config.cache.stored_bits is None or not config.engine.reproducible:
        return None
    return "what is stored is not exact then, which engine.reproducible demands; remove one of them"


def public_without_keys(config: Config) -> str | None:
    """Whoever reaches the server may use it."""
    server = config.server
    if server.api_keys or server.allow_public or is_loopback(server.host):
        return None
    return (
        f"{server.host} can be reached from other machines: give server.api_keys, "
        "or say server.allow_public: true"
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def odd_keys(config: Config) -> str | None:
    """A key that nobody can send, or of which nobody can tell whose it is."""
    keys = config.server.api_keys
    for name, secret in keys.items():
        if not _NAME.fullmatch(name):
            return f"{name!r} is no name of letters, digits, '.', '_' and '-'"
        if secret != secret.strip():
            return f"the key of {name} has space at its ends, which no client sends"
    return None if len(set(keys.values())) == len(keys) else "two names have the same key"


def bad_origins(config: Config) -> str | None:
    """An origin is scheme, host and port, as browsers send it."""
    for origin in config.server.cors_origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            return f"{origin!r} is not an origin such as https://chat.example.com, or '*'"
    return None


def bad_hosts(config: Config) -> str | None:
    """A host is a name or an address as it stands in a URL, without scheme and port."""
    for host in config.server.allowed_hosts:
        if allowed_host(host) is None:
            return f"{host!r} is neither a name such as ai.example.com, without scheme and port, nor '*'"
    return None


def allowed_host(host: str) -> str | None:
    """An entry of server.allowed_hosts as Host headers are compared with it; None if it is none."""
    name = host.strip("[]").lower().removesuffix(".")
    return name if name == "*" or _HOST.fullmatch(name) or is_address(name) else None


def is_address(name: str) -> bool:
    """Whether it is an IP address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def bytes_without_store(config: Config) -> str | None:
    """Nothing is stored."""
    server = config.server
    if server.store_responses or server.store_bytes == ServerSettings().store_bytes:
        return None
    return "does nothing while server.store_responses is 0"


CHECKS = (
    Contradiction(("model.path",), model_exists),
    Contradiction(("model.adapter",), adapter_exists),
    Contradiction(("model.chat_template",), template_exists),
    Contradiction(("model.revision", "model.path"), revision_of_a_folder),
    Contradiction(("model.trust_remote_code", "model.path"), remote_code_of_embedded),
    Contradiction(("scheduler.prefill_budget_busy", "scheduler.prefill_budget"), busy_above_idle),
    Contradiction(("scheduler.chunk", "scheduler.prefill_budget"), chunk_above_budget),
    Contradiction(
        ("scheduler.prefill_budget_busy", "scheduler.chunk", "engine.reproducible"), chunk_above_busy_budget
    ),
    Contradiction(("sampling.max_tokens", "model.context_length"), answer_fills_context),
    Contradiction(("media.allow_hosts", "media.allow_urls"), hosts_without_urls),
    Contradiction(("cache.disk_path", "cache.backend"), folder_without_disk),
    Contradiction(
        (
            "cache.backend",
            "cache.memory_bytes",
            "cache.stored_bits",
            "cache.checkpoint_every",
            "cache.disk_bytes",
        ),
        budgets_without_cache,
    ),
    Contradiction(("cache.stored_bits", "engine.reproducible"), quantised_reproducible),
    Contradiction(("server.host", "server.api_keys", "server.allow_public"), public_without_keys),
    Contradiction(("server.api_keys",), odd_keys),
    Contradiction(("server.cors_origins",), bad_origins),
    Contradiction(("server.allowed_hosts",), bad_hosts),
    Contradiction(("server.store_bytes", "server.store_responses"), bytes_without_store),
)
