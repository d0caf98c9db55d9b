"""Rules about keys without effect, the server, sparse prefill and speculation.

contradictions.py has the other rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from mlxrun.config.server_settings import (
    explain_unknown_host,
    has_response_file,
    is_loopback,
    normalize_host,
    read_api_key,
)
from mlxrun.config.settings import Config
from mlxrun.core.field_errors import suggest

Rule = Callable[[Config], str | None]
RULES: list[tuple[tuple[str, ...], Rule]] = []

_DEFAULTS = Config()
NAME = re.compile(r"[\w.-]{1,64}")  # of adapters and API keys
_URL = re.compile(r"https?://[^/\s]+\S*")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")


def reads(*keys: str) -> Callable[[Rule], Rule]:
    """Register a rule with the keys that it reads."""

    def register(rule: Rule) -> Rule:
        RULES.append((keys, rule))
        return rule

    return register


def _read(config: Config, path: str) -> Any:
    section, key = path.split(".")
    return getattr(getattr(config, section), key)


def forbid(keys: Sequence[str], text: str, condition: Callable[..., bool]) -> None:
    """Register the rule that a condition of these keys' values must not hold. `text`: the error; `{0}` in it
    is the value of the first key."""

    @reads(*keys)
    def check_condition(config: Config) -> str | None:
        values = [_read(config, key) for key in keys]
        return text.format(*values) if condition(*values) else None


def check_value(path: str, find_problem: Callable[[Any], str | None]) -> None:
    """Register the rule that `find_problem` finds nothing wrong with the value of a key, if it has one."""

    @reads(path)
    def check_one(config: Config) -> str | None:
        value = _read(config, path)
        return None if value is None else find_problem(value)


def _require_setting(path: str, condition: str, needed: object = None, hint: str = "") -> None:
    """Register the rule that a key has no effect unless the condition has the value `needed`; None: any value
    but false and 0. A key that is itself false, 0 or null has none to miss."""

    @reads(path, condition)
    def check_effect(config: Config) -> str | None:
        state = _read(config, condition)
        is_met = bool(state) if needed is None else state == needed
        value = _read(config, path)
        if is_met or not value or value == _read(_DEFAULTS, path):
            return None
        shown = str(state).lower() if isinstance(state, bool) else state
        return f"has no effect while {condition} is {shown}{hint}"


_require_setting("cache.disk_path", "cache.backend", "disk", "; set cache.backend: disk")
_require_setting("cache.disk_bytes", "cache.backend", "disk", "; set cache.backend: disk")
_require_setting("cache.intervals_only", "cache.backend", "disk", "; set cache.backend: disk")
_require_setting("media.allow_hosts", "media.allow_urls")
for _path in ("server.store_bytes", "server.store_days"):
    _require_setting(_path, "server.store_responses")
for _path in ("server.files_max_bytes", "batch.max_file_bytes"):
    _require_setting(_path, "apis.batches")
for _path in ("server.store_responses", "server.store_bytes", "server.store_days"):
    _require_setting(_path, "apis.responses")


def _require_switch(
    section: str, switch: str, off: tuple[object, ...], keys: Sequence[str], advice: str
) -> None:
    """Register the rule that keys of a section have no effect while its key `switch` has one of the values
    `off`."""
    paths = [f"{section}.{key}" for key in keys]
    # The error cites the first that was given: cache.backend, but of the others the key without effect.
    order = (f"{section}.{switch}", *paths) if switch == "backend" else (*paths, f"{section}.{switch}")

    @reads(*order)
    def check_switch(config: Config) -> str | None:
        given = next((path for path in paths if _read(config, path) != _read(_DEFAULTS, path)), None)
        state = _read(config, f"{section}.{switch}")
        if state not in off or given is None:
            return None
        shown = "null" if state is None else state
        return f"{section}.{switch} is {shown}, so {given} has no effect; {advice}"


_NGRAM_KEYS = ("min_ngram", "max_ngram")
_CACHE_KEYS = ("memory_bytes", "stored_bits", "checkpoint_every")
_SPARSE_KEYS = ("sparse_keep", "sparse_min_tokens")
_require_switch("cache", "backend", ("none",), _CACHE_KEYS, "remove one of them")
_require_switch("cache", "kv_bits", (None,), ("kv_group_size", "kv_start"), "set cache.kv_bits or remove it")
_require_switch("prefill", "sparse", ("off",), _SPARSE_KEYS, "set prefill.sparse or remove it")
_require_switch(
    "speculation", "method", ("off",), ("max_tokens", *_NGRAM_KEYS), "set speculation.method or remove it"
)
_require_switch("speculation", "method", ("draft", "mtp"), _NGRAM_KEYS, "set auto or remove it")


@reads("server.host", "server.api_keys", "server.allow_public")
def check_public_host(config: Config) -> str | None:
    """Everyone who can reach a server without keys can use it."""
    server = config.server
    if server.api_keys or server.allow_public or is_loopback(server.host):
        return None
    public = f"{server.host} can be reached from other machines: set server.api_keys or server.allow_public"
    return explain_unknown_host(server.host) or public


@reads("server.api_keys")
def check_api_keys(config: Config) -> str | None:
    """A client must be able to send each key, and no two names may have the same key."""
    keys = {name: read_api_key(value).key for name, value in config.server.api_keys.items()}
    for name, secret in keys.items():
        if not NAME.fullmatch(name):
            return f"{name!r} is not a name of letters, digits, '.', '_' and '-'"
        if not secret:
            return f"{name} has no key"
        if secret != secret.strip():
            return f"the key of {name} begins or ends with white space, which no client sends"
    return None if len(set(keys.values())) == len(keys) else "two names have the same key"


@reads("server.data_path", "apis.batches", "apis.responses", "server.store_responses", "server.store_days")
def check_data_path(config: Config) -> str | None:
    """Something must be kept in the folder."""
    server, apis = config.server, config.apis
    if server.data_path is None or apis.batches or has_response_file(apis, server):
        return None
    return "has no effect while apis.batches is false and responses are not stored in a file"


@reads("server.tls")
def check_tls(config: Config) -> str | None:
    """A certificate is of no use without its key."""
    given, known = config.server.tls, ("certificate", "key")
    for name in given:
        if name not in known:
            return f"unknown key {name!r}{suggest(name, known)}; write {{certificate: FILE, key: FILE}}"
    missing = [name for name in known if name not in given]
    return f"{missing[0]} is missing: write {{certificate: FILE, key: FILE}}" if given and missing else None


@reads("server.cors_origins")
def check_cors_origins(config: Config) -> str | None:
    """An origin is scheme, host and port, as browsers send it."""
    for origin in config.server.cors_origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            return f"{origin!r} is not an origin such as https://chat.example.com, or '*'"
    return None


forbid(
    ("telemetry.otlp",),
    "{0!r} is not a URL such as http://127.0.0.1:4318",
    lambda url: url is not None and not _URL.fullmatch(url),
)


@reads("server.allowed_hosts")
def check_allowed_hosts(config: Config) -> str | None:
    """A host is a name or an address as in a URL, without scheme and port."""
    for host in config.server.allowed_hosts:
        if normalize_host(host) is None:
            return f"{host!r} is neither a name such as ai.example.com, without scheme and port, nor '*'"
    return None


forbid(
    ("prefill.sparse", "model.draft"),
    "the tokens are chosen by a draft model: set model.draft",
    lambda sparse, draft: sparse != "off" and draft is None,
)
forbid(
    ("prefill.sparse_keep", "prefill.sparse"),
    "1 leaves out no token, so that prefill.sparse only costs time; set less or prefill.sparse off",
    lambda keep, sparse: sparse != "off" and keep >= 1,
)
forbid(  # with model.kind `auto`, the engine checks the model's files instead
    ("prefill.sparse", "model.kind"),
    "is for text models that generate, and model.kind is {1}; remove one of them",
    lambda sparse, kind: sparse != "off" and kind not in ("auto", "text"),
)
forbid(  # some prompt must be long enough to be computed sparsely
    ("prefill.sparse_min_tokens", "model.context_length", "prefill.sparse"),
    "sparse_min_tokens {0} is longer than all prompts: model.context_length is {1}",
    lambda least, context, sparse: sparse != "off" and context is not None and least >= context,
)
forbid(
    ("prefill.sparse", "engine.reproducible"),
    "leaves out tokens of prompts, so that engine.reproducible cannot hold; remove one of them",
    lambda sparse, reproducible: sparse != "off" and reproducible,
)
forbid(
    ("model.draft", "prefill.sparse", "speculation.method"),
    "has no effect while prefill.sparse is off and speculation.method is {2}",
    lambda draft, sparse, method: draft is not None and sparse == "off" and method in ("off", "ngram"),
)
forbid(
    ("speculation.method", "model.draft"),
    "draft predicts with a draft model: set model.draft",
    lambda method, draft: method == "draft" and draft is None,
)
forbid(  # `max_ngram` counts the common tokens of places that have at least `min_ngram`
    ("speculation.min_ngram", "speculation.max_ngram"),
    "min_ngram {0} is more than max_ngram {1}",
    lambda least, most: least > most,
)
forbid(  # drafts are verified on pages of keys, which cannot be quantized
    ("speculation.method", "cache.kv_bits"),
    "{0} drafts nothing while keys are quantized (cache.kv_bits {1}); remove one of them",
    lambda method, bits: method != "off" and bits is not None,
)
