"""Whether a finished cell of a suite was computed, and scored, as the suite says now.

Its lines are not looked at here, nor are the files of its model, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxrun.config.setting_fields import to_plain
from mlxrun.config.settings import Config
from mlxrun.core.errors import JobError
from mlxrun.evals.run_folders.run_folder_paths import read_manifest
from mlxrun.evals.suites.matrix import Cell
from mlxrun.evals.suites.task_template import parse_task_judge
from mlxrun.jobs.records.manifest_checks import flatten_settings
from mlxrun.jobs.records.run_paths import JobPaths
from mlxrun.jobs.scoring.custom_scorer import load_scorer

# Keys of a config that change answers, whatever the model is, and parts of paths that may have moved.
_DECISIVE = (
    *("model.kind", "model.dtype", "model.context_length", "model.chat_template_args.", "model.pooling"),
    *("sampling.", "parsers.", "prefill.", "structured.close_objects", "engine.reproducible"),
    *("cache.stored_bits", "cache.kv_"),
)
_PATHS = ("model.path", "model.adapter", "model.adapters.", "model.chat_template")


def is_computed_as_now(cell: Cell, job: Path, folder: Path, is_answered: bool) -> bool:
    """Whether a finished cell has the settings, and the judge or the sources of scorers, that the suite in
    `folder` has now. Another scorer, which `mlxrun score` was given, is none of the suite's. `is_answered`:
    it has answers that a judge could judge."""
    try:
        manifest = read_manifest(JobPaths(job).out)
    except JobError:  # damaged or missing; a start of the cell mends it
        return True
    known = manifest.get("config")
    if known and _choose_decisive(known) != _choose_decisive(to_plain(cell.config)):
        return False
    scoring = manifest.get("scoring") or {}
    judge = parse_task_judge(cell.task, folder, f"{cell.name}: judge")
    if judge is not None and is_answered:
        return bool(scoring.get("judge", {}).get("sha256") == judge.digest)
    scorers = {} if "scorer" in scoring else scoring.get("scorers", {})
    try:
        return all(load_scorer(name).digest == digest for name, digest in scorers.items())
    except JobError:
        return False


def _choose_decisive(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of a config as manifests have it, the flat settings by which answers are others. Of a path, the last
    part counts. What an earlier version did not have is as it is by default."""
    settings = flatten_settings(to_plain(Config())) | flatten_settings(config)
    found = {key: value for key, value in settings.items() if key.startswith(_DECISIVE)}
    paths = {key: value for key, value in settings.items() if key in _PATHS or key.startswith(_PATHS[2])}
    return found | {key: Path(str(value)).name for key, value in paths.items()}
