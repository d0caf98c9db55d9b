"""`mlxrun serve`: the server on the engine of this process."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlxrun.cli.long_runs import raise_open_files
from mlxrun.cli.options import (
    add_config_options,
    add_model_argument,
    add_ray_option,
    load_command_config,
    name_model,
    read_config_again,
)
from mlxrun.core.terminal import print_line

if TYPE_CHECKING:
    from mlxrun.config.loading import LoadedConfig
    from mlxrun.server.batches.batch_queue import BatchQueue
    from mlxrun.server.engine_state import LoadedEngine

EPILOG = """\b
Examples:
  mlxrun serve                                     the built-in model on http://127.0.0.1:8000
  mlxrun serve ./Qwen3-8B-4bit                     the model of a folder, or of a .gguf file
  mlxrun serve mlx-community/Qwen3-8B-4bit         a model of the hub; qwen3-8b-4bit finds it too
  mlxrun serve -c prod.yaml                        the model of a config file
  mlxrun serve -c models.yaml                      several models (docs/several-models.md)
  mlxrun serve -c prod.yaml --port 9000 --set scheduler.max_running=64
  mlxrun serve -c prod.yaml --ray                  on a worker for each GPU of this machine (docs/scale.md)

\b
Interfaces (each can be switched off under `apis:`):
  OpenAI      /v1/chat/completions /v1/completions /v1/responses /v1/conversations /v1/models
              /v1/files /v1/batches
  Anthropic   /v1/messages /v1/messages/count_tokens /v1/messages/batches
  Ollama      /api/chat /api/generate /api/embed /api/embeddings /api/tags /api/show /api/ps /api/version
  Embeddings  /v1/embeddings /v1/rerank /v2/rerank /v1/score (for models that give them)
  Sound       /v1/audio/transcriptions (for models of the family Whisper)
  Tokens      /tokenize /detokenize /tokenizer_info
  Operations  /health /v1/status /metrics /v1/cache /v1/requests/ID/cancel /openapi.json
  A page      /ui (and / in a browser): chat, requests, memory, batches; /ui/runs: jobs and evals of a folder

\b
It listens at once and answers 503 until the model is loaded; the log says how far that is. After Ctrl-C or
SIGTERM, running requests may finish within server.drain_timeout seconds; a second signal ends it at once.
Other machines reach it only with server.host and server.api_keys set; server.tls is for https.

\b
Exit codes: 0 stopped; 2 config; 3 engine; 130 interrupted before it listened.
"""


@click.command(epilog=EPILOG)
@add_model_argument
@add_config_options
@click.option("--host", metavar="ADDRESS", help="Listen on this address, as with --set server.host=ADDRESS.")
@click.option("--port", type=int, metavar="PORT", help="Listen on this port; 0: any free port.")
@add_ray_option
@click.option(
    "--mixed", is_flag=True, help="With --ray: accept workers with other versions or on other devices."
)
def command(
    model: str | None,
    config_path: Path | None,
    sets: tuple[str, ...],
    host: str | None,
    port: int | None,
    ray_address: str | None,
    mixed: bool,
) -> int:
    """Serve a model over HTTP, as OpenAI, Anthropic and Ollama do.

    MODEL overrides model.path of the config. It is a folder, a .gguf file, a hub id, or the last part of one.
    """
    import mlxrun.model  # noqa: F401  its limits of memory are checked before more is imported
    from mlxrun.cli.signal_loop import run_async

    given = {"host": host, "port": port}
    server = [(f"--{key}", f"server.{key}", str(text)) for key, text in given.items() if text is not None]
    options = [*name_model(model), *server]
    loaded = load_command_config(config_path, sets, options, several=ray_address is None)
    raise_open_files()
    if ray_address is not None:
        from mlxrun.cli.ray_setup import serve_on_ray

        return run_async(serve_on_ray(ray_address, loaded, mixed))
    if loaded.config.models:
        from mlxrun.cli.models_setup import serve_models

        return run_async(serve_models(loaded))
    return run_async(serve_until_signal(loaded))


async def serve_until_signal(loaded: LoadedConfig) -> int:
    """Serve until a signal ends it; the exit code."""
    from mlxrun.cli.run_pages import show_runs
    from mlxrun.config.server_settings import has_response_file
    from mlxrun.server.app import make_app
    from mlxrun.server.batches.batch_queue import make_batch_queue
    from mlxrun.server.data_folder import claim_data_folder
    from mlxrun.server.lifecycle import run
    from mlxrun.server.responses.response_file import FILE_NAME
    from mlxrun.server.running_servers import make_note

    config = loaded.config
    queue, responses_path = make_batch_queue(config, os.environ), None
    if has_response_file(config.apis, config.server):
        responses_path = claim_data_folder(config.server, os.environ) / FILE_NAME
    note = make_note(config, os.environ)

    return await run(
        show_runs(make_app(config, queue, responses_path=responses_path), config),
        lambda: _load(loaded, queue),
        print_line,
        note=note,
        read_config=partial(read_config_again, loaded),
    )


async def _load(loaded: LoadedConfig, queue: BatchQueue | None) -> LoadedEngine:
    """Load the model on an engine of its own, and start the batches, those of an earlier run included."""
    from mlxrun.cli.run_setup import load_engine
    from mlxrun.jobs.run.job_service import JobService
    from mlxrun.model.machine.device import describe_device

    engine = await load_engine(loaded.config)
    if queue is not None:
        formats = engine.context.formats
        describe = partial(describe_device, loaded.config.engine)
        service = JobService.for_engine(engine.client, loaded.config, loaded.digest, describe, formats)
        try:
            await queue.start(service)
        except BaseException:
            await engine.client.close()
            raise
    return engine
