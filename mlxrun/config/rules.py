"""Rules against contradictions among settings: of the server and of its APIs, of sparse prefill, and of
speculation. Other modules register theirs with `reads`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from mlxrun.config.hosts import is_loopback, normalize_host
from mlxrun.config.settings import Config, ServerSettings

Rule = Callable[[Config], str | None]
RULES: list[tuple[tuple[str, ...], Rule]] = []

NAME = re.compile(r"[\w.-]{1,64}")  # of adapters and API keys
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")


def reads(*keys: str) -> Callable[[Rule], Rule]:
    """Register a rule with the keys that it reads."""

    def register(rule: Rule) -> Rule:
        RULES.append((keys, rule))
        return rule

    return register


def find_changed(section: Any, keys: Sequence[str]) -> str | None:
    """The first of a section's keys whose value is not the default; None if all have theirs."""
    default = type(section)()
    return next((key for key in keys if getattr(section, key) != getattr(default, key)), None)


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


@reads("prefill.sparse", "model.draft")
def check_sparse_draft(config: Config) -> str | None:
    if config.prefill.sparse == "off" or config.model.draft is not None:
        return None
    return "the tokens are chosen by a draft model: set model.draft"


@reads("prefill.sparse_keep", "prefill.sparse")
def check_sparse_keeps_less(config: Config) -> str | None:
    if config.prefill.sparse == "off" or config.prefill.sparse_keep < 1:
        return None
    return "1 leaves out no token, so that prefill.sparse only costs time; set less or prefill.sparse off"


@reads("prefill.sparse", "model.kind")
def check_sparse_kind(config: Config) -> str | None:
    """With `auto` the model's files decide, and the engine refuses it."""
    kind = config.model.kind
    if config.prefill.sparse == "off" or kind in ("auto", "text"):
        return None
    return f"is for text models that generate, and model.kind is {kind}; remove one of them"


@reads("prefill.sparse_min_tokens", "model.context_length", "prefill.sparse")
def check_sparse_prompts_fit(config: Config) -> str | None:
    """Some prompt must be long enough to be computed sparsely."""
    least, context = config.prefill.sparse_min_tokens, config.model.context_length
    if config.prefill.sparse == "off" or context is None or least < context:
        return None
    return f"sparse_min_tokens {least} is longer than all prompts: model.context_length is {context}"


@reads("prefill.sparse", "engine.reproducible")
def check_reproducible_prefill(config: Config) -> str | None:
    if config.prefill.sparse == "off" or not config.engine.reproducible:
        return None
    return "leaves out tokens of prompts, so that engine.reproducible cannot hold; remove one of them"


@reads("model.draft", "prefill.sparse", "speculation.method")
def check_draft_is_used(config: Config) -> str | None:
    method = config.speculation.method
    drafts = method not in ("off", "ngram")
    if config.model.draft is None or config.prefill.sparse != "off" or drafts:
        return None
    return f"has no effect while prefill.sparse is off and speculation.method is {method}"


@reads("speculation.method", "model.draft")
def check_drafting_model(config: Config) -> str | None:
    if config.speculation.method != "draft" or config.model.draft is not None:
        return None
    return "draft predicts with a draft model: set model.draft"


@reads("prefill.sparse_keep", "prefill.sparse_min_tokens", "prefill.sparse")
def check_prefill_is_sparse(config: Config) -> str | None:
    given = find_changed(config.prefill, ("sparse_keep", "sparse_min_tokens"))
    if config.prefill.sparse != "off" or given is None:
        return None
    return f"prefill.sparse is off, so prefill.{given} has no effect; set prefill.sparse or remove it"


_SPECULATION_KEYS = ("max_tokens", "min_ngram", "max_ngram")


@reads(*(f"speculation.{key}" for key in _SPECULATION_KEYS), "speculation.method")
def check_speculation_is_on(config: Config) -> str | None:
    given = find_changed(config.speculation, _SPECULATION_KEYS)
    if config.speculation.method != "off" or given is None:
        return None
    off = f"speculation.method is off, so speculation.{given} has no effect"
    return f"{off}; set speculation.method or remove it"


@reads("speculation.min_ngram", "speculation.max_ngram", "speculation.method")
def check_ngrams_are_looked_up(config: Config) -> str | None:
    given = find_changed(config.speculation, ("min_ngram", "max_ngram"))
    method = config.speculation.method
    if method not in ("draft", "mtp") or given is None:
        return None
    return f"speculation.method is {method}, so speculation.{given} has no effect; set auto or remove it"


@reads("speculation.min_ngram", "speculation.max_ngram")
def check_ngrams(config: Config) -> str | None:
    """Of places that have `min_ngram` tokens in common, those with more are preferred."""
    least, most = config.speculation.min_ngram, config.speculation.max_ngram
    return None if least <= most else f"min_ngram {least} is more than max_ngram {most}"


@reads("speculation.method", "cache.kv_bits")
def check_drafts_are_verified(config: Config) -> str | None:
    """Drafts are verified by pages of keys, which are not quantised on any device."""
    method, bits = config.speculation.method, config.cache.kv_bits
    if method == "off" or bits is None:
        return None
    return f"{method} drafts nothing while keys are quantised (cache.kv_bits {bits}); remove one of them"
