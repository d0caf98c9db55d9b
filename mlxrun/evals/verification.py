"""Runs lines of a job again, each alone and without a prefix cache, and compares them with what was written.

The lines are a job of their own in a temporary folder, so that the run folder is not touched and everything
else is as in the run: the config, the seeds, the keys of lines and thus the ids in their records.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxrun.config.settings import Config
from mlxrun.evals.replay import RunComparison, compare_lines
from mlxrun.evals.run_folders.run_folder import RunFolder
from mlxrun.evals.run_folders.run_line import RunLine
from mlxrun.jobs.lines.job_file import JobLine
from mlxrun.jobs.records.run_paths import JobPaths
from mlxrun.jobs.run.job_run import JobOptions, JobRun, JobSetup
from mlxrun.jobs.run.stop_signals import StopSignals

DEFAULT_SAMPLE = 20


def make_serial_config(config: Config) -> Config:
    """The config of an engine that computes one request at a time and reuses nothing."""
    scheduler = replace(config.scheduler, max_running=1, step_ms=0)
    return replace(config, scheduler=scheduler, cache=replace(config.cache, backend="none"))


def choose_lines(run: RunFolder, sample: int | None, seed: int) -> list[int]:
    """The numbers of the lines to run again, in order: `sample` of those that were answered, or all (None).
    A failed line is not run again, as what failed may have been temporary."""
    numbers = [line.number for line in run.read_lines() if _is_answered(line)]
    chosen = [number for number in numbers if number is not None]
    if sample is not None and sample < len(chosen):
        chosen = sorted(random.Random(seed).sample(chosen, sample))
    return chosen


def _is_answered(line: RunLine) -> bool:
    return isinstance(line.line, JobLine) and line.record["error"] is None


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
        return compare_lines(_match_lines(run, numbers, paths))


def _copy_lines(run: RunFolder, numbers: Sequence[int], copy: Path) -> None:
    """Copy lines of a job without what their answers are compared with: scoring changes no answer."""
    wanted = set(numbers)
    with copy.open("w", encoding="utf-8") as file:
        for each in run.read_lines():
            if each.number in wanted and isinstance(each.line, JobLine):
                line = each.line
                fields = {"custom_id": line.custom_id, "method": "POST", "url": line.url, "body": line.body}
                file.write(json.dumps(fields) + "\n")


def _match_lines(
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
    with path.open("rb") as file:
        for data in file:
            yield json.loads(data)["custom_id"], (path, offset)
            offset += len(data)


def _read_record(path: Path, offset: int) -> dict[str, Any]:
    with path.open("rb") as file:
        file.seek(offset)
        record: dict[str, Any] = json.loads(file.readline())
    return record
