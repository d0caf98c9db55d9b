"""`mlxrun serve`: the server on the engine of this process."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxrun.cli.options import config_options, load

if TYPE_CHECKING:
    from mlxrun.api.context import ApiContext
    from mlxrun.config.loading import Loaded
    from mlxrun.engine.client import EngineClient
    from mlxrun.server.engine_state import Server

log = logging.getLogger(__name__)

EPILOG = """\b
Examples:
  mlxrun serve                                     the built-in model on http://127.0.0.1:8000
  mlxrun serve -c prod.yaml                        yours, as the file says
  mlxrun serve -c prod.yaml --port 9000 --set scheduler.max_running=64

\b
Interfaces (each can be switched off under `apis:`):
  OpenAI      /v1/chat/completions /v1/completions /v1/responses /v1/models /v1/files /v1/batches
  Anthropic   /v1/messages /v1/messages/count_tokens
  Tokens      /tokenize /detokenize
  Operations  /health /v1/status /metrics /v1/cache /v1/requests/ID/cancel /openapi.json

\b
It listens at once and answers 503 until the model is loaded. Ctrl-C once (or SIGTERM) lets running requests
finish for server.drain_timeout seconds, twice ends it at once. Other machines reach it only with server.host
and server.api_keys set.

\b
Exit codes: 0 stopped; 2 config; 3 engine.
"""


@click.command(epilog=EPILOG)
@config_options
@click.option("--host", metavar="ADDRESS", help="Listen on this address: --set server.host=ADDRESS.")
@click.option("--port", type=int, metavar="PORT", help="Listen on this port; 0: any free one.")
def command(config_path: Path | None, sets: tuple[str, ...], host: str | None, port: int | None) -> int:
    """Serve a model over HTTP, as OpenAI and Anthropic do."""
    import asyncio

    given = {"host": host, "port": port}
    flags = tuple(f"server.{key}={value}" for key, value in given.items() if value is not None)
    loaded = load(config_path, (*sets, *flags))  # the options are over --set
    return asyncio.run(_serve(loaded))


async def _serve(loaded: Loaded) -> int:
    from mlxrun.server.engine_state import Server
    from mlxrun.server.lifecycle import run

    server = Server(loaded.config)
    _keep_files(server)

    async def load_model() -> tuple[EngineClient, ApiContext]:
        return await _load(loaded, server)

    return await run(server, load_model, click.echo)


async def _load(loaded: Loaded, server: Server) -> tuple[EngineClient, ApiContext]:
    """The model, on an engine of its own; and what turns bodies into requests for it."""
    import asyncio

    from mlxrun.api.context import ApiContext
    from mlxrun.engine.client import EngineClient
    from mlxrun.model.model_info import load_model_info
    from mlxrun.parsers.registry import detect_formats
    from mlxrun.text.images import MediaLoader

    config = loaded.config
    host = await asyncio.to_thread(load_model_info, config.model, weights=True)
    formats = detect_formats(host.chat_template, host.tokenizer, config.parsers)
    side = ApiContext(host, config, MediaLoader(config.media, None), formats)
    client = await EngineClient.start(config, host)
    try:
        server.facts = _facts()
        await _run_batches(loaded, server, client, side)
    except BaseException:
        await client.close()
        raise
    return client, side


def _facts() -> Mapping[str, Any]:
    from mlxrun.model.doctor import describe_device
    from mlxrun.model.machine.versions import list_library_versions

    return {"versions": list_library_versions(), "device": describe_device()}


def _keep_files(server: Server) -> None:
    """Files and batches of earlier runs are there before the model is."""
    import os

    from mlxrun.server.batches.batch_queue import BatchQueue
    from mlxrun.server.batches.storage import Storage, data_folder

    if server.config.apis.batches:
        server.jobs = BatchQueue(Storage(data_folder(server.config.server.data_path, os.environ)))


async def _run_batches(loaded: Loaded, server: Server, client: EngineClient, side: ApiContext) -> None:
    """Batches run from now on, those that an earlier run left too. Without a folder all else is served."""
    from mlxrun.batch.job_service import JobService
    from mlxrun.model.doctor import describe_device
    from mlxrun.server.batches.storage import StorageError

    if server.jobs is None:
        return
    try:
        await server.jobs.open()
    except StorageError as error:
        log.warning("no files and no batches: %s", error)
    server.jobs.start(JobService(client, loaded.config, loaded.digest, describe_device, side.formats))
