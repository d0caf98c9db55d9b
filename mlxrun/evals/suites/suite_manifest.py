"""suite.json: the cells of a suite with their states and scores, and each start of it. Also the matrix of
scores.

The file is replaced as a whole at every change of a cell's state; after a kill it has the state before. How a
cell was computed is in the manifest of its own run.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from mlxrun.core.errors import JobError
from mlxrun.core.terminal import make_columns, print_table
from mlxrun.core.text_files import read_json
from mlxrun.evals.comparisons.pairing import remove_seed
from mlxrun.evals.run_folders.run_folder import LIMITED, RunFolder
from mlxrun.evals.run_folders.run_folder_paths import SUITE_NAME, find_cell
from mlxrun.evals.suites.matrix import Cell
from mlxrun.evals.suites.seed_pool import pool_seeds
from mlxrun.evals.suites.suite_file import SuiteFile
from mlxrun.jobs.records.manifest import write_json
from mlxrun.jobs.records.manifest_checks import UNREADABLE, list_versions
from mlxrun.jobs.records.run_paths import list_common_reasons
from mlxrun.jobs.run.progress import format_now, pluralize
from mlxrun.jobs.scoring.measure import SHARE, ScoreMeasure
from mlxrun.jobs.scoring.score_groups import NOT_SCORED, format_described, is_described_unscored

log = logging.getLogger(__name__)
FORMAT = 1
# The state of a cell whose lines, settings or scorers are others now, and that has not run since.
CHANGED = "changed"
Record = dict[str, Any]
_EMPTY: Record = {
    "job_sha256": None,
    "state": "todo",
    "lines": None,
    "done": 0,
    "failed": 0,
    "cut_by_length": 0,
    "scores": None,
    "tokens": None,
    "seconds": None,
    "error": None,
}


class SuiteManifest:
    """The manifest of a suite during one start. `cells`: all cells of the suite, also those that this start
    leaves out."""

    def __init__(self, folder: Path, file: SuiteFile, cells: Sequence[Cell]) -> None:
        self._folder, self._path = folder, folder / SUITE_NAME
        self.cells = cells
        earlier = read_suite_manifest(self._path) or {"cells": [], "runs": []}
        known = {each["name"]: each for each in earlier["cells"]}
        self.records = {cell.name: _describe_cell(cell, known.get(cell.name, {})) for cell in cells}
        self._runs: list[Record] = earlier["runs"]
        self.pools: list[Record] = earlier.get("pools", [])
        self._head = {
            "format": FORMAT,
            "suite": {"path": os.path.abspath(file.path), "sha256": file.sha256},
            "versions": list_versions(),
            "models": _describe_models(file, cells),
            "tasks": list(dict.fromkeys(cell.task_name for cell in cells)),
        }
        self._loads: dict[str, int] = {}
        self._state = "running"
        self._written = {name: _dump_scores(each) for name, each in self.records.items()}

    def begin(self) -> None:
        """Add this start, and write the manifest."""
        self._loads = {}
        self._runs.append({"started": format_now(), "ended": None, "exit": None, "loads": self._loads})
        self._write()

    def update(self, cell: Cell, **facts: Any) -> None:
        """Change facts of a cell, and write the manifest."""
        self.records[cell.name].update(facts)
        self._write()

    def count_load(self, models: Sequence[str]) -> None:
        """Record that weights are about to be loaded for the cells of these models."""
        for model in models:
            self._loads[model] = self._loads.get(model, 0) + 1
        self._write()

    def end(self, exit_code: int, state: str) -> None:
        """End this start. `state`: done, interrupted or failed."""
        self._runs[-1].update(ended=format_now(), exit=exit_code)
        self._state = state
        self._take_scores()
        self.pools = pool_seeds(self._folder, list(self.records.values()), self.pools)
        self._write()

    def _write(self) -> None:
        self._take_scores()
        cells = list(self.records.values())
        content = {**self._head, "state": self._state, "cells": cells, "pools": self.pools}
        write_json(self._path, {**content, "runs": self._runs})
        self._written = {name: _dump_scores(each) for name, each in self.records.items()}

    def _take_scores(self) -> None:
        """Take over the scores that `update_cell_scores` has written since the last write."""
        with suppress(JobError):
            for each in (load_suite_manifest(self._path) or {"cells": []})["cells"]:
                if self._written.get(each["name"]) not in (None, _dump_scores(each)):
                    self.records[each["name"]]["scores"] = each["scores"]


def update_cell_scores(out: Path, scores: Mapping[str, Any]) -> None:
    """Replace the scores of a cell that was scored again, if `out` is the output of a cell."""
    found = find_cell(out)
    manifest = None if found is None else read_suite_manifest(found[0] / SUITE_NAME)
    if found is None or manifest is None:
        return
    for record in manifest["cells"]:
        if record["name"] == "/".join(found[1:]):
            record["scores"] = scores
    manifest["pools"] = pool_seeds(found[0], manifest["cells"], manifest.get("pools", []))
    write_json(found[0] / SUITE_NAME, manifest)


def _dump_scores(record: Mapping[str, Any]) -> str:
    """The scores of a cell's record as text, which is equal before and after it was written."""
    return json.dumps(record.get("scores"))


def _describe_models(file: SuiteFile, cells: Sequence[Cell]) -> Record:
    """The models in the order of the suite: the path of each in its first cell, its config file, and its
    settings as the suite has them."""
    found: Record = {}
    for cell in cells:
        given = file.suite.models[cell.model]
        facts = {"path": cell.config.model.path, "config": given.config, "set": given.set}
        found.setdefault(cell.model, facts)
    return found


def _describe_cell(cell: Cell, known: Mapping[str, Any]) -> Record:
    """The record of a cell, with what an earlier start has found of it."""
    return {
        "name": cell.name,
        "model": cell.model,
        "task": cell.task_name,
        "variant": cell.variant,
        "settings": dict(cell.settings),
        # That of the answers that are there: this start may be refused.
        "config_hash": known.get("config_hash", cell.config_hash),
        "job": f"{cell.name}/job.jsonl",
        **{key: known.get(key, default) for key, default in _EMPTY.items()},
    }


def read_suite_manifest(path: Path) -> Record | None:
    """Read the manifest of earlier starts. None if there is none or it is unreadable, which loses only their
    history."""
    try:
        return load_suite_manifest(path)
    except JobError as error:
        log.warning("%s; the history of earlier starts is lost", error)
        return None


def load_suite_manifest(path: Path) -> Record | None:
    """Load the manifest of a suite, for those who only show it. None if there is none, JobError if it is
    damaged."""
    try:
        found = read_json(path)
        if found["format"] == FORMAT and all(isinstance(each["name"], str) for each in found["cells"]):
            return {**found, "cells": list(found["cells"]), "runs": list(found["runs"])}
    except FileNotFoundError:
        return None
    except UNREADABLE as error:
        raise JobError(f"{path}: cannot be read ({error})") from error
    raise JobError(f"{path}: has an unknown format")


def list_stale(runs: Sequence[RunFolder], path: Path) -> Iterator[str]:
    """Yield a warning for each run that is a cell which the last start of its suite calls changed or failed.
    If `path`, which names the runs, is the suite, failed cells without answers follow. Suites whose manifest
    is damaged are left out."""
    states: dict[Path, dict[str, str]] = {}
    for run in runs:
        if (found := find_cell(run.paths.out)) is None:
            continue
        folder, name = found[0], "/".join(found[1:])
        if folder not in states:
            states[folder] = _read_states(folder / SUITE_NAME)
        state = states[folder].pop(name, None)
        if state == CHANGED:
            text = "its lines, settings or scorers are earlier ones than those that the suite has now"
            yield f"{run.name}: {CHANGED}: {text}"
        elif state == "failed":
            yield f"{run.name}: failed: its answers, or their scores, are those of an earlier start"
    is_suite = path.suffix in (".yaml", ".yml")
    for folder, rest in states.items():
        if is_suite or folder.resolve() == path.resolve():
            yield from (f"{name}: failed: it is left out" for name in rest if rest[name] == "failed")


def _read_states(path: Path) -> dict[str, str]:
    """The states of a suite's cells, by their names."""
    try:
        found = load_suite_manifest(path)
    except JobError:
        found = None
    return {} if found is None else {each["name"]: str(each.get("state")) for each in found["cells"]}


def print_matrix(
    records: Sequence[Mapping[str, Any]], stream: TextIO, pools: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Print the matrix of scores, and below it the metrics of the cells that have some. A cell without a
    score, or a failed one, shows its state. `pools`: those of cells that differ only in their seeds; each
    comes after its last cell."""
    models = list(dict.fromkeys(each["model"] for each in records))
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for each in records:
        rows.setdefault((each["task"], each["variant"]), {})[each["model"]] = _format_score(each)
    known = {each["name"]: each for each in records}
    pooled: dict[tuple[str, str], dict[str, str]] = {}
    for pool in pools:
        last = known[pool["cells"][-1]]
        pooled.setdefault((last["task"], last["variant"]), {})[last["model"]] = format_pool(pool)
    shown = []
    for (task, variant), scores in rows.items():
        shown.append((task, variant, *(scores.get(model, "") for model in models)))
        if (found := pooled.get((task, variant))) is not None:
            rest = remove_seed(variant)
            name = f"all seeds,{rest}" if rest else "all seeds"
            shown.append((task, name, *(found.get(model, "") for model in models)))
    print_table(make_columns(("task", "variant", *models)), shown, stream)
    _print_metrics([each for each in records if each["scores"] and each["state"] != "failed"], stream)


def _print_metrics(records: Sequence[Mapping[str, Any]], stream: TextIO) -> None:
    """Print the metrics of cells with scores, such as `pass@3`, if any cell has one."""
    cells = [(each, each["scores"]["total"].get("metrics", {})) for each in records]
    names = list(dict.fromkeys(name for _, metrics in cells for name in metrics))
    rows = []
    for each, metrics in cells:
        if metrics:
            shown = (SHARE.format(metrics[name]) if name in metrics else "" for name in names)
            rows.append((each["task"], each["variant"], each["model"], *shown))
    if names:
        print_table(make_columns(("task", "variant", "model", *names), 3), rows, stream)


def format_pool(pool: Mapping[str, Any]) -> str:
    """Format the score over all seeds with its interval, how much single seeds vary, and the share of lines
    that some seed answers."""
    if is_described_unscored(pool):
        return NOT_SCORED
    measure = ScoreMeasure(**pool["measure"]) if pool.get("measure") else SHARE
    like = pool.get("value", pool["share"]) or 0.0
    notes = [f"seeds ± {measure.format_number(pool['seed_deviation'], like)}"]
    metrics = pool.get("scores") or {}
    notes += [f"{name} {SHARE.format(metrics[name], None)}" for name in metrics if name.startswith("pass@")]
    return f"{format_described(pool)} ({', '.join(notes)})"


def _format_score(record: Mapping[str, Any]) -> str:
    """A score with its interval if there is one, and what is missing."""
    scores, state = record["scores"], str(record["state"])
    if first := count_first_lines(record):
        state = f"first {first}"
    if state == "failed" or scores is None:  # scores of a failed cell are those of an earlier start
        return f"{record['done']} lines" if state == "done" else state
    total = scores["total"]
    text = format_described(total)
    notes = [f"{record['failed']} failed"] if record["failed"] else []
    notes += [f"{total['unscored']} unscored"] if total.get("unscored") else []
    notes += [f"{record['cut_by_length']} cut"] if record["cut_by_length"] else []
    notes += [] if state == "done" else [state]
    return f"{text} ({', '.join(notes)})" if notes else text


def count_first_lines(record: Mapping[str, Any]) -> int:
    """Count the lines of a cell that `--limit` ended, which was `todo` in earlier versions; 0 for other
    cells."""
    return int(record["done"] + record["failed"]) if record["state"] in (LIMITED, "todo") else 0


def list_failures(folder: Path, records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield why cells and lines of a suite failed: how many, and the most frequent reasons."""
    lost = Counter(str(each["error"]) for each in records if each["state"] == "failed")
    yield from (f"{pluralize(times, 'cell')} failed: {error}" for error, times in lost.most_common())
    broken = [each for each in records if each["failed"] and each["state"] != "failed"]
    if broken:
        yield f"{pluralize(sum(each['failed'] for each in broken), 'line')} failed:"
        errors = ((folder / each["job"]).with_suffix(".errors.jsonl") for each in broken)
        yield from (f"  {times} x {reason}" for reason, times in list_common_reasons(*errors))
