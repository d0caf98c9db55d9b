"""Jobs and servers whose engines are workers on Ray (`--ray`). Without the option, this module is not
imported.

Ray is reached before the model is looked at, so that a wrong address is known within seconds.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

from mlxrun.cli.options import say
from mlxrun.cli.run_setup import load_engine, load_model, load_preparer, make_context
from mlxrun.core.errors import ConfigError
from mlxrun.core.terminal import print_line

if TYPE_CHECKING:
    from mlxrun.config.loading import LoadedConfig
    from mlxrun.config.settings import Config
    from mlxrun.engine.client import EngineClient
    from mlxrun.jobs.records.run_paths import JobPaths
    from mlxrun.jobs.run.job_run import JobSetup
    from mlxrun.model.load.model_info import LoadedModelInfo


def load_worker_configs(loaded: LoadedConfig) -> dict[int, Config]:
    """Load the configs of the workers that `workers.overrides` names, by number. ConfigError names the
    worker."""
    from mlxrun.config.loading import load_config

    # A worker has an address of its own, and its overrides go over the model of the command.
    model = (f"{key}={text}" for _, key, text in loaded.options if key == "model.path")
    given = (*loaded.sets, *model)
    own: defaultdict[int, list[str]] = defaultdict(list)
    for key, value in loaded.config.workers.overrides.items():
        number, _, setting = key.partition(".")
        own[int(number)].append(f"{setting}={_quote(value)}")
    found = {}
    for worker, values in own.items():
        try:
            found[worker] = load_config(loaded.path, (*given, *values), os.environ).config
        except ConfigError as error:
            raise ConfigError(f"workers.overrides, worker {worker}: {error}") from error
    return found


def check_overrides(configs: Mapping[int, Config], count: int) -> None:
    """Raise ConfigError if workers.overrides names a worker that does not exist."""
    if configs and max(configs) >= count:
        raise ConfigError(
            f"workers.overrides: there is no worker {max(configs)}; the last one is {count - 1}"
        )


def describe_driver(config: Config, model: LoadedModelInfo) -> dict[str, Any]:
    """Describe this process by the facts (`WorkerFacts`) in which the first worker must be like it."""
    from mlxrun.jobs.lines.line_keys import collect_settings, digest_settings
    from mlxrun.jobs.records.manifest_checks import list_versions

    settings = digest_settings(collect_settings(config, model))
    return {"versions": list_versions(), "model": model.digests["model"], "settings": settings}


def _quote(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@asynccontextmanager
async def run_on_ray(
    address: str, loaded: LoadedConfig, paths: JobPaths, mixed: bool
) -> AsyncIterator[JobSetup]:
    """Give the setup of a job on the workers of a cluster, which end with it. ConfigError if Ray cannot be
    reached or has no room, JobError or WorkerRefused if the first worker cannot be used."""
    from mlxrun.cluster.ray.ray_workers import RayJob
    from mlxrun.jobs.run.job_run import JobSetup
    from mlxrun.jobs.run.progress import pluralize

    config = loaded.config
    if config.batch.user_model is not None:
        raise ConfigError("batch.user_model: workers on Ray have one model each; run this job without --ray")
    job = RayJob(address, config, load_worker_configs(loaded), paths.job, paths.cache, mixed)
    count = job.connect()
    try:
        check_overrides(job.configs, count)
        model_info, preparer = load_preparer(config, paths.job.parent, weights=True)
        first = await job.describe_first(describe_driver(config, model_info))
        say(f"{pluralize(count, 'worker')} on Ray; the first is on {first.host}: {first.device.get('name')}")

        async def start() -> EngineClient:
            raise AssertionError("the workers have the engines")

        def describe() -> dict[str, Any]:
            return dict(first.device)

        yield JobSetup(config, loaded.digest, model_info, preparer, start, describe, pool=job.pool)
    finally:
        await job.close()


async def serve_on_ray(address: str, loaded: LoadedConfig, mixed: bool) -> int:
    """Serve on the workers of a cluster, as `mlxrun serve` does. SIGHUP restarts them one after the other.
    ConfigError if Ray cannot be reached or has no room, WorkerRefused if no worker can be used."""
    from mlxrun.cli.run_pages import show_runs
    from mlxrun.cluster.ray.ray_servers import RayServers
    from mlxrun.cluster.servers.worker_relay import make_front
    from mlxrun.engine.client import EngineClient
    from mlxrun.jobs.run.progress import pluralize
    from mlxrun.server.engine_state import LoadedEngine
    from mlxrun.server.lifecycle import run
    from mlxrun.server.running_servers import make_note

    config, loop = loaded.config, asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, lambda: None)  # there is nothing to restart yet
    servers = RayServers(address, config, load_worker_configs(loaded), load_engine, mixed)
    count = servers.connect()
    pool = servers.pool

    async def load() -> LoadedEngine:
        model = await load_model(config, weights=False)
        context = make_context(config, model)
        servers.expect(describe_driver(config, model))
        try:
            await pool.start()
        except BaseException:
            await pool.close()
            raise
        restart = pool.restart_soon
        loop.add_signal_handler(signal.SIGHUP, restart, config.server.drain_timeout)
        return LoadedEngine(cast(EngineClient, pool), context, {})

    try:
        check_overrides(servers.configs, count)
        say(f"{pluralize(count, 'worker')} on Ray")
        note = make_note(config, os.environ)
        front = show_runs(make_front(config, pool, servers.secret), config)
        return await run(front, load, print_line, note=note)
    finally:
        await servers.disconnect()
