"""manifest.json: how a job was made, complete enough to make it again; and status.json: where it is now.

The manifest is replaced as a whole at the start and the end of each run; `runs` grows by one each time. A
run that was killed has no end of its own: the next start fills in its sums, of lines from the journal, of
tokens from what status.json last said.
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
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mlxrun.batch import job_cache
from mlxrun.batch.line_index import DONE, FAILED, Index
from mlxrun.batch.progress import ProgressMeter
from mlxrun.batch.reconciliation import RunSum
from mlxrun.batch.run_paths import Paths, replace, writing
from mlxrun.errors import JobError

log = logging.getLogger(__name__)
FORMAT = 1
STATUS_EVERY = 0.2  # seconds: a kill hides what was computed since the last one
_LIBRARIES = ("mlxrun", "mlx", "mlx-lm", "mlx-vlm", "transformers", "tokenizers")


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known before a job runs: its config and its model."""

    config: Mapping[str, Any]  # as resolved, secrets hidden
    config_hash: str
    model: Mapping[str, Any]  # path, fingerprint, digests of tokenizer and template
    base_seed: int


def now() -> str:
    """The time, as manifests and status files give it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Versions of what computes the answers, without importing it."""
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # run from a source tree, or not needed on this platform
    return found


class Manifest:
    """The manifest of one job during one run."""

    def __init__(self, paths: Paths, facts: Facts) -> None:
        self._paths = paths
        self._facts = facts
        self._runs, self._device = _earlier(paths.manifest)

    @property
    def run(self) -> int:
        """The number of the newest run, from 1."""
        return len(self._runs)

    def begin(self, index: Index, sums: Mapping[int, RunSum]) -> None:
        """Open this run, and fill in the sums of one that was killed before its journal is rewritten."""
        for number, run in enumerate(self._runs, 1):
            if run.get("ended") is None and number in sums:
                run.update(_sums(sums[number]))
            if run.get("ended") is None and number == self.run:
                run.update(_last_seen(self._paths.status, run, number))
        new = {
            "started": now(),
            "ended": None,
            "exit": None,
            **_sums(RunSum()),
            "cache": job_cache.summary({}),
        }
        self._runs.append(new)
        self._write(index, None, None)

    def end(
        self,
        index: Index,
        meter: ProgressMeter,
        exit_code: int,
        device: Mapping[str, Any] | None,
        *,
        complete: bool,
    ) -> None:
        """Close this run; a complete one reads the output once more for its digest."""
        here = RunSum(meter.done_here, meter.failed_here, meter.computed, meter.reused)
        used = job_cache.summary(meter.counters())
        self._runs[-1].update(ended=now(), exit=exit_code, **_sums(here), cache=used)
        self._device = device or self._device
        self._write(index, meter, file_digest(self._paths.out) if complete else None)

    def _write(self, index: Index, meter: ProgressMeter | None, output: str | None) -> None:
        facts = self._facts
        content = {
            "format": FORMAT,
            "config": facts.config,
            "config_hash": facts.config_hash,
            "model": facts.model,
            "versions": versions(),
            "device": self._device,
            "seeds": {"base": facts.base_seed, "line": "sha256('base:custom_id')[:4] >> 1, unless given"},
            "input": {"path": os.path.abspath(self._paths.job), "sha256": index.sha256, "lines": len(index)},
            "output": {"path": os.path.abspath(self._paths.out), "sha256": output},
            "counts": {
                "total": len(index),
                "done": index.state.count(DONE),
                "failed": index.state.count(FAILED),
            },
            "tokens": {
                "prompt": meter.all_prompt if meter else 0,
                "computed": sum(run["computed"] for run in self._runs),
                "reused": sum(run["reused"] for run in self._runs),
                "output": meter.all_output if meter else 0,
            },
            "cache": job_cache.total([run["cache"] for run in self._runs]),
            "runs": self._runs,
        }
        with writing(self._paths.manifest):
            replace(self._paths.manifest, json.dumps(content, indent=1, ensure_ascii=False).encode() + b"\n")


def check_owner(paths: Paths, sha256: str) -> None:
    """JobError if the output belongs to another job, which would lose its answers; `sha256`: of the job.

    The same job is one of the same content, or a file that lies where it lay, as seen from the output: a
    folder may move. A manifest that cannot be read belongs to nobody.
    """
    try:
        found = json.loads(paths.manifest.read_bytes())
        job, out, digest = found["input"]["path"], found["output"]["path"], found["input"]["sha256"]
        same = digest == sha256 or _beside(paths.job, paths.out) == _beside(Path(job), Path(out))
        same = same or os.path.realpath(job) == os.path.realpath(paths.job)
        done = f"{found['counts']['done']} of {found['counts']['total']} lines done"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return
    if not same:
        raise JobError(
            f"{paths.out}: is the output of another job, {job} ({done}), whose answers would be lost; give "
            "another -o, or replace them with --fresh"
        )


def _beside(job: Path, out: Path) -> str:
    """The job's path as seen from the folder of its output."""
    return os.path.relpath(job, out.parent)


def _sums(total: RunSum) -> dict[str, int]:
    return {
        "computed": total.computed,
        "reused": total.reused,
        "done": total.done,
        "failed": total.failed,
    }


def _earlier(path: Path) -> tuple[list[dict[str, Any]], Mapping[str, Any] | None]:
    """Runs and device of an existing manifest; one that cannot be read is history lost, no reason to stop."""
    try:
        found = json.loads(path.read_bytes())
        return [_run(run) for run in found["runs"]], found["device"]
    except FileNotFoundError:
        return [], None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        log.warning("%s: cannot be read (%s); the record of earlier runs starts anew", path, error)
        return [], None


def _run(found: dict[str, Any]) -> dict[str, Any]:
    """A run of an existing manifest; before there was a cache nothing was said of it."""
    sums = {key: int(found[key]) for key in _sums(RunSum())}
    return {**found, **sums, "cache": job_cache.summary(job_cache.flat(found.get("cache")))}


def _last_seen(status: Path, run: Mapping[str, Any], number: int) -> dict[str, Any]:
    """What a run that was killed had last said: of its cache, and of prompt tokens, also those of lines that
    it did not finish, which no journal entry counts."""
    try:
        found = json.loads(status.read_bytes())
        if found["run"] != number:
            return {}
        tokens = {name: max(run[name], int(found["tokens"][name])) for name in ("computed", "reused")}
        return {"cache": job_cache.summary(job_cache.flat(found["cache"])), **tokens}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}


def file_digest(path: Path) -> str | None:
    """sha256 of a file, None if there is none."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None


class Status:
    """status.json, for whoever watches from outside. A lost update hurts nobody, so it never stops a job."""

    def __init__(self, path: Path, run: int = 1) -> None:
        self._path = path
        self._run = run
        self._started = now()
        self._written = 0.0
        self._failed = False

    def write(self, state: str, meter: ProgressMeter, *, force: bool = False) -> None:
        """Replace the file, a few times a second at most unless forced."""
        if not force and time.monotonic() - self._written < STATUS_EVERY:
            return
        self._written = time.monotonic()
        head = {"state": state, "pid": os.getpid(), "run": self._run}
        head |= {"started": self._started, "updated": now()}
        try:
            replace(self._path, json.dumps({**head, **meter.status()}).encode() + b"\n", durable=False)
            self._failed = False
        except OSError as error:
            if not self._failed:
                log.warning("%s: cannot be written: %s", self._path, error.strerror)
            self._failed = True
