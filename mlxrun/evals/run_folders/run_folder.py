"""A finished or unfinished run: its manifest, its state, and its lines with their answers and scores.

Records are compared with their digests in the journal and with the lines of the job file. A record that was
edited, is missing or belongs to another run is named with file, line and id.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from mlxrun.core.errors import JobError
from mlxrun.core.text_files import read_json
from mlxrun.evals.run_folders.run_folder_lines import RunLineReader
from mlxrun.evals.run_folders.run_folder_paths import (
    UnknownFormat,
    find_cell,
    find_output,
    find_outputs,
    find_paths,
    read_manifest,
)
from mlxrun.evals.run_folders.run_folder_records import OnProblem, RecordTable, RunProblem
from mlxrun.evals.run_folders.run_line import RunLine
from mlxrun.jobs.records.manifest import hash_file
from mlxrun.jobs.records.manifest_checks import UNREADABLE
from mlxrun.jobs.records.run_paths import JobPaths

DONE, RUNNING, UNFINISHED = "done", "running", "unfinished"  # states of a run
LIMITED = "limited"  # for people: an unfinished run that lacks only what `--limit` left out
_ACTIVE = ("starting", "loading", "running")  # states in status.json
_STATUS_SECONDS = 60.0  # without a new status.json, after which its process is taken to be another one


class RunFolder:
    """One run. `manifest`: the content of manifest.json."""

    def __init__(self, paths: JobPaths, manifest: dict[str, Any], name: str) -> None:
        self.paths = paths
        self.manifest = manifest
        self.name = name

    @classmethod
    def open(cls, path: Path, name: str | None = None) -> Self:
        """Open the run that `path` names: its job file, output or run folder, or a folder with this run
        alone. `name`: its name in messages, by default `path`. JobError if it is missing or damaged."""
        out = find_output(path)
        manifest = read_manifest(out)
        return cls(find_paths(out, manifest), manifest, name or str(path))

    @property
    def state(self) -> str:
        """`done` if every line was answered or failed, `running` while a process runs its job, else
        `unfinished`."""
        if _is_running(self.paths.status):
            return RUNNING
        counts, runs = self.manifest["counts"], self.manifest["runs"]
        complete = counts["done"] + counts["failed"] == counts["total"]
        return DONE if complete and runs and runs[-1]["ended"] is not None else UNFINISHED

    @property
    def shown_state(self) -> str:
        """The state for people: `limited` of an unfinished run from which `--limit` left out all that is
        missing."""
        done, failed, total = self.progress
        is_limited = self.left_out and self.left_out == total - done - failed
        return LIMITED if is_limited and self.state == UNFINISHED else self.state

    @property
    def left_out(self) -> int:
        """The number of lines after those to which `--limit` held the last run."""
        runs = self.manifest["runs"]
        return self.total - int(runs[-1].get("limit", self.total)) if runs else 0

    @property
    def progress(self) -> tuple[int, int, int]:
        """The lines that were answered, that failed, and all of them: as the process says that runs the job,
        else as the manifest says."""
        if self.state == RUNNING:
            with suppress(*UNREADABLE):
                return _read_progress(read_json(self.paths.status))
        return _read_progress(self.manifest["counts"])

    @property
    def total(self) -> int:
        """The number of lines of the job."""
        return int(self.manifest["input"]["lines"])

    @property
    def total_score(self) -> dict[str, Any]:
        """The figure of all lines, as the manifest has it; empty if no line is scored."""
        found: dict[str, Any] = (self.manifest.get("scores") or {}).get("total") or {}
        return found if found.get("lines") else {}

    @property
    def ended(self) -> str:
        """When the last run with work ended, or began if it was killed, in ISO 8601 and UTC. Empty if none
        has begun."""
        last = (list_working_runs(self.manifest) or [{}])[-1]
        return str(last.get("ended") or last.get("started") or "")

    def count_lines(self) -> int:
        """Count the lines that have a record. After a kill, the counts in the manifest are older."""
        return sum(1 for _ in self.read_lines())

    def check(self) -> list[RunProblem]:
        """List everything that is not as the run wrote it, in the order in which it is found."""
        problems = self.list_problems()
        digest = self.manifest["output"]["sha256"]
        harmed = any(problem.kind != "job" for problem in problems)
        if digest and self.state == DONE and not harmed and hash_file(self.paths.out) != digest:
            text = f"its digest is not that of {self.paths.manifest.name}: its records were moved or removed"
            problems.append(RunProblem("edited", self.paths.out, text))
        return problems

    def list_problems(self) -> list[RunProblem]:
        """List what reading all lines finds, without the digest of the whole output."""
        problems: list[RunProblem] = []
        for _ in self.read_lines(problems.append):
            pass
        return problems

    def read_lines(self, on_problem: OnProblem | None = None) -> Iterator[RunLine]:
        """Yield all finished lines in the order of the job, then those that the job file no longer has. Each
        RunProblem goes to `on_problem`, and the good records are read. Without `on_problem`, a JobError names
        the first problem; a changed job file is then no error."""
        found: list[RunProblem] = []
        report = on_problem or found.append
        table = RecordTable(self.paths, self.manifest, self.state == DONE, report)
        table.scan()
        _raise_first(found)
        yield from RunLineReader(table).read()
        _raise_first([problem for problem in found if problem.kind != "job"])


def list_working_runs(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List the runs of a job that computed something or were killed; all runs if there are none. Later starts
    of a finished job have no work, and do not say when it was computed."""
    runs: list[dict[str, Any]] = manifest["runs"]
    counts = ("computed", "reused", "done", "failed")
    found = [run for run in runs if run.get("ended") is None or any(run.get(name, 1) for name in counts)]
    return found or runs


def _raise_first(problems: list[RunProblem]) -> None:
    if problems:
        rest = len(problems) - 1
        more = f" (and {rest} more problem{'s' if rest > 1 else ''})" if rest else ""
        raise JobError(f"{problems[0]}{more}")


def _open_run(out: Path, name: str) -> RunFolder:
    """Open the run with an output. JobError if it is damaged, which says what mends a cell of a suite."""
    try:
        return RunFolder.open(out, name)
    except UnknownFormat:
        raise
    except JobError as error:
        if find_cell(out) is None:
            raise
        raise JobError(
            f"{error}; `mlxrun eval` of the suite writes it anew, and keeps the answers"
        ) from error


def open_runs(path: Path) -> list[RunFolder]:
    """Open all runs that `path` names: one run, the begun cells of a suite in its order, or every run in a
    folder by path. Several runs are named by their paths below it. JobError if there is none, or if one is
    damaged."""
    outputs = find_outputs(path)
    if len(outputs) == 1:
        return [_open_run(outputs[0], str(path))]
    folder = path if path.is_dir() else path.with_suffix(".out")
    names = [out.relative_to(folder) for out in outputs]
    names = [name.parent if name.name == "job.out.jsonl" and len(name.parts) > 1 else name for name in names]
    return [_open_run(out, str(name)) for out, name in zip(outputs, names, strict=True)]


def _read_progress(counts: Mapping[str, Any]) -> tuple[int, int, int]:
    return int(counts["done"]), int(counts["failed"]), int(counts["total"])


def _is_running(status: Path) -> bool:
    """Whether the process that wrote status.json still works on the job; it does so several times a second.
    The lock is not tried, as holding it for a moment could keep a run from starting."""
    try:
        found = read_json(status)
        age = datetime.now(UTC) - datetime.fromisoformat(found["updated"])
        is_active = found["state"] in _ACTIVE and age.total_seconds() < _STATUS_SECONDS
        if (pid := int(found["pid"])) <= 0:  # which would name a group of processes
            return False
        os.kill(pid, 0)
    except PermissionError:  # the process of another user
        pass
    except UNREADABLE:
        return False
    return is_active
