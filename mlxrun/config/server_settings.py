"""The options of the server: its APIs, its address, its clients and their limits. Besides, checks of host
names.

See settings.py: the string under a field is its description.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass, field
from typing import Annotated, Literal

from mlxrun.config.setting_annotations import Bytes, Range, Secret


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Which APIs the server offers. The paths of an API that is off return 404."""

    openai: bool = True
    """/v1/models, /v1/chat/completions, /v1/completions."""
    responses: bool = True
    """/v1/responses, /v1/conversations."""
    anthropic: bool = True
    """/v1/messages, /v1/messages/count_tokens."""
    ollama: bool = True
    """/api/chat, /api/generate, /api/tags, /api/show, /api/ps, /api/embed, /api/embeddings, /api/version; and
    "Ollama is running" on /."""
    embeddings: bool = True
    """/v1/embeddings, /v1/rerank, /v1/score; also /v2/rerank, /rerank and /score."""
    transcriptions: bool = True
    """/v1/audio/transcriptions."""
    tokenize: bool = True
    """/tokenize, /detokenize, /tokenizer_info."""
    batches: bool = True
    """/v1/files, /v1/batches; with `anthropic`, /v1/messages/batches."""
    admin: bool = True
    """/v1/status, /metrics, /v1/cache, /v1/requests/ID/cancel, /openapi.json. /health is always on."""
    ui: bool = True
    """/ui, a page for browsers: chat, live requests, memory and batches; and /ui/runs, runs of a folder. `/`
    leads to /ui."""


KeyRole = Literal["inference", "metrics", "admin"]


@dataclass(frozen=True, slots=True)
class ApiKeySettings:
    """One API key and what it may do."""

    key: Annotated[str, Secret()] = ""
    """The key itself, from a variable. It must be given."""
    role: KeyRole | None = None
    """What the key may use. `inference`: all APIs that answer, files and batches. `metrics`: /metrics,
    /v1/status and GET /v1/cache. `admin`: everything, also clearing and warming the cache, and ending
    requests of other keys. null: `inference` if another key has the role admin; else everything but requests
    of other keys."""

    max_concurrent: Annotated[int | None, Range(1, None)] = None
    """Most requests of the key that run or wait at once; another one is a 429. null: no limit. This
    limit and the next ones are for requests that the model computes, not for those that only count tokens."""
    requests_per_minute: Annotated[int | None, Range(1, None)] = None
    """Most requests of the key in a minute, of which as many may come at once. null: no limit."""
    tokens_per_minute: Annotated[int | None, Range(1, None)] = None
    """Most tokens of the key in a minute, of prompts (cached ones too) and of answers. They count when a
    request ends, and further requests are refused until they are paid off. null: no limit."""


@dataclass(frozen=True, slots=True)
class ServedModelSettings:
    """One of several models of a server."""

    path: str = ""
    """As `model.path`: a folder, a `.gguf` file, a hub id or `embedded`. It must be given."""
    names: tuple[str, ...] = ()
    """Names that requests may use as `model`, besides the key of this entry and the model's own name."""
    adapters: dict[str, str] = field(default_factory=dict)
    """As `model.adapters`: folders of LoRA adapters by name."""
    pinned: bool = False
    """Load it at start, and never unload it."""
    keep_alive: Annotated[float | None, Range(0.0, None)] = 900.0
    """Seconds without a request after which it is unloaded. null: it stays until its memory is needed."""
    memory: Annotated[int | None, Bytes(), Range(1, None)] = None
    """Its part of `scheduler.memory_limit`, in bytes. null: what its weights and 32k tokens of prompts and
    answers need, and more if there is room."""
    settings: dict[str, str | int | float | bool] = field(default_factory=dict)
    """Other settings for this model alone, such as `{model.kind: vision, sampling.temperature: 0.2}`."""


def read_served_model(value: str | ServedModelSettings) -> ServedModelSettings:
    """Return a value of `models`, which may be the path alone, in its full form."""
    return ServedModelSettings(value) if isinstance(value, str) else value


def read_api_key(value: str | ApiKeySettings) -> ApiKeySettings:
    """Return a value of server.api_keys, which may be the key alone, in its full form."""
    return ApiKeySettings(value) if isinstance(value, str) else value


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Where the server listens, which clients it serves, and what limits they have."""

    host: str = "127.0.0.1"
    """Address to listen on. An address that other machines can reach needs api_keys or allow_public."""
    port: Annotated[int, Range(0, 65535)] = 8000
    """Port to listen on; 0: any free port."""
    api_keys: Annotated[dict[str, str | ApiKeySettings], Secret()] = field(default_factory=dict)
    """API keys by the name of their owner, as in `alice: ${ALICE_KEY}`, or with a role, as in
    `prometheus: {key: '${PROMETHEUS_KEY}', role: metrics}`. Names are logged, and each gets the same share
    under scheduler.policy `fair`. Empty: clients need no key."""
    allow_public: bool = False
    """Allow an address that other machines can reach without api_keys."""
    tls: dict[str, str] = field(default_factory=dict)
    """Serve https, with TLS 1.2 or later, as `{certificate: FILE, key: FILE}`. The files are in PEM form.
    That of the certificate has those between it and the authority's below it; the key is not encrypted.
    SIGHUP reads both again. Empty: http."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may use the server from a browser, such as `https://chat.example.com`, or `*`
    for all."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names of the server besides localhost and server.host, such as `ai.example.com` behind a proxy, or
    `*` for all. A server without api_keys on a local address refuses requests for other names, because a web
    page can let its own host name point to this machine (DNS rebinding)."""
    max_body_bytes: Annotated[int | None, Bytes(), Range(1, None)] = None
    """Maximum size of a request body. Uploads of job files have a limit of their own. null: 32 bytes for each
    token of the context, at least 16MB; and 64MB more if the model accepts images."""
    max_messages: Annotated[int, Range(1, None)] = 4096
    """Maximum number of messages or input items of a request."""
    max_prompt_tokens: Annotated[int | None, Range(1, None)] = None
    """Maximum number of tokens of a prompt. null: the size of the context."""
    max_connections: Annotated[int, Range(1, None)] = 1024
    """Maximum number of open connections. A further one takes the place of the one that has waited longest
    for its next request; if none waits, it gets status 503."""
    request_timeout: Annotated[float | None, Range(0.1, None)] = 3600.0
    """Seconds after which a request is aborted, waiting time included. null: no limit."""
    keepalive: Annotated[float, Range(0.1, None)] = 15.0
    """Seconds without output after which a stream sends a comment with the progress of the request. Also
    while its media are read, or its model is loaded."""
    drain_timeout: Annotated[float, Range(0.0, None)] = 30.0
    """Seconds that running requests have to finish when the server is stopped."""
    on_engine_failure: Literal["exit", "stay"] = "exit"
    """What the server does when the engine has failed: `exit` ends the process with code 3, so that a
    supervisor can restart it; `stay` answers every request with status 503."""
    strict_fields: bool = False
    """Refuse fields of requests, and of job lines, that mlxrun cannot honour although they do not change the
    answer: hints, labels, neutral values, and unknown fields of messages. Otherwise they are accepted, and
    logged once each. Fields that would change the answer are always refused."""
    strip_billing_header: bool = True
    """Remove the line `x-anthropic-billing-header: ...` from system prompts of /v1/messages. It differs in
    every request, so that the prefix cache would never have a hit."""
    store_responses: Annotated[int, Range(0, None)] = 1000
    """Maximum number of responses and conversations of /v1/responses that are stored; 0: none."""
    store_bytes: Annotated[int, Bytes(), Range(1, None)] = 256_000_000
    """Maximum size of the stored responses and conversations."""
    store_days: Annotated[float | None, Range(0.0, 36_500.0)] = 30.0
    """Days from its last change until a stored response or a conversation is removed. They are in a file in
    data_path and survive a restart. null: no limit; 0: they are in memory only and end with the server."""
    data_path: str | None = None
    """Folder for uploaded files, batches and stored responses. null: mlxrun in $XDG_DATA_HOME or
    ~/.local/share. A further server on another port takes a folder of its own in there."""
    runs_path: str | None = None
    """Folder whose runs the page shows under /ui/runs: jobs and suites, with all prompts and answers, to keys
    with the role admin. null: the batches in data_path; with api_keys, none."""
    files_max_bytes: Annotated[int, Bytes(), Range(1, None)] = 10_000_000_000
    """Maximum size of all files and batches in data_path; each counts as at least 4096 bytes. An upload or a
    batch that would exceed it is refused. The output of a batch counts, but is always written."""


def has_response_file(apis: ApiSettings, settings: ServerSettings) -> bool:
    """Whether responses and conversations are stored in a file."""
    return apis.responses and settings.store_responses > 0 and settings.store_days != 0


_LEAST_KEY, _LEAST_CHARACTERS = 16, 8


def find_weak_keys(settings: ServerSettings) -> list[str]:
    """Return a warning for each API key that could be guessed. None of them quotes a key."""
    found = []
    for name, value in settings.api_keys.items():
        secret = read_api_key(value).key
        if len(secret) < _LEAST_KEY or len(set(secret)) < _LEAST_CHARACTERS:
            found.append(
                f"server.api_keys: the key of {name} is weak: it has {len(secret)} characters, "
                f"{len(set(secret))} of them different; `openssl rand -hex 32` makes a strong one"
            )
    return found


_HOST = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")  # in lower case


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def explain_unknown_host(host: str) -> str | None:
    """What is wrong with a host name that does not exist. None if it exists, or if no resolver can say so."""
    try:
        socket.getaddrinfo(host.strip("[]"), 0)
    except socket.gaierror as error:
        if error.errno != socket.EAI_NONAME:
            return None
    except UnicodeError:
        pass  # no name: a part of it is empty or too long
    else:
        return None
    return f"the host name {host!r} does not exist"


def is_address(name: str) -> bool:
    """Whether the name is an IP address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def normalize_host(host: str) -> str | None:
    """Return an item of server.allowed_hosts in the form that Host headers are compared with; None if it is
    invalid."""
    name = host.strip("[]").lower().removesuffix(".")
    return name if name == "*" or _HOST.fullmatch(name) or is_address(name) else None
