"""The setup of a job whose engines are workers on Ray (`mlxrun batch --ray`). Without the option nothing here
is imported.

Ray is reached before the model is looked at, so that a wrong address is known within seconds.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mlxrun.cli.options import say
from mlxrun.cli.run_setup import load_preparer
from mlxrun.errors import ConfigError

if TYPE_CHECKING:
    from mlxrun.batch.job_run import JobSetup
    from mlxrun.batch.run_paths import JobPaths
    from mlxrun.config.loading import LoadedConfig
    from mlxrun.config.settings import Config
    from mlxrun.engine.client import EngineClient


def load_worker_configs(loaded: LoadedConfig, sets: Sequence[str]) -> dict[int, Config]:
    """The configs of the workers that `workers.overrides` names, by number."""
    from mlxrun.config.loading import load_config

    own: defaultdict[int, list[str]] = defaultdict(list)
    for key, value in loaded.config.workers.overrides.items():
        number, _, setting = key.partition(".")
        own[int(number)].append(f"{setting}={_quote(value)}")
    found = {}
    for worker, values in own.items():
        try:
            found[worker] = load_config(loaded.path, (*sets, *values), os.environ).config
        except ConfigError as error:
            raise ConfigError(f"workers.overrides, worker {worker}: {error}") from error
    return found


def _quote(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@asynccontextmanager
async def run_on_ray(
    address: str, loaded: LoadedConfig, sets: Sequence[str], paths: JobPaths, mixed: bool
) -> AsyncIterator[JobSetup]:
    """The setup of a job on the workers of a cluster, which end with it. ConfigError if Ray cannot be reached
    or has no room, JobError or WorkerRefused if the first worker cannot be used."""
    from mlxrun.batch.job_run import JobSetup
    from mlxrun.batch.line_keys import collect_settings, digest_settings
    from mlxrun.batch.manifest_environment import list_versions
    from mlxrun.batch.progress import pluralize
    from mlxrun.distributed.ray_workers import RayJob
    from mlxrun.distributed.worker_checks import check_worker

    config = loaded.config
    job = RayJob(address, config, load_worker_configs(loaded, sets), paths.job, paths.cache, mixed)
    count = job.connect()
    try:
        if config.workers.overrides and max(job.configs) >= count:
            most = max(job.configs)
            raise ConfigError(f"workers.overrides: there is no worker {most}; the last one is {count - 1}")
        model_info, preparer = load_preparer(config, paths.job.parent, weights=True)
        first = await job.describe_first()
        settings = digest_settings(collect_settings(config, model_info))
        here = replace(first, versions=list_versions(), model=model_info.digests["model"], settings=settings)
        check_worker(first, here, mixed=mixed)
        say(f"{pluralize(count, 'worker')} on Ray; the first is on {first.host}: {first.device.get('name')}")

        async def start() -> EngineClient:
            raise AssertionError("the workers have the engines")

        def describe() -> dict[str, Any]:
            return dict(first.device)

        yield JobSetup(config, loaded.digest, model_info, preparer, start, describe, pool=job.pool)
    finally:
        await job.close()
