"""The aiohttp application: the surfaces that the config switches on, behind one middleware.

Handlers find their objects in the application by typed keys, such as CONFIG and ENGINE. Each key is defined
beside its class.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from aiohttp import web

from mlxrun.config.setting_fields import hash_config
from mlxrun.config.settings import Config
from mlxrun.server.batches.batch_queue import BATCH_QUEUE, BatchQueue
from mlxrun.server.endpoints import (
    admin,
    anthropic,
    anthropic_batches,
    batches,
    embeddings,
    ollama,
    openai,
    responses,
    runs,
    tokenize,
    transcriptions,
    ui,
)
from mlxrun.server.endpoints.admin import HEALTH
from mlxrun.server.endpoints.responses import cancel_background_responses
from mlxrun.server.engine_state import ENGINE, EngineState
from mlxrun.server.http.access import (
    ACTIVE_IDS,
    ALLOWED_SITES,
    API_KEYS,
    CONFIG,
    CONFIG_HASH,
    AllowedSites,
    ApiKeys,
)
from mlxrun.server.http.key_limits import KeyLimits
from mlxrun.server.http.middleware import add_headers, handle_request
from mlxrun.server.http.surface import ROUTES, Routes, Surface
from mlxrun.server.live_requests import LIVE_REQUESTS, LiveRequests
from mlxrun.server.request_metrics import METRICS, RequestMetrics
from mlxrun.server.responses.response_runs import RESPONSES, Responses, keep_store_open
from mlxrun.server.status import StatusCollector
from mlxrun.server.telemetry import start_telemetry

_MODULES = (
    *(openai, responses, anthropic, ollama, embeddings, transcriptions, tokenize),
    *(batches, anthropic_batches, admin, ui, runs),
)


def list_surfaces() -> list[Surface]:
    """List every surface, switched on or off."""
    return [module.SURFACE for module in _MODULES]


def make_app(
    config: Config,
    batch_queue: BatchQueue | None = None,
    *,
    responses_path: Path | None = None,
    surfaces: Sequence[Surface] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> web.Application:
    """Make the application of a config. It must run with aiohttp's `handler_cancellation`. `responses_path`:
    the file of stored responses; None: they are in memory only. `surfaces`: None takes all. ConfigError if
    server.allowed_hosts has an item that is not a host name, or if telemetry.otlp needs what is not
    installed.
    """
    surfaces = list_surfaces() if surfaces is None else surfaces
    switches = asdict(config.apis)
    on = [surface for surface in surfaces if all(switches.get(key, True) for key in surface.switches)]
    routes = Routes([HEALTH, *on], [surface for surface in surfaces if surface not in on])
    app = web.Application(middlewares=[handle_request])
    app[CONFIG], app[CONFIG_HASH] = config, hash_config(config)
    app[API_KEYS], app[ALLOWED_SITES] = ApiKeys(config.server.api_keys), AllowedSites(config.server)
    app[ENGINE], app[METRICS] = engine, metrics = EngineState(clock), RequestMetrics()
    app[LIVE_REQUESTS] = LiveRequests(config, engine, metrics, KeyLimits(app[API_KEYS], clock))
    app[ACTIVE_IDS], app[ROUTES] = set(), routes
    app[RESPONSES] = Responses(config.server, responses_path)
    if config.telemetry.otlp is not None:
        start_telemetry(app, config.telemetry.otlp)
    if batch_queue is not None:
        app[BATCH_QUEUE] = batch_queue
    metrics.registry.register(StatusCollector(app))
    routes.register(app.router)
    app.on_response_prepare.append(add_headers)
    app.on_shutdown.append(cancel_background_responses)
    app.cleanup_ctx.append(keep_store_open)
    return app
