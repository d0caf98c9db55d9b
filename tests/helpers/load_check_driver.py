"""Runs the load check on a tiny model, without an engine."""

from __future__ import annotations

from pathlib import Path

from mlxrun.model.load.loader import load_caller
from mlxrun.model.load.model_info import load_model_info
from mlxrun.model.load_check.choose import choose_methods
from mlxrun.model.load_check.report import LoadCheckReport
from mlxrun.model.load_check.text_ladder import RefusedModelError
from mlxrun.model.machine.device import resolve_config
from mlxrun.model.run.model_caller import run_trial_forward
from tests.helpers.engine_driver import make_config


def probe_model(folder: Path, **options: object) -> LoadCheckReport:
    """What the load check finds. `options`: as in engine_driver.make_config."""
    config = resolve_config(make_config(folder, **options))
    info = load_model_info(config.model, weights=True)
    caller = load_caller(config, info)
    _, vocab = run_trial_forward(caller)
    return choose_methods(caller, vocab, config, info)


def find_failed(folder: Path, **options: object) -> list[str]:
    """The names of the checks that do not pass, of a model that is refused too."""
    try:
        return list_failed(probe_model(folder, **options))
    except RefusedModelError as error:
        return [check.name for check in error.checks if not check.passed]


def list_failed(report: LoadCheckReport) -> list[str]:
    """The names of the checks that did not pass."""
    return [check.name for check in report.checks if not check.passed]
