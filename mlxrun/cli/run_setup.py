"""Loads what commands need: a model's files without its weights, the engine of a server, and the setup of a
job.

Files are read under a watchdog, as a file system may hang. Later, the engine's thread has the same watchdog.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxrun.cli.options import list_first, say, set_up_logging
from mlxrun.core.errors import ConfigError, MlxrunError
from mlxrun.core.terminal import print_error, print_line

if TYPE_CHECKING:
    from mlxrun.api.prepared import ApiContext
    from mlxrun.config.loading import LoadedConfig
    from mlxrun.config.settings import Config, ModelSettings
    from mlxrun.evals.run_folders.run_folder import RunFolder
    from mlxrun.evals.suites.suite_run import SharedEngine
    from mlxrun.jobs.run.job_run import JobSetup
    from mlxrun.jobs.run.line_answerer import LinePreparer
    from mlxrun.model.fit.verdict import FitReport, WantedRows
    from mlxrun.model.load.model_info import LoadedModelInfo
    from mlxrun.server.engine_state import LoadedEngine

STUCK_EXIT = 3  # of an engine that cannot be used


def read_model(settings: ModelSettings, **options: Any) -> LoadedModelInfo:
    """Read a model with `load_model_info`, which has the options. A file system that answers no more ends the
    process with STUCK_EXIT, as no exception can end the wait."""
    from mlxrun.engine.watchdog import watch
    from mlxrun.model.load.model_info import load_model_info

    with watch("reading the model's files", _end_process):
        return load_model_info(settings, **options)


def _end_process(problem: str) -> None:
    print_error(f"mlxrun: the model cannot be loaded: {problem}")
    sys.stderr.flush()
    os._exit(STUCK_EXIT)


def judge_fit(config: Config, wanted: WantedRows) -> FitReport:
    """Judge whether the model of a config fits in memory. Of one on the hub, the headers of the weights are
    enough. ModelLoadError or ConfigError as `judge_model`."""
    from mlxrun.engine.watchdog import watch
    from mlxrun.model.fit.verdict import judge_model
    from mlxrun.model.load.remote_headers import open_headers

    with open_headers(config.model) as model, watch("reading the model's files", _end_process):
        return judge_model(replace(config, model=model), wanted, config.model.path)


def read_engines(config: Config, info: LoadedModelInfo) -> list[tuple[Config, LoadedModelInfo]]:
    """Return the config of each engine of a job, with its model. The first one is the job's own (`info`), a
    second one plays the user. Two have their part of the memory each."""
    from mlxrun.jobs.agents.agent_settings import make_user_config
    from mlxrun.model.load.remote_headers import open_headers

    user_config = make_user_config(config)
    if user_config is None:
        return [(config, info)]
    with ExitStack() as stack:

        def read(settings: ModelSettings) -> LoadedModelInfo:
            model = stack.enter_context(open_headers(settings))
            return read_model(model, weights=True, announce=False, digest=False)

        own = read(config.model)
        with name_model_errors("batch.user_model"):
            user = read(user_config.model)
        pairs = (config, own, user), (user_config, user, own)
        return [(share_memory_limit(each, info, other), info) for each, info, other in pairs]


@contextmanager
def name_model_errors(name: str) -> Iterator[None]:
    """Errors of a model name what it was given as, such as another key than `model.path`."""
    try:
        yield
    except MlxrunError as error:
        error.args = (f"{name}: {str(error).removeprefix('model.path: ')}",)
        raise


MODEL_HELP = "Where the model's files are now, as model.path. Default: where they were."
USER_MODEL_HELP = "The same of the model that plays the user, where that is another one."


def report_machine(run: RunFolder) -> list[str]:
    """Print, and return, the differences between this machine and the run's: why bytes may differ here."""
    import mlxrun.model  # noqa: F401  the BLAS library goes before mlx
    from mlxrun.evals.replay import list_machine_differences, read_engine_settings
    from mlxrun.jobs.records.manifest_checks import RunEnvironment, list_versions
    from mlxrun.model.machine.device import describe_device

    settings = read_engine_settings(run)
    try:
        device = describe_device(settings)
    except ConfigError:  # a GPU, which is not here
        device = describe_device(replace(settings, device="auto"))
    here = RunEnvironment(list_versions(), device)
    found = list_machine_differences(run.manifest, here)
    for text in found:
        print_line(f"{run.name}: differs here: {text}")
    if found:
        print_line(f"{run.name}: bytes may therefore differ, first in the last digits of logprobs")
    else:
        print_line(f"{run.name}: versions, device and BLAS are those of the run")
    return found


def report_problems(run: RunFolder) -> bool:
    """Print what is not as the run wrote it. Returns whether there is anything."""
    problems = run.check()
    for line in list_first(problems):
        print_line(line)
    return bool(problems)


def report_progress(run: RunFolder) -> int:
    """Print how far an unfinished run is. Returns the number of its finished lines."""
    from mlxrun.evals.run_folders.run_folder import DONE

    finished = run.count_lines()
    if run.state != DONE:
        print_line(f"{run.name}: the run is {run.state}: {finished} of {run.total} lines are finished")
    return finished


def report_stale(runs: Sequence[RunFolder], path: Path) -> None:
    """Print which runs are cells of a suite whose lines would be others now, and which cells failed. `path`:
    what names the runs."""
    from mlxrun.evals.suites.suite_manifest import list_stale

    for text in list_stale(runs, path):
        say(f"warning: {text}")


def make_run_setup(
    run: RunFolder,
    model: str | None,
    choose_engine_config: Callable[[Config], Config],
    user_model: str | None = None,
) -> JobSetup:
    """Make the setup of the run's lines. ConfigError, ModelLoadError, or JobError if the model's files are
    not those of the run. `model`, `user_model`: replace the recorded model.path and batch.user_model. The
    model keeps its name in the run, which is in the records."""
    from mlxrun.config.setting_fields import hash_config
    from mlxrun.evals.replay import check_model, rebuild_config

    config = rebuild_config(run)
    if model is not None:
        config = replace(config, model=replace(config.model, path=model))
    if user_model is not None and config.batch.user_model is not None:
        config = replace(config, batch=replace(config.batch, user_model=user_model))
    set_up_logging(config.log)
    name = run.manifest["model"].get("name")  # missing in runs of versions before it was recorded
    model_info, preparer = load_preparer(config, run.paths.job.parent, weights=True, name=name)
    setup = _make_setup(config, hash_config(config), model_info, preparer, choose_engine_config)
    check_model(run, setup.collect_settings(), config.model.path)
    return setup


async def run_by_engine(
    runs: Sequence[RunFolder], work: Callable[[RunFolder, SharedEngine], Coroutine[Any, Any, bool]]
) -> list[bool]:
    """Do `work` for all runs. Those that can use one engine come one after the other, so that a suite loads
    each model once."""
    from mlxrun.evals.suites.matrix import compute_engine_key
    from mlxrun.evals.suites.suite_run import SharedEngine

    groups: dict[str, list[RunFolder]] = {}
    for each in runs:
        groups.setdefault(compute_engine_key(each.manifest["config"]), []).append(each)
    found: list[bool] = []
    for group in groups.values():
        engine = SharedEngine()
        try:
            found += [await work(each, engine) for each in group]
        finally:
            await engine.close()
    return found


def end_runs(good: Sequence[bool], left_out: Sequence[str]) -> int:
    """Print which runs of a bundle were left out, and return the exit code of a command over all its runs."""
    for text in left_out:
        print_line(f"left out: {text}")
    return 1 if not all(good) else 2 if left_out else 0


def make_command_setup(loaded: LoadedConfig, folder: Path, cache: Path) -> JobSetup:
    """Make the setup of a job on the model of a command's config. `folder`: the folder of relative image
    paths; `cache`: the folder of the job's prefix cache. ModelLoadError if the model cannot be loaded."""
    model_info, preparer = load_preparer(loaded.config, folder, weights=True)
    from mlxrun.jobs.run.job_cache import choose_engine_config

    return _make_setup(
        loaded.config, loaded.digest, model_info, preparer, lambda config: choose_engine_config(config, cache)
    )


def load_preparer(
    config: Config, folder: Path, *, weights: bool, name: str | None = None
) -> tuple[LoadedModelInfo, LinePreparer]:
    """Load the model of a config without weights, and make the preparer of its lines. ModelLoadError if there
    is no such model. `folder`: the folder of relative image paths; `weights`: whether the files of weights
    must exist; `name`: replaces the model's own name."""
    # A job whose lines are all done loads no weights, so that `start` announces them.
    model_info = read_model(config.model, weights=weights, announce=False)
    if name is not None and name != model_info.name:
        model_info = replace(model_info, name=name, aliases=(*model_info.aliases, model_info.name))
    from mlxrun.jobs.run.line_answerer import LinePreparer

    return model_info, LinePreparer(model_info, config, folder)


def _make_setup(
    config: Config,
    digest: str,
    model_info: LoadedModelInfo,
    preparer: LinePreparer,
    choose_engine_config: Callable[[Config], Config],
) -> JobSetup:
    from mlxrun.config.setting_fields import hash_config
    from mlxrun.engine.client import EngineClient
    from mlxrun.jobs.agents.agent_settings import make_user_config
    from mlxrun.jobs.run.job_run import JobSetup
    from mlxrun.model.load.model_info import log_weights
    from mlxrun.model.machine.device import describe_device

    device = partial(describe_device, config.engine)
    user_config, user = make_user_config(config), None
    infos = [model_info]

    async def start(at: int) -> EngineClient:
        own = config if at == 0 or user_config is None else user_config
        log_weights(own.model, infos[at].folder)
        if len(infos) > 1:
            own = share_memory_limit(own, infos[at], infos[1 - at])
        return await EngineClient.start(choose_engine_config(own), infos[at])

    if user_config is not None:
        with name_model_errors("batch.user_model"):
            info, user_preparer = load_preparer(user_config, preparer.folder or Path(), weights=True)
        infos.append(info)
        user = JobSetup(user_config, hash_config(user_config), info, user_preparer, partial(start, 1), device)
    return JobSetup(config, digest, model_info, preparer, partial(start, 0), device, user=user)


def share_memory_limit(config: Config, own: Any, other: Any) -> Config:
    """Return the config of an engine beside that of another model. They share the memory in proportion to
    their files. With engine.reproducible they do so only if the config has a limit, as the form of quantized
    weights follows from it."""
    from mlxrun.model.load.model_files import count_file_bytes
    from mlxrun.model.machine.device import get_memory_limit

    limit = config.scheduler.memory_limit
    if limit is None and not config.engine.reproducible:
        limit = get_memory_limit()
    if not limit:
        return config
    sizes = [count_file_bytes(each.folder) for each in (own, other)]
    share = max(1, limit * sizes[0] // (sum(sizes) or 1))
    return replace(config, scheduler=replace(config.scheduler, memory_limit=share))


async def load_engine(config: Config) -> LoadedEngine:
    """Load the model of a config on an engine of its own."""
    from mlxrun.engine.client import EngineClient
    from mlxrun.model.machine.device import describe_device
    from mlxrun.model.machine.versions import list_library_versions
    from mlxrun.server.engine_state import LoadedEngine

    model = await load_model(config, weights=True)
    context = make_context(config, model)
    client = await EngineClient.start(config, model)
    try:
        facts = {"versions": list_library_versions(), "device": describe_device(config.engine)}
        return LoadedEngine(client, context, facts)
    except BaseException:
        await client.close()
        raise


async def load_model(config: Config, *, weights: bool) -> LoadedModelInfo:
    """Read the model of a config on a thread, without its weights. `weights`: whether their files must
    exist."""
    return await asyncio.to_thread(read_model, config.model, weights=weights)


def make_context(config: Config, model: LoadedModelInfo) -> ApiContext:
    """Make the context that turns request bodies into token ids for the model of a config."""
    from mlxrun.api.parsers.registry import detect_formats
    from mlxrun.api.prepared import ApiContext
    from mlxrun.api.text.media.images import MediaLoader
    from mlxrun.config.media_settings import get_image_bytes

    formats = detect_formats(model.chat_template, model.tokenizer, config.parsers)
    image_bytes = get_image_bytes(config.media.memory_bytes, config.scheduler.memory_limit)
    loader = MediaLoader(config.media, None, memory_bytes=image_bytes)
    return ApiContext(model, config, loader, formats)
