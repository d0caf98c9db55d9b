"""What a server says of itself once its model is loaded: what is served, and a first request to try."""

from __future__ import annotations

import json
import logging
import shlex
from typing import Any

from aiohttp import web

from mlxrun.api.openai.transcription import TRANSCRIPTION_URL
from mlxrun.config.settings import Config
from mlxrun.core.media_names import describe_input
from mlxrun.server.batches.batch_queue import BATCH_QUEUE
from mlxrun.server.engine_state import ENGINE
from mlxrun.server.http.access import CONFIG
from mlxrun.server.http.surface import ROUTES, UI_PATH

log = logging.getLogger(__name__)
_MESSAGES = [{"role": "user", "content": "What is 2 + 3?"}]
FIRST_REQUESTS: dict[str, tuple[str, dict[str, Any] | None]] = {  # by the key of `apis`: a path and its body
    "openai": ("/v1/chat/completions", {"messages": _MESSAGES}),
    "responses": ("/v1/responses", {"input": "What is 2 + 3?"}),
    "anthropic": ("/v1/messages", {"max_tokens": 1000, "messages": _MESSAGES}),
    "ollama": ("/api/chat", {"messages": _MESSAGES, "stream": False}),
    "embeddings": ("/v1/embeddings", {"input": "What is 2 + 3?"}),
    "transcriptions": (TRANSCRIPTION_URL, None),
    "tokenize": ("/tokenize", {"prompt": "What is 2 + 3?"}),
    "batches": ("/v1/batches", None),
    "admin": ("/v1/status", None),
    "ui": (UI_PATH, None),
}
GENERATING = ("openai", "responses", "anthropic", "ollama")  # of these keys
# Of a model without a chat template.
_UNTEMPLATED_REQUESTS = {name: first for name, first in FIRST_REQUESTS.items() if name not in GENERATING}
_UNTEMPLATED_REQUESTS["openai"] = "/v1/completions", {"prompt": "Once upon a time", "max_tokens": 30}
_NAMING = ("/v1/messages", "/api/chat")  # whose bodies name the model


def describe_models(config: Config) -> str:
    """Name what a server with this config serves: the model's path, or the names of several models."""
    return ", ".join(config.models) or config.model.path


def welcome_model(app: web.Application, url: str) -> list[str]:
    """Write the lines for a ready server, and warn of a model that takes no messages."""
    warn_without_template(app)
    return format_welcome(app, url)


def format_welcome(app: web.Application, url: str) -> list[str]:
    """Write the lines for a ready server: what is served, a first request to try, and where the page is."""
    model, served = app[ENGINE].model, list_served(app)
    kind = describe_input(model) if model.speech is None else "sound"
    pooled, own = model.pooled, "embeddings" if model.speech is None else "transcriptions"
    if not model.generates and own in served:
        served = [own, *(name for name in served if name not in GENERATING and name != own)]
    first = FIRST_REQUESTS if model.chat_template is not None else _UNTEMPLATED_REQUESTS
    path, body = next((first[name] for name in served if name in first), ("/health", None))
    if pooled is not None and pooled.task == "score" and path == "/v1/embeddings":
        path, body = "/v1/rerank", {"query": "2 + 3", "documents": ["five", "six"]}
    if body is not None and path in _NAMING:
        body = {"model": model.name} | body
    what = f"{model.name}, {kind}, context of {model.context_length} tokens"
    return [f"ready: {what}; {_format_served(app, served)}", *_format_ways(app, served, url, path, body)]


def format_models_welcome(app: web.Application, url: str) -> list[str]:
    """Write the lines for a ready server of several models, as `format_welcome` does for one."""
    names, served = list(app[CONFIG].models), list_served(app)
    known = (FIRST_REQUESTS[name] for name in served if name in FIRST_REQUESTS)
    path, body = next(known, ("/health", None))
    body = None if body is None else {"model": names[0]} | body
    what = f"models {', '.join(names)}; {_format_served(app, served)}"
    return [f"ready: {what}", *_format_ways(app, served, url, path, body)]


def _format_served(app: web.Application, served: list[str]) -> str:
    api_keys = app[CONFIG].server.api_keys
    keys = f"{len(api_keys)} API keys" if api_keys else "no API key is required"
    return f"{', '.join(served) or 'every API is switched off (apis)'}; {keys}"


def _format_ways(
    app: web.Application, served: list[str], url: str, path: str, body: dict[str, Any] | None
) -> list[str]:
    """The lines that show a first request, and the page."""
    # The certificate of https names the public host, and not the address of this machine.
    command = f"curl {'--insecure ' if url.startswith('https:') else ''}{url}{path}"
    if app[CONFIG].server.api_keys and path != "/health":
        command += " -H 'Authorization: Bearer YOUR_KEY'"
    if path == TRANSCRIPTION_URL:
        command += " -F file=@speech.wav"
    if body is not None:
        command += f" -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    return [f"  {command}", *([f"  {url}{UI_PATH} in a browser"] if "ui" in served else [])]


def warn_without_template(app: web.Application) -> None:
    """Say once, when the model is loaded, that it takes no messages, if it generates and they are served."""
    model = app[ENGINE].model
    if model.generates and model.chat_template is None and not {*GENERATING}.isdisjoint(list_served(app)):
        paths = ", ".join(FIRST_REQUESTS[name][0] for name in GENERATING if name in list_served(app))
        log.warning("%s has no chat template: %s answer 400; set model.chat_template", model.name, paths)


def list_served(app: web.Application) -> list[str]:
    """List the keys of `apis` whose paths are served. `batches` needs a folder that no other process has
    locked; `embeddings` and `transcriptions` need a model that gives them."""
    names = dict.fromkeys(surface.name for surface in app[ROUTES].surfaces if surface.name != "health")
    model = app[ENGINE].find_model()
    queue = app.get(BATCH_QUEUE)
    has = {
        "batches": queue is not None and queue.is_open,
        "embeddings": model is not None and model.pooled is not None,
        "transcriptions": model is not None and model.speech is not None,
    }
    return [name for name in names if has.get(name, True)]
