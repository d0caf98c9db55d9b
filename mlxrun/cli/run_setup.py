"""Loads a model for the lines of a job: that of an earlier run with its config, or that of a command's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mlxrun.cli.model_reading import read_model
from mlxrun.cli.options import list_first
from mlxrun.core.terminal import print_line

if TYPE_CHECKING:
    from mlxrun.config.loading import LoadedConfig
    from mlxrun.config.settings import Config
    from mlxrun.evals.run_folders.run_folder import RunFolder
    from mlxrun.jobs.run.job_run import JobSetup
    from mlxrun.jobs.run.line_answerer import LinePreparer
    from mlxrun.model.load.model_info import LoadedModelInfo

MODEL_HELP = "Where the model's files are now, as model.path. Default: where they were."


def report_machine(run: RunFolder) -> list[str]:
    """Print why bytes may differ here: what of this machine is not as on that of the run. Returns it."""
    import mlxrun.model  # noqa: F401  the BLAS library goes before mlx
    from mlxrun.evals.replay import list_machine_differences, read_engine_settings
    from mlxrun.jobs.records.manifest_checks import RunEnvironment, list_versions
    from mlxrun.model.machine.device import describe_device

    here = RunEnvironment(list_versions(), describe_device(read_engine_settings(run)))
    found = list_machine_differences(run.manifest, here)
    for text in found:
        print_line(f"{run.name}: differs here: {text}")
    if found:
        print_line(f"{run.name}: bytes may therefore differ, first in the last digits of logprobs")
    else:
        print_line(f"{run.name}: versions, device and BLAS are those of the run")
    return found


def report_problems(run: RunFolder) -> bool:
    """Print what is not as the run wrote it; whether there is anything."""
    problems = run.check()
    for line in list_first(problems):
        print_line(line)
    return bool(problems)


def report_progress(run: RunFolder) -> int:
    """Print how far a run is that is not done; the number of its finished lines."""
    from mlxrun.evals.run_folders.run_folder import DONE

    finished = run.count_lines()
    if run.state != DONE:
        print_line(f"{run.name}: the run is {run.state}: {finished} of {run.total} lines are finished")
    return finished


def make_run_setup(
    run: RunFolder, model: str | None, choose_engine_config: Callable[[Config], Config]
) -> JobSetup:
    """The setup of the run's lines. ConfigError, ModelLoadError, or JobError if the model's files are not
    those of the run. `model`: instead of the recorded model.path."""
    from mlxrun.cli.logging_setup import set_up_logging
    from mlxrun.config.conversion import hash_config
    from mlxrun.evals.replay import check_model, rebuild_config
    from mlxrun.jobs.lines.line_keys import collect_settings

    config = rebuild_config(run)
    if model is not None:
        config = replace(config, model=replace(config.model, path=model))
    set_up_logging(config.log)
    model_info, preparer = load_preparer(config, run.paths.job.parent, weights=True)
    check_model(run, collect_settings(config, model_info), config.model.path)
    return _make_setup(config, hash_config(config), model_info, preparer, choose_engine_config)


def make_command_setup(loaded: LoadedConfig, folder: Path, cache: Path) -> JobSetup:
    """The setup of a job on the model of a command's config. `folder`: image paths are relative to it;
    `cache`: the folder of the job's prefix cache. ModelLoadError if the model cannot be loaded."""
    model_info, preparer = load_preparer(loaded.config, folder, weights=True)
    from mlxrun.jobs.run.job_cache import choose_engine_config

    return _make_setup(
        loaded.config, loaded.digest, model_info, preparer, lambda config: choose_engine_config(config, cache)
    )


def load_preparer(config: Config, folder: Path, *, weights: bool) -> tuple[LoadedModelInfo, LinePreparer]:
    """The model of a config, and what prepares lines for it. `folder`: image paths are relative to it;
    `weights`: whether their files must be there too. ModelLoadError if there is no such model."""
    # A job whose lines are all done loads no weights, so that `start` announces them.
    model_info = read_model(config.model, weights=weights, announce=False)
    from mlxrun.api.parsers.registry import detect_formats
    from mlxrun.jobs.run.line_answerer import LinePreparer

    formats = detect_formats(model_info.chat_template, model_info.tokenizer, config.parsers)
    return model_info, LinePreparer(model_info, config, folder, formats=formats)


def _make_setup(
    config: Config,
    digest: str,
    model_info: LoadedModelInfo,
    preparer: LinePreparer,
    choose_engine_config: Callable[[Config], Config],
) -> JobSetup:
    from mlxrun.engine.client import EngineClient
    from mlxrun.jobs.run.job_run import JobSetup
    from mlxrun.model.load.model_info import log_weights
    from mlxrun.model.machine.device import describe_device

    async def start() -> EngineClient:
        log_weights(config.model, model_info.folder)
        return await EngineClient.start(choose_engine_config(config), model_info)

    device = partial(describe_device, config.engine)
    return JobSetup(config, digest, model_info, preparer, start, device)
