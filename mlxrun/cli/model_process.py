"""`python -m mlxrun.cli.model_process`: the process of one of several models (cluster/models).

It reads one message from standard input, answers on standard output, and ends when standard input does. What
libraries print goes to standard error.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

from mlxrun.core.errors import MlxrunError

if TYPE_CHECKING:
    from mlxrun.cluster.models.messages import (
        DescribeModels,
        DigestModels,
        ModelFacts,
        ModelsFacts,
        ServeModel,
    )
    from mlxrun.config.settings import Config
    from mlxrun.model.load.model_info import LoadedModelInfo

ROWS, TOKENS = 4, 8192  # that a model has room for, unless its entry says how much memory it gets
ENCODER_WORK = 500_000_000  # bytes that a model which only gives vectors needs beside its weights


def main() -> int:
    """Read a message and do what it asks for."""
    import mlxrun.model  # noqa: F401  its limits of memory are checked before more is imported
    from mlxrun.cli.signal_loop import run_async
    from mlxrun.cluster.models.messages import DescribeModels, DigestModels, read_message, write_message

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    message = read_message(sys.stdin.buffer)
    if isinstance(message, DescribeModels):
        write_message(answers, describe_models(message))
        return 0
    if isinstance(message, DigestModels):
        write_message(answers, digest_models(message))
        return 0
    return run_async(serve_model(message, answers))


def describe_models(message: DescribeModels) -> ModelsFacts:
    """Describe models, without their weights."""
    from mlxrun.cluster.models.messages import ModelsFacts
    from mlxrun.model.machine.device import get_memory_limit
    from mlxrun.model.machine.device_choice import use_device

    first = message.configs[0]
    use_device(first.engine)
    found = [_describe_model(config) for config in message.configs]
    return ModelsFacts(found, get_memory_limit(first.scheduler.memory_limit))


def _describe_model(config: Config) -> ModelFacts | MlxrunError:
    from mlxrun.api.ollama.response import describe_model, list_tags
    from mlxrun.api.text.model_info import list_accepted_names, list_names
    from mlxrun.cli.run_setup import make_context, read_model
    from mlxrun.cluster.models.messages import ModelFacts
    from mlxrun.server.endpoints.openai import describe_listed
    from mlxrun.server.engine_state import list_modalities, list_tasks

    try:
        model = read_model(config.model, weights=False, announce=False)
        names = list_names(model)
        needed, weights, shortage = measure_need(config, model)
        return ModelFacts(
            names=list_accepted_names(model),
            tasks=list_tasks(model),
            modalities=list_modalities(model),
            context_length=model.context_length,
            needed=needed,
            weights=weights,
            shortage=shortage,
            listed=[describe_listed(name, model) for name in names],
            tags=list_tags(model)["models"],
            shown=describe_model(make_context(config, model)),
        )
    except MlxrunError as error:
        return error


def digest_models(message: DigestModels) -> str:
    """Digest the settings and the files of models; for one that cannot be read, what is wrong with it."""
    from mlxrun.cli.run_setup import read_model
    from mlxrun.jobs.lines.line_keys import collect_settings, digest_settings

    found: dict[str, Any] = {}
    for config in message.configs:
        try:
            model = read_model(config.model, weights=False, announce=False)
            found[config.model.names[0]] = collect_settings(config, model)
        except MlxrunError as error:
            found[config.model.names[0]] = str(error)
    return digest_settings(found)


def measure_need(config: Config, model: LoadedModelInfo) -> tuple[int, int, str | None]:
    """The bytes with which a model serves ROWS rows of TOKENS tokens, or of its context if that is shorter.
    The bytes of its weights. And why no request fits in the memory limit, if none does."""
    from mlxrun.cli.run_setup import judge_fit
    from mlxrun.model.fit.verdict import WantedRows
    from mlxrun.model.load.footprint import list_tensor_bytes
    from mlxrun.model.load.loader import choose_dtype
    from mlxrun.model.pooling.pooled_model import is_encoder

    if is_encoder(model.config) or model.speech is not None:
        dtype = choose_dtype(config.model)
        sizes = list_tensor_bytes(model, None if dtype is None else dtype.size)
        weights = sum(loaded for _, loaded in sizes)
        return weights + ENCODER_WORK, weights, None
    report = judge_fit(config, WantedRows(ROWS, min(TOKENS, model.context_length)))
    needed = int(report.needed / (1 - config.scheduler.memory_headroom)) + 1
    return max(needed, report.load, report.run), report.weights, report.shortage


async def serve_model(spec: ServeModel, answers: BinaryIO) -> int:
    """Serve a model until standard input ends, or its engine dies."""
    from mlxrun.cli.options import set_up_logging
    from mlxrun.cli.run_setup import load_engine
    from mlxrun.cluster.models.messages import write_message
    from mlxrun.cluster.models.model_lines import LineDesk
    from mlxrun.cluster.models.shared_limits import LimitReporter
    from mlxrun.cluster.servers.server_actor import make_worker_app
    from mlxrun.core.workers import finishes_before
    from mlxrun.server.engine_state import ENGINE
    from mlxrun.server.lifecycle import drain, listen, set_switch_interval
    from mlxrun.server.live_requests import LIVE_REQUESTS

    set_up_logging(spec.config.log)
    name_log_lines(spec.config.model.names[0])
    ended = watch_input()
    async with AsyncExitStack() as stack:
        stack.enter_context(set_switch_interval())
        loading = asyncio.create_task(load_engine(spec.config))
        if not await finishes_before(loading, ended.wait()):
            os._exit(0)  # a thread that loads cannot be interrupted, and has nothing that must be saved
        try:
            loaded = loading.result()
        except MlxrunError as error:
            write_message(answers, error)
            return error.exit_code
        stack.push_async_callback(loaded.client.close)
        lines = [LineDesk(loaded, spec.config).surface]
        app = make_worker_app(spec.config, spec.number, spec.secret, spec.responses_path, lines)
        app[LIVE_REQUESTS].limits = LimitReporter(partial(write_message, answers))
        app[ENGINE].attach(loaded)
        settings = replace(spec.config.server, host="127.0.0.1", port=0)
        write_message(answers, await stack.enter_async_context(listen(app, settings)))
        died = asyncio.create_task(loaded.client.wait_until_dead())
        if await finishes_before(died, ended.wait()):
            write_message(answers, f"its engine has died: {loaded.client.dead_error}")
        await drain(app)
    return 0


def name_log_lines(name: str) -> None:
    """Begin each log line of this process with the name of its model."""

    def add_name(record: logging.LogRecord) -> bool:
        record.msg = f"{name}: {record.msg}"
        return True

    for handler in logging.getLogger().handlers:
        handler.addFilter(add_name)


def watch_input() -> asyncio.Event:
    """The event that standard input has ended."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()

    def wait() -> None:
        sys.stdin.buffer.read()
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=wait, daemon=True, name="input").start()
    return ended


if __name__ == "__main__":
    sys.exit(main())
