"""The runs of a report, read once: lines, scores, failures and times; and texts about each run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup

from mlxrun.evals.reports.charts import draw_shares
from mlxrun.evals.reports.report_lines import CUT, EMPTY, FAILED, UNSCORED, LineRow, LineRows, Thumbnails
from mlxrun.evals.reports.shown_text import format_count, pluralize_count
from mlxrun.evals.run_folders.run_folder import RunFolder, list_working_runs, open_runs
from mlxrun.evals.run_folders.run_folder_paths import find_cell
from mlxrun.jobs.records.journal import LineTiming, read_timings
from mlxrun.jobs.records.manifest_checks import flatten_settings
from mlxrun.jobs.records.output_records import ID_PREFIX
from mlxrun.jobs.scoring.score_groups import Scores

SHOWN_IDS = 3  # of the lines that failed for one reason
# The sections of a config that decide how a run computes; `server` may have keys.
_SECTIONS = ("model", "engine", "scheduler", "cache", "sampling", "parsers", "structured", "media", "batch")


@dataclass(slots=True)
class FailureReason:
    """Why lines failed or could not be scored: how many, and the ids of the first of them."""

    message: str
    count: int = 0
    ids: list[str] = field(default_factory=list)


@dataclass(slots=True)
class ReportRun:
    """One run of a report. `model`, `task` and `variant`: those of a suite's cell, else empty."""

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
        """The number of lines that have neither an answer nor an error, but for those that `--limit` left
        out."""
        return max(0, self.folder.total - self.folder.left_out - self.counts["lines"])

    @property
    def left_out(self) -> int:
        """The number of lines that `--limit` left out, and no earlier run has answered."""
        return max(0, min(self.folder.left_out, self.folder.total - self.counts["lines"]))

    @property
    def total(self) -> int:
        return self.counts["lines"] + self.unfinished

    @property
    def answered(self) -> int:
        return self.counts["lines"] - self.counts["failed"]

    @property
    def troubles(self) -> list[tuple[int, str]]:
        """The number of lines with each kind of trouble."""
        found = [(self.counts[name], name) for name in ("failed", "cut", "empty", "retried")]
        return [*found, (self.unfinished, "unfinished")]

    @property
    def bar(self) -> Markup:
        """The shares of answers and failures."""
        cut, empty, failed = (self.counts[name] for name in ("cut", "empty", "failed"))
        whole = self.answered - cut - empty
        parts = [("seg-good", whole), ("seg-cut", cut), ("seg-empty", empty), ("seg-failed", failed)]
        name = f"{whole} answered whole, {cut} cut, {empty} empty, {failed} failed"
        return draw_shares([*parts, ("seg-rest", 0)], name)

    def list_reasons(self) -> list[FailureReason]:
        """List why lines failed or could not be scored, the most common reason first."""
        return sorted(self.reasons.values(), key=lambda reason: -reason.count)


@dataclass(slots=True)
class ReportRuns:
    """All runs of a report, and their lines. `paths`: what the user named; `suite`: the suite's folder, if
    the runs are cells of one suite."""

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
    """Read all runs that the paths name. JobError if a path names no run. `full`: keep texts whole, and make
    images larger; `images`: make thumbnails; `say`: gets a sentence for each problem of a run folder, whose
    lines are read nevertheless."""
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
        timing = by_key.get(str(line.record["id"]).removeprefix(ID_PREFIX))
        answer = rows.add(number, task, line, timing, thumbnails)
        run.scores.add(line.record)
        run.counts["lines"] += 1
        run.counts["failed"] += answer.mark == FAILED
        run.counts["cut"] += bool(answer.flags & CUT)
        run.counts["empty"] += bool(answer.flags & EMPTY)
        run.counts["unscored"] += answer.mark == UNSCORED and "note" in line.eval
        run.counts["retried"] += timing is not None and timing.tries > 1
        message = line.error or line.eval.get("note")
        if message is not None:
            message = f"{'' if line.error else 'not scored: '}{message}"[:300]
            reason = run.reasons.setdefault(message, FailureReason(message))
            reason.count += 1
            if len(reason.ids) < SHOWN_IDS:
                reason.ids.append(line.id)


def list_missing(runs: Sequence[ReportRun]) -> list[str]:
    """List phrases about the lines of runs that have neither an answer nor an error."""
    left, out = sum(run.unfinished for run in runs), sum(run.left_out for run in runs)
    found = [f"{pluralize_count(left, 'line')} not finished"] if left else []
    return found + ([f"{pluralize_count(out, 'line')} not part of the run (--limit)"] if out else [])


def describe_machine(manifest: Mapping[str, Any]) -> str:
    """Describe device, backend and version of mlxrun."""
    device, versions = manifest.get("device") or {}, manifest.get("versions") or {}
    where = ", ".join(str(device[key]) for key in ("name", "backend") if device.get(key))
    return " · ".join(filter(None, (where, f"mlxrun {versions.get('mlxrun', '?')}")))


def describe_times(manifest: Mapping[str, Any], *, is_running: bool = False) -> str:
    """Describe when the first run of a job began and the last ended, and how many runs there were. Runs
    without work do not count. `is_running`: whether the last run still runs."""
    runs = list_working_runs(manifest)
    if not runs:
        return ""
    start, end = _parse_time(runs[0].get("started")), _parse_time(runs[-1].get("ended"))
    text = start.strftime("%d %b %Y %H:%M").lstrip("0") if start else "?"
    if end is not None and start is not None:
        text += end.strftime(" to %H:%M" if end.date() == start.date() else " to %d %b %Y %H:%M")
    text += " UTC"
    if len(runs) > 1:
        broken = sum(run.get("ended") is None for run in (runs[:-1] if is_running else runs))
        text += f", in {len(runs)} runs" + (f", {broken} of them killed" if broken else "")
    return text


def describe_span(manifests: Sequence[Mapping[str, Any]]) -> str:
    """Describe when the first of several jobs began and the last ended."""
    runs = [run for manifest in manifests for run in list_working_runs(manifest)]
    starts = [run["started"] for run in runs if run.get("started")]
    ends = [run["ended"] for run in runs if run.get("ended")]
    return describe_times(
        {"runs": [{"started": min(starts, default=None), "ended": max(ends, default=None)}]}
    )


def _parse_time(text: Any) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None


def collect_settings(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Collect the settings that somebody needs to repeat a run, without the server's section."""
    config = manifest.get("config") or {}
    return {
        "model": manifest.get("model"),
        "config": {name: config[name] for name in _SECTIONS if name in config},
        "settings": manifest.get("settings"),
        "versions": manifest.get("versions"),
        "device": manifest.get("device"),
        "seeds": manifest.get("seeds"),
    }


def list_differences(runs: Sequence[ReportRun]) -> list[tuple[str, list[str]]]:
    """List the settings in which runs differ, each with the value of each run."""
    flat = []
    for run in runs:
        found = collect_settings(run.manifest)
        # What `config` and `settings` both have is there once.
        parts = [found.pop("config"), found.pop("settings") or {}, found]
        flat.append({name: str(value) for part in parts for name, value in flatten_settings(part).items()})
    names = sorted({name for found in flat for name in found})
    rows = [(name, [found.get(name, "") for found in flat]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def describe_hits(manifest: Mapping[str, Any]) -> str:
    """Describe how many requests found what in the prefix cache."""
    hits = (manifest.get("cache") or {}).get("hits") or {}
    names = {
        "exact": "whole prompt",
        "prefix": "prefix",
        "supersequence": "beginning of a longer one",
        "lcp": "shared beginning",
        "miss": "nothing",
    }
    return ", ".join(f"{name} {format_count(hits[key])}" for key, name in names.items() if hits.get(key))
