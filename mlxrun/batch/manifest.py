"""manifest.json records how a job was computed, completely enough to repeat it; status.json shows its
progress.

The manifest is replaced at the start and the end of each run, and `runs` has one element for each. A run that
was killed wrote no totals: the next start adds them, of lines from the journal, of tokens from the last
status.json.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mlxrun.batch import job_cache
from mlxrun.batch.line_index import DONE, FAILED, LineIndex
from mlxrun.batch.progress import ProgressMeter
from mlxrun.batch.reconciliation import RunTotals
from mlxrun.batch.run_paths import JobPaths, wrap_write_errors, write_atomically
from mlxrun.errors import JobError

log = logging.getLogger(__name__)
FORMAT = 1
STATUS_EVERY = 0.2  # seconds; the tokens of a killed run after its last status.json are not counted
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, RecursionError)
_LIBRARIES = ("mlxrun", "mlx", "mlx-lm", "mlx-vlm", "transformers", "tokenizers")


def format_now() -> str:
    """The current time in the format of manifests and status files."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def list_versions() -> dict[str, str]:
    """Versions of the libraries that compute the answers, which are not imported for it."""
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # run from a source tree, or not needed on this platform
    return found


class Manifest:
    """The manifest of one job during one run."""

    def __init__(self, paths: JobPaths, facts: Mapping[str, Any], base_seed: int) -> None:
        """`facts`: what the manifest records of the config and the model."""
        self._base_seed = base_seed
        self._paths = paths
        self._facts = facts
        self._runs, self._device = _read_earlier_runs(paths.manifest)

    @property
    def run(self) -> int:
        """The number of the newest run, from 1."""
        return len(self._runs)

    def begin(self, index: LineIndex, totals: Mapping[int, RunTotals]) -> None:
        """Begin this run, and complete the totals of a killed one before its journal is rewritten."""
        for number, run in enumerate(self._runs, 1):
            if run.get("ended") is None and number in totals:
                run.update(asdict(totals[number]))
            if run.get("ended") is None and number == self.run:
                run.update(_read_last_status(self._paths.status, run, number))
        new = {"started": format_now(), "ended": None, "exit": None, **asdict(RunTotals())}
        self._runs.append(new | {"cache": job_cache.summarize_counters({})})
        self._write(index, None, None)

    def end(
        self,
        index: LineIndex,
        meter: ProgressMeter,
        exit_code: int,
        device: Mapping[str, Any] | None,
        *,
        complete: bool,
    ) -> None:
        """End this run; if the job is complete, the output is read once more for its digest."""
        here = RunTotals(meter.computed, meter.reused, meter.run_done, meter.run_failed)
        used = job_cache.summarize_counters(meter.counters())
        self._runs[-1].update(ended=format_now(), exit=exit_code, **asdict(here), cache=used)
        self._device = device or self._device
        self._write(index, meter, hash_file(self._paths.out) if complete else None)

    def _write(self, index: LineIndex, meter: ProgressMeter | None, output: str | None) -> None:
        content = {
            "format": FORMAT,
            **self._facts,
            "versions": list_versions(),
            "device": self._device,
            "seeds": {"base": self._base_seed, "line": "sha256('base:custom_id')[:4] >> 1, unless given"},
            "input": {"path": os.path.abspath(self._paths.job), "sha256": index.sha256, "lines": len(index)},
            "output": {"path": os.path.abspath(self._paths.out), "sha256": output},
            "counts": {
                "total": len(index),
                "done": index.state.count(DONE),
                "failed": index.state.count(FAILED),
            },
            "tokens": {
                "prompt": meter.total_prompt if meter else 0,
                "computed": sum(run["computed"] for run in self._runs),
                "reused": sum(run["reused"] for run in self._runs),
                "output": meter.total_output if meter else 0,
            },
            "cache": job_cache.add_summaries([run["cache"] for run in self._runs]),
            "runs": self._runs,
        }
        with wrap_write_errors(self._paths.manifest):
            write_atomically(
                self._paths.manifest, json.dumps(content, indent=1, ensure_ascii=False).encode() + b"\n"
            )


def check_owner(paths: JobPaths, sha256: str) -> None:
    """JobError if the output belongs to another job, whose answers would be lost; `sha256`: of the job file.

    A job file is the same if it has the same content or the same path, absolute or relative to the output
    (the folder of both may move). An unreadable manifest is ignored.
    """
    try:
        found = json.loads(paths.manifest.read_bytes())
        job, out, digest = found["input"]["path"], found["output"]["path"], found["input"]["sha256"]
        same = digest == sha256 or _relative_to_output(paths.job, paths.out) == _relative_to_output(
            Path(job), Path(out)
        )
        same = same or os.path.realpath(job) == os.path.realpath(paths.job)
        done = f"{found['counts']['done']} of {found['counts']['total']} lines done"
    except _UNREADABLE:
        return
    if not same:
        raise JobError(
            f"{paths.out}: is the output of another job, {job} ({done}), whose answers would be lost; give "
            "another -o, or replace them with --fresh"
        )


def _relative_to_output(job: Path, out: Path) -> str:
    """The job's path as seen from the folder of its output."""
    return os.path.relpath(job, out.parent)


def _read_earlier_runs(path: Path) -> tuple[list[dict[str, Any]], Mapping[str, Any] | None]:
    """Runs and device of an existing manifest. An unreadable one only loses the history."""
    try:
        found = json.loads(path.read_bytes())
        return [_parse_run(run) for run in found["runs"]], found["device"]
    except FileNotFoundError:
        return [], None
    except _UNREADABLE as error:
        log.warning("%s: cannot be read (%s); the history of earlier runs is lost", path, error)
        return [], None


def _parse_run(found: dict[str, Any]) -> dict[str, Any]:
    """A run of an existing manifest; old ones have no `cache`."""
    totals = {key: int(found[key]) for key in asdict(RunTotals())}
    return {
        **found,
        **totals,
        "cache": job_cache.summarize_counters(job_cache.flatten_summary(found.get("cache"))),
    }


def _read_last_status(status: Path, run: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The last status of a killed run: its cache counters, and its prompt tokens including those of
    unfinished lines, which no journal entry counts."""
    try:
        found = json.loads(status.read_bytes())
        if found["run"] != number:
            return {}
        tokens = {name: max(run[name], int(found["tokens"][name])) for name in ("computed", "reused")}
        return {"cache": job_cache.summarize_counters(job_cache.flatten_summary(found["cache"])), **tokens}
    except _UNREADABLE:
        return {}


def hash_file(path: Path) -> str | None:
    """The sha256 of a file; None if it does not exist."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None


class StatusFile:
    """status.json, which other programs may read while the job runs. Write errors are logged and ignored."""

    def __init__(self, path: Path, run: int = 1) -> None:
        self._path = path
        self._run = run
        self._started = format_now()
        self._written = 0.0
        self._failed = False

    def write(self, state: str, meter: ProgressMeter, *, force: bool = False) -> None:
        """Replace the file, at most every STATUS_EVERY seconds unless `force`."""
        if not force and time.monotonic() - self._written < STATUS_EVERY:
            return
        self._written = time.monotonic()
        head = {"state": state, "pid": os.getpid(), "run": self._run}
        head |= {"started": self._started, "updated": format_now()}
        try:
            write_atomically(
                self._path, json.dumps({**head, **meter.build_status()}).encode() + b"\n", durable=False
            )
            self._failed = False
        except OSError as error:
            if not self._failed:
                log.warning("%s: cannot be written: %s", self._path, error.strerror)
            self._failed = True
