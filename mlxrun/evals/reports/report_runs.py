"""The runs of a report, read once: their lines, scores, failures and times."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxrun.evals.reports.report_lines import CUT, EMPTY, FAILED, LineRow, LineRows, get_key
from mlxrun.evals.reports.thumbnails import Thumbnails
from mlxrun.evals.run_folders.run_folder import RunFolder, open_runs
from mlxrun.evals.run_folders.run_folder_paths import find_cell
from mlxrun.jobs.records.line_times import LineTiming, read_timings
from mlxrun.jobs.scoring.score_groups import Scores

SHOWN_IDS = 3  # of the lines that failed for one reason


@dataclass(slots=True)
class FailureReason:
    """Why lines failed: how many, and the ids of the first of them."""

    message: str
    count: int = 0
    ids: list[str] = field(default_factory=list)


@dataclass(slots=True)
class ReportRun:
    """One run of a report. `model`, `task` and `variant` are those of a suite's cell, else empty."""

    folder: RunFolder
    label: str
    model: str = ""
    task: str = ""
    variant: str = ""
    scores: Scores = field(default_factory=Scores)
    timings: list[LineTiming] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    reasons: dict[str, FailureReason] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def manifest(self) -> Mapping[str, Any]:
        return self.folder.manifest

    @property
    def unfinished(self) -> int:
        """Lines that have neither an answer nor an error."""
        return max(0, self.folder.total - self.counts["lines"])

    def list_reasons(self) -> list[FailureReason]:
        """Why lines failed, the most common reason first."""
        return sorted(self.reasons.values(), key=lambda reason: -reason.count)


@dataclass(slots=True)
class ReportRuns:
    """All runs of a report, and their lines. `paths`: what the user named; `suite`: the folder of the suite,
    if the runs are the cells of one."""

    paths: list[Path]
    runs: list[ReportRun]
    tasks: list[str]
    rows: list[LineRow]
    suite: Path | None = None


def read_runs(
    paths: Sequence[Path],
    *,
    full: bool = False,
    images: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> ReportRuns:
    """Read all runs that the paths name. `full`: texts are kept whole, and images larger; `images`: whether
    thumbnails are made. `say` gets a sentence for each problem of a run folder; its lines are read
    nevertheless. JobError if a path names no run."""
    runs, suite = _open_all(paths)
    tasks = list(dict.fromkeys(run.task for run in runs))
    rows = LineRows(full=full)
    made: dict[tuple[Path, str], Thumbnails] = {}
    for number, run in enumerate(runs):
        folder, media = run.folder.paths.job.parent, run.manifest["config"]["media"]
        key = folder, json.dumps(media, sort_keys=True)
        if images and key not in made:
            made[key] = Thumbnails(folder, media, full=full)
        _read_lines(number, run, tasks.index(run.task), rows, made.get(key))
        for problem in run.problems:
            say(problem)
    return ReportRuns(list(paths), runs, tasks, list(rows.rows.values()), suite)


def _open_all(paths: Sequence[Path]) -> tuple[list[ReportRun], Path | None]:
    runs, suites = [], []
    for path in paths:
        for folder in open_runs(path):
            cell = find_cell(folder.paths.out)
            if cell is None:
                runs.append(ReportRun(folder, ""))
                continue
            suites.append(cell[0])
            runs.append(ReportRun(folder, "/".join(cell[1:]), *cell[1:]))
    _add_labels([run for run in runs if not run.label])
    whole = suites[0] if len(set(suites)) == 1 and len(suites) == len(runs) else None
    return runs, whole


def _add_labels(runs: Sequence[ReportRun]) -> None:
    """Name runs after their outputs, with as many folders as tell them apart."""
    parts = [run.folder.paths.out.absolute().parts for run in runs]
    for run, own in zip(runs, parts, strict=True):
        depth = 1
        others = [each for each in parts if each != own]
        while any(each[-depth:] == own[-depth:] for each in others) and depth < len(own):
            depth += 1
        run.label = "/".join(own[-depth:]).removesuffix(".jsonl").removesuffix(".out")


def _read_lines(
    number: int, run: ReportRun, task: int, rows: LineRows, thumbnails: Thumbnails | None
) -> None:
    run.timings = list(read_timings(run.folder.paths.timings))
    by_key = {timing.key: timing for timing in run.timings}
    for line in run.folder.read_lines(lambda problem: run.problems.append(str(problem))):
        answer = rows.add(number, task, line, by_key.get(get_key(line)), thumbnails)
        run.scores.add(line.record)
        run.counts["lines"] += 1
        run.counts["failed"] += answer.mark == FAILED
        run.counts["cut"] += bool(answer.flags & CUT)
        run.counts["empty"] += bool(answer.flags & EMPTY)
        run.counts["retried"] += answer.tries > 1
        if answer.error is not None:
            message = answer.error[:300]
            reason = run.reasons.setdefault(message, FailureReason(message))
            reason.count += 1
            if len(reason.ids) < SHOWN_IDS:
                reason.ids.append(line.id)
