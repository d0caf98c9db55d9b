"""Runs a job, or some of its lines, again from the manifest of an earlier run, and compares the records.

The manifest has the whole config, and digests of the job file and the model's files. The job file is looked
for where it was, at the same place relative to the output, and beside the output by its digest.

Chosen lines run one by one and without a prefix cache. They are a job of their own in a temporary folder, so
the run folder is not touched. All else is as in the run: config, seeds, keys of lines, and thus the ids in
records.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from mlxrun.config.setting_fields import build_config, hash_config, to_plain
from mlxrun.config.settings import Config, EngineSettings
from mlxrun.core.errors import JobError
from mlxrun.core.field_errors import get_json_type
from mlxrun.core.text_files import open_regular
from mlxrun.evals.record_difference import find_difference
from mlxrun.evals.run_folders.moved_paths import find_moved_paths
from mlxrun.evals.run_folders.run_folder import DONE, RunFolder, list_working_runs
from mlxrun.evals.run_folders.run_line import RunLine
from mlxrun.jobs.lines.job_file import JobLine
from mlxrun.jobs.records.manifest import hash_file
from mlxrun.jobs.records.manifest_checks import UNREADABLE, RunEnvironment, describe_changes
from mlxrun.jobs.records.run_paths import JobPaths
from mlxrun.jobs.run.job_run import JobOptions, JobRun, JobSetup
from mlxrun.jobs.run.progress import format_duration, pluralize
from mlxrun.jobs.run.stop_signals import StopSignals

_SECTIONS = (
    "model",
    "engine",
    "scheduler",
    "cache",
    "sampling",
    "parsers",
    "structured",
    "media",
    "batch",
    "workers",
)
DEFAULT_SAMPLE = 20


@dataclass(frozen=True, slots=True)
class LineDifference:
    """A line whose record has changed. `number`: its number in the job file; `text`: the first difference."""

    id: str
    number: int | None
    text: str

    def __str__(self) -> str:
        place = "" if self.number is None else f" (line {self.number} of the job)"
        return f"{self.id!r}{place}: {self.text}"


@dataclass(slots=True)
class RunComparison:
    """The result of computing lines of an earlier run again."""

    compared: int = 0
    differing: list[LineDifference] = field(default_factory=list)


def rebuild_config(run: RunFolder) -> Config:
    """Rebuild the config of the last run of a job. JobError if the manifest has none, if it was edited, or if
    the run is a batch of a server. Keys that the run's version did not know get their defaults, which change
    no answer. Only the number of BLAS threads, which the environment decided then, is the recorded one.
    Files and folders that have moved with the job are found."""
    if run.manifest.get("batch"):
        raise JobError(f"{run.name}: is a batch of a server; its answers have ids that only the server gives")
    recorded: Any = run.manifest.get("config")
    sections = {name: recorded.get(name, {}) for name in _SECTIONS} if isinstance(recorded, dict) else {}
    for name, found in {"config": recorded, **sections}.items():
        if not isinstance(found, dict):
            text = f"its {name} must be an object, not {get_json_type(found)}"
            raise JobError(f"{run.paths.manifest}: contains no config that can be used: {text}")
    try:
        config = build_config(recorded)
        known, plain = {name: set(recorded.get(name, ())) for name in _SECTIONS}, to_plain(config)
        is_whole = known == {name: set(plain[name]) for name in _SECTIONS}
        edited = is_whole and hash_config(config) != run.manifest["config_hash"]
    except UNREADABLE as error:
        raise JobError(f"{run.paths.manifest}: contains no config that can be used: {error!r}") from error
    if edited:
        raise JobError(f"{run.paths.manifest}: its config was edited: it does not have the recorded digest")
    return find_moved_paths(_restore_threads(config, run.manifest), run.manifest, run.paths.job.parent)


def _restore_threads(config: Config, manifest: Mapping[str, Any]) -> Config:
    """The config with the BLAS threads of a run before `engine.blas_threads`."""
    device = manifest.get("device")
    threads = device.get("blas_threads") if isinstance(device, Mapping) else None
    is_old = "blas_threads" not in manifest["config"].get("engine", {})
    if not (is_old and config.engine.reproducible and isinstance(threads, int)):
        return config
    return replace(config, engine=replace(config.engine, blas_threads=threads))


def read_engine_settings(run: RunFolder) -> EngineSettings:
    """Read the engine settings of a run. The result is the defaults if the manifest has no usable config."""
    try:
        return rebuild_config(run).engine
    except JobError:  # which is reported where the config is used
        return EngineSettings()


def find_job(run: RunFolder) -> RunFolder:
    """Return the run with the job file that has the recorded digest. JobError if neither it nor a file beside
    the output has that digest."""
    paths, recorded = run.paths, run.manifest["input"]
    beside = (
        path for path in sorted(paths.out.parent.glob("*.jsonl")) if path not in (paths.out, paths.errors)
    )
    for job in (paths.job, *beside):
        if job.is_file() and hash_file(job) == recorded["sha256"]:
            return RunFolder(JobPaths(job, paths.out), run.manifest, run.name)
    what = "has changed since the run" if paths.job.is_file() else "is missing"
    raise JobError(
        f"{paths.job}: the job file {what}, and no .jsonl file in {paths.out.parent} has its digest "
        f"(sha256 {recorded['sha256']}); put the file of the run there"
    )


def list_machine_differences(manifest: Mapping[str, Any], here: RunEnvironment) -> list[str]:
    """List what differs between this machine and the machines of a job's runs: versions, device, BLAS."""
    runs = [run for run in manifest["runs"] if run.get("versions")]
    runs = [run for run in runs if run.get("lines")] or runs[-1:]
    found = [RunEnvironment.parse(run) for run in runs] or [RunEnvironment.parse(manifest)]
    texts = dict.fromkeys(text for each in found for text in each.list_differences(here))
    if manifest.get("mixed"):
        return ["the run is mixed: its lines were computed with several versions or devices", *texts]
    return [*texts]


def check_model(run: RunFolder, settings: Mapping[str, Any], model: str) -> None:
    """Raise JobError if the model's files, or how mlxrun uses them, differ from the run: no line could come
    out alike. `settings`: the result of `collect_settings` here."""
    old = run.manifest["settings"]
    try:
        changes = list(describe_changes(old, settings, run.manifest["model"]["path"], model))
    except UNREADABLE as error:
        raise JobError(f"{run.paths.manifest}: is damaged: its settings cannot be read: {error!r}") from error
    if changes:
        raise JobError(f"{run.name}: its lines cannot be run again here: {'; '.join(changes)}")


def check_replays(name: str, replays: Sequence[JobPaths]) -> None:
    """Raise JobError if all replays are complete already: no line would be run again. `name`: of what they
    replay."""
    if not all(paths.manifest.is_file() and RunFolder.open(paths.out).state == DONE for paths in replays):
        return
    if len(replays) == 1:
        raise JobError(f"{replays[0].out}: is complete already; --fresh runs it again, or give another -o")
    raise JobError(f"{name}: its {len(replays)} replays are complete already; --fresh runs them again")


async def replay_job(
    run: RunFolder, paths: JobPaths, setup: JobSetup, options: JobOptions, say: Callable[[str], None]
) -> RunComparison:
    """Run all lines of the job of `run` again, with the output of `paths`, and compare them. Lines that the
    output has already are not run."""
    await JobRun(paths, setup, options, say, StopSignals(say)).run()
    pairs = _match_lines(run.read_lines(), RunFolder.open(paths.out).read_lines())
    return await asyncio.to_thread(compare_lines, pairs)


def compare_lines(pairs: Iterable[tuple[RunLine, RunLine | None]]) -> RunComparison:
    """Compare the records of lines with the records of their second computation."""
    found = RunComparison()
    for old, new in pairs:
        text = "it was not run" if new is None else find_difference(old.record, new.record)
        found.compared += 1
        if text is not None:
            found.differing.append(LineDifference(old.id, old.number, text))
    return found


def _match_lines(
    old_lines: Iterator[RunLine], new_lines: Iterator[RunLine]
) -> Iterator[tuple[RunLine, RunLine | None]]:
    """The lines of a run, each with the new one of the same number; both are in the order of one job."""
    new = next(new_lines, None)
    for old in old_lines:
        while new is not None and (new.number or 0) < (old.number or 0):
            new = next(new_lines, None)
        yield old, new if new is not None and new.number == old.number else None


def make_serial_config(config: Config) -> Config:
    """Make the config of an engine that reuses nothing, for one request at a time. In reproducible mode a GPU
    keeps the width of its steps: there a row rounds as in steps of `max_running` rows."""
    running = config.scheduler.max_running if config.engine.reproducible else 1
    scheduler = replace(config.scheduler, max_running=running, step_ms=0)
    return replace(config, scheduler=scheduler, cache=replace(config.cache, backend="none"))


def choose_lines(run: RunFolder, sample: int | None, seed: int) -> list[int]:
    """Choose the numbers of the lines to run again, in order: `sample` of the answered lines, or all of them
    (None). Failed lines are not run again, as their cause may have been temporary."""
    chosen = [
        line.number
        for line in run.read_lines()
        if line.number is not None and isinstance(line.line, JobLine) and line.error is None
    ]
    if sample is not None and sample < len(chosen):
        chosen = sorted(random.Random(seed).sample(chosen, sample))
    return chosen


def describe_plan(runs: Sequence[RunFolder], sample: int | None) -> str:
    """Describe in words what verifying these runs will do, and how long they took. `sample`: as for
    `choose_lines`. After a kill, the counts in a manifest are older than the records, and are left out."""
    records, answers, took = "the records", "all answers", ""
    if sample is not None:
        answers = f"up to {pluralize(sample, 'answer')}{' of each run' if len(runs) > 1 else ''}"
    if all(run.state == DONE for run in runs):
        progress = [run.progress for run in runs]
        done = [each[0] for each in progress]
        again = sum(done if sample is None else (min(each, sample) for each in done))
        records = pluralize(sum(done) + sum(each[1] for each in progress), "record")
        answers = f"{again} of {pluralize(sum(done), 'answer')}"
        seconds = sum(_measure_seconds(run) for run in runs)
        what = "the run" if len(runs) == 1 else f"the {len(runs)} runs"
        took = f"; {what} took {format_duration(seconds)}, with several lines at a time" if seconds else ""
    return f"checks {records}, then computes {answers} again, one by one{took}"


def _measure_seconds(run: RunFolder) -> float:
    """How long the process of a job ran, without what ended by a kill."""
    times = [(each["started"], each["ended"] or each["started"]) for each in list_working_runs(run.manifest)]
    parsed = [[datetime.fromisoformat(time) for time in pair] for pair in times]
    return sum((ended - started).total_seconds() for started, ended in parsed)


async def run_lines_again(
    run: RunFolder, numbers: Sequence[int], setup: JobSetup, say: Callable[[str], None]
) -> RunComparison:
    """Run the lines with these numbers again, one after the other, and compare their records. `setup`: its
    engine should have the config of `make_serial_config`, its preparer the folder of the job."""
    batch = replace(setup.config.batch, concurrency=1, on_invalid="skip")
    setup = replace(setup, config=replace(setup.config, batch=batch))
    with tempfile.TemporaryDirectory(prefix="mlxrun-verify-") as folder:
        paths = JobPaths(Path(folder, "lines.jsonl"))
        _copy_lines(run, numbers, paths.job)
        await JobRun(paths, setup, JobOptions(), say, StopSignals(say)).run()
        return compare_lines(_match_chosen(run, numbers, paths))


def _copy_lines(run: RunFolder, numbers: Sequence[int], copy: Path) -> None:
    """Copy lines of a job without what their answers are compared with: scoring changes no answer."""
    wanted = set(numbers)
    with copy.open("w", encoding="utf-8") as file:
        for each in run.read_lines():
            if each.number in wanted and isinstance(each.line, JobLine):
                line = each.line
                fields = {"custom_id": line.custom_id, "method": "POST", "url": line.url, "body": line.body}
                agent = {} if line.agent is None else {"agent": line.agent}
                file.write(json.dumps(fields | agent) + "\n")


def _match_chosen(
    run: RunFolder, numbers: Sequence[int], again: JobPaths
) -> Iterator[tuple[RunLine, RunLine | None]]:
    """The chosen lines, each with the new one, found by its custom_id."""
    places = dict(_find_records(again.out)) | dict(_find_records(again.errors))
    wanted = set(numbers)
    for line in run.read_lines():
        if line.number in wanted:
            place = places.get(line.id)
            yield line, None if place is None else replace(line, record=_read_record(*place))


def _find_records(path: Path) -> Iterator[tuple[str, tuple[Path, int]]]:
    """The custom_id of each record of an output, with the place where it begins."""
    if not path.exists():
        return
    offset = 0
    with open_regular(path) as file:
        for data in file:
            yield json.loads(data)["custom_id"], (path, offset)
            offset += len(data)


def _read_record(path: Path, offset: int) -> dict[str, Any]:
    with open_regular(path) as file:
        file.seek(offset)
        record: dict[str, Any] = json.loads(file.readline())
    return record
