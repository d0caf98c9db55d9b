"""Exports one run or the runs of a suite: checks all of them, then writes the files of a format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlxrun.core.errors import JobError
from mlxrun.evals.exports.every_eval_ever import write_every_eval_ever
from mlxrun.evals.exports.exported_run import ExportedRun, ExportNames
from mlxrun.evals.exports.inspect_log import SUFFIXES, write_inspect_log
from mlxrun.evals.exports.lm_eval_files import write_lm_eval_files
from mlxrun.evals.exports.model_card import write_model_card
from mlxrun.evals.run_folders.run_folder import open_runs
from mlxrun.evals.run_folders.run_folder_paths import find_suite

INSPECT, LM_EVAL, EVERY_EVAL_EVER, MODEL_CARD = FORMATS = (
    "inspect",
    "lm-eval",
    "every-eval-ever",
    "model-card",
)


def export_runs(
    path: Path, form: str, out: Path | None, names: ExportNames, *, partial: bool = False
) -> list[Path]:
    """Write the runs that `path` names in one of FORMATS, and return the paths of the files. `out`: a file if
    the format is one file, else a folder; None for the run folder, or the folder of a suite. `partial`:
    export unfinished runs too. JobError if a run cannot be exported, or a file cannot be written."""
    runs = [ExportedRun.check(run, names, partial=partial) for run in open_runs(path)]
    if len(runs) > 1 and names.task is not None:
        raise JobError(f"{path}: contains {len(runs)} runs, and --task names the task of one")
    place = out or _choose_place(path, runs, form)
    if form == INSPECT and len(runs) == 1 and place.suffix not in SUFFIXES:
        raise JobError(f"{place}: the name of an Inspect log ends in {' or '.join(SUFFIXES)}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        return _write(runs, form, place)
    except OSError as error:
        raise JobError(f"{error.filename or place}: cannot be written: {error.strerror or error}") from error


def _choose_place(path: Path, runs: Sequence[ExportedRun], form: str) -> Path:
    folder = find_suite(path) or runs[0].run.paths.folder
    if len(runs) > 1:
        folder = path.with_suffix(".out") if path.is_file() else path
    names = {MODEL_CARD: "model-card.md"} | ({} if len(runs) > 1 else {INSPECT: "inspect.eval"})
    return folder / names.get(form, form)


def _write(runs: Sequence[ExportedRun], form: str, place: Path) -> list[Path]:
    if form == MODEL_CARD:
        write_model_card(runs, place)
        return [place]
    if form == EVERY_EVAL_EVER:
        return [file for run in runs for file in write_every_eval_ever(run, place)]
    if form == LM_EVAL:
        folders = {run: place if len(runs) == 1 else place / run.run.name for run in runs}
        return [file for run, folder in folders.items() for file in write_lm_eval_files(run, folder)]
    files = [place]
    if len(runs) > 1:
        place.mkdir(parents=True, exist_ok=True)
        files = [place / f"{run.run.name.replace('/', '__')}.eval" for run in runs]
    for run, file in zip(runs, files, strict=True):
        write_inspect_log(run, file)
    return files
