"""What a report shows, in words and numbers: the same for the page and for Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from mlxrun.core.errors import JobError
from mlxrun.evals.comparisons.pairing import remove_seed
from mlxrun.evals.reports.charts import draw_interval
from mlxrun.evals.reports.report_lines import CUT, EMPTY, FAILED, PARTLY, UNSCORED, WRONG
from mlxrun.evals.reports.report_runs import (
    FailureReason,
    ReportRun,
    ReportRuns,
    describe_machine,
    describe_span,
    describe_times,
    list_missing,
)
from mlxrun.evals.reports.shown_text import (
    format_count,
    pluralize_count,
    style_numbers,
)
from mlxrun.evals.run_folders.run_folder import DONE, RUNNING
from mlxrun.evals.run_folders.run_folder_paths import SUITE_NAME
from mlxrun.evals.suites.suite_manifest import CHANGED, format_pool, load_suite_manifest
from mlxrun.jobs.scoring.score_groups import NOT_SCORED, ScoreGroup, format_score

# The sentence at the top, in parts; those marked are what one looks for.
Lead = list[tuple[str, bool]]
MOST_REASONS = 30
MOST_DATED = 3  # runs whose times are listed one by one
SHARE_DOMAIN = (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class ShownScore:
    """The score of a group of lines (`name`), as text and as a plot."""

    name: str
    group: ScoreGroup

    @property
    def value(self) -> str:
        return style_numbers(format_score(self.group, with_interval=False))

    @property
    def bounds(self) -> str:
        value, interval = self.group.value, self.group.interval
        if value is None or interval is None:
            return ""
        return style_numbers(self.group.measure.format_bounds(interval.bounds, value))

    @property
    def plot(self) -> Markup:
        """The score on a scale from 0 to 100 %; nothing for a score with a unit."""
        value, interval = self.group.value, self.group.interval
        if self.group.measured or value is None:
            return Markup("")
        name = f"{self.name}: {', '.join(filter(None, (self.value, self.bounds)))}"
        return draw_interval(value, None if interval is None else interval.bounds, SHARE_DOMAIN, name)


@dataclass(frozen=True, slots=True)
class ScoreRow(ShownScore):
    """The score of one group in one run, by the run's number and label."""

    run: int
    label: str
    is_total: bool
    is_first: bool
    is_last: bool


def list_score_rows(runs: Sequence[ReportRun]) -> list[ScoreRow]:
    """List a row for each group and run that has it. `total` comes last, for runs with several groups."""
    names = sorted({name for run in runs for name in run.scores.groups})
    totals = [run.scores.compute_total() if len(run.scores.groups) > 1 else None for run in runs]
    rows: list[ScoreRow] = []
    for name in names:
        found = [(at, run.scores.groups[name]) for at, run in enumerate(runs) if name in run.scores.groups]
        rows += _make_rows(name, found, runs, is_total=False)
    rows += _make_rows("total", [(at, each) for at, each in enumerate(totals) if each], runs, is_total=True)
    return rows


def list_metric_notes(runs: Sequence[ReportRun]) -> list[str]:
    """List of how many lines further scores are which not all lines of a run have."""
    return [
        f"{run.label}: {text}" if len(runs) > 1 else text
        for run in runs
        for text in run.scores.compute_total().describe_partial_metrics()
    ]


def _make_rows(
    name: str, found: Sequence[tuple[int, ScoreGroup]], runs: Sequence[ReportRun], *, is_total: bool
) -> list[ScoreRow]:
    return [
        ScoreRow(name, group, at, runs[at].label, is_total, place == 0, place == len(found) - 1)
        for place, (at, group) in enumerate(found)
    ]


@dataclass(frozen=True, slots=True)
class MatrixCell:
    """One model on one task. `missing`: what is unfinished in it, and why; `notes`: the scores over all
    seeds."""

    variants: list[ShownScore]
    missing: list[str]
    notes: list[str]

    @property
    def mean(self) -> str:
        """The mean over the variants; empty where they have no number in one unit."""
        values = [each.group.value for each in self.variants if each.group.value is not None]
        measures = {each.group.measure for each in self.variants}
        if len(values) != len(self.variants) or len(measures) != 1:
            return ""
        return style_numbers(measures.pop().format(sum(values) / len(values)))


@dataclass(frozen=True, slots=True)
class SuiteMatrix:
    """Cells by model, in the order of `tasks`; None where a model was not run on a task. Models, tasks and
    variants are in the order of the suite."""

    tasks: list[str]
    variants: list[str]
    rows: list[tuple[str, list[MatrixCell | None]]]

    @property
    def has_variants(self) -> bool:
        return len(self.variants) > 1


def build_matrix(runs: ReportRuns) -> SuiteMatrix | None:
    """Build the matrix of the cells among the runs, and of the suite's cells that were not begun. None if
    there are none."""
    cells = [run for run in runs.runs if run.model]
    if not cells:
        return None
    todo, pools = _list_missing(runs), _read_suite(runs).get("pools", [])
    tasks = list(dict.fromkeys([*(run.task for run in cells), *(each["task"] for each in todo)]))
    models = list(dict.fromkeys([*(run.model for run in cells), *(each["model"] for each in todo)]))
    rows = []
    for model in models:
        found = []
        for task in tasks:
            own = [run for run in cells if (run.model, run.task) == (model, task)]
            missing = [each for each in todo if (each["model"], each["task"]) == (model, task)]
            found.append(_build_cell(own, missing, pools))
        rows.append((model, found))
    return SuiteMatrix(tasks, list(dict.fromkeys(run.variant for run in cells)), rows)


def _list_missing(runs: ReportRuns) -> list[dict[str, Any]]:
    """The records of the suite's cells that have no run, or whose run is not what the suite is now."""
    begun = {run.label for run in runs.runs}
    known = ("name", "model", "task", "variant", "state", "error")
    records = ({key: each.get(key) or "" for key in known} for each in _read_suite(runs).get("cells", []))
    return [each for each in records if each["name"] not in begun or each["state"] in ("failed", CHANGED)]


def _read_suite(runs: ReportRuns) -> dict[str, Any]:
    """The manifest of the suite; empty if the runs are none, or if it is damaged."""
    try:
        return {} if runs.suite is None else load_suite_manifest(runs.suite / SUITE_NAME) or {}
    except JobError:
        return {}


def _build_cell(
    runs: Sequence[ReportRun], todo: Sequence[Mapping[str, Any]], pools: Sequence[Mapping[str, Any]]
) -> MatrixCell | None:
    if not runs and not todo:
        return None
    scores, unscored, notes = [], [], []
    failed = {each["name"] for each in todo if each["state"] == "failed"}
    for run in (run for run in runs if run.label not in failed):  # they have scores of an earlier start
        total = run.scores.compute_total()
        if total.is_unscored:
            unscored.append(f"{run.variant}: {NOT_SCORED}")
        elif run.scores.groups:
            scores.append(ShownScore(run.variant, total))
    missing = [*unscored, *list_missing(runs)]
    missing += [f"{each['variant']}: {each['error'] or each['state']}" for each in todo]
    shown = {run.label for run in runs}
    found = [pool for pool in pools if shown.issuperset(pool["cells"])]
    names = [remove_seed(pool["cells"][0].rpartition("/")[2]) for pool in found]
    notes += [f"{name or 'all seeds'}: {format_pool(pool)}" for name, pool in zip(names, found, strict=True)]
    return MatrixCell(scores, missing, notes)


def list_reasons(runs: Sequence[ReportRun]) -> list[tuple[FailureReason, str]]:
    """List the most common reasons of failures, each with the label of the run."""
    found = [(reason, run.label) for run in runs for reason in run.list_reasons()]
    return sorted(found, key=lambda each: -each[0].count)[:MOST_REASONS]


def build_lead(runs: ReportRuns) -> Lead:
    """Build the sentence at the top of a report of one or several runs."""
    if len(runs.runs) > 1:
        return _build_lead_of_many(runs)
    (run,) = runs.runs
    total = run.scores.compute_total() if run.scores.groups else None
    parts: Lead = []
    if total is not None:
        shown = ShownScore("total", total)
        parts += [
            (shown.value, True),
            (f" of {pluralize_count(total.lines, 'line')}", False),
        ]
        parts.append((f", 95 % interval {shown.bounds}. " if shown.bounds else ". ", False))
    else:
        parts += [(format_count(run.answered), True)]
        parts.append(
            (f" of {pluralize_count(run.total, 'line')} answered; none has an expected answer. ", False)
        )
    without = total is not None and total.lines != run.counts["lines"]  # lines without an `eval`
    unscored = 0 if total is None else total.unscored
    trouble = _describe_trouble(run, of_all=without) + _describe_cause(runs.runs)
    return [*parts, (trouble + _describe_unscored(unscored), False)]


def _build_lead_of_many(runs: ReportRuns) -> Lead:
    lines = sum(run.total for run in runs.runs)
    models, number = len({run.model for run in runs.runs}), pluralize_count(len(runs.runs), "run")
    parts = [(number, True)]
    if runs.suite is not None:
        matrix = f"{pluralize_count(models, 'model')} on {pluralize_count(len(runs.tasks), 'task')}"
        parts = [(matrix, True), (f", {number}", False)]
    parts.append((f" with {pluralize_count(lines, 'line')} in all. ", False))
    flips = sum(row.is_flip for row in runs.rows)
    if flips:
        parts.append((f"{pluralize_count(flips, 'line')} with different scores. ", False))
    failed = sum(run.counts["failed"] for run in runs.runs)
    unscored = sum(run.scores.compute_total().unscored for run in runs.runs if run.scores.groups)
    text = f"{pluralize_count(failed, 'line')} failed." if failed else "No line failed."
    return [*parts, (text + _describe_cause(runs.runs) + _describe_unscored(unscored), False)]


def _describe_cause(runs: Sequence[ReportRun]) -> str:
    """The most frequent reason, where every line failed; else it is below, with the others."""
    if any(run.answered for run in runs):
        return ""
    counts: Counter[str] = Counter()
    for reason, _ in list_reasons(runs):
        counts[reason.message] += reason.count
    return "".join(
        f" The most frequent reason ({pluralize_count(count, 'line')}): {message.rstrip('.')}."
        for message, count in counts.most_common(1)
    )


def _describe_unscored(count: int) -> str:
    return f" {pluralize_count(count, 'answer')} could not be scored." if count else ""


def _describe_trouble(run: ReportRun, *, of_all: bool) -> str:
    """What was wrong with lines; `of_all`: not only with those of which the score is."""
    found = [
        f"{format_count(value)} {word}"
        for name, word in (("failed", "failed"), ("cut", "cut at the length"), ("empty", "empty"))
        if (value := run.counts[name])
    ]
    scope = f", of all {pluralize_count(run.total, 'line')}" if of_all else ""
    text = f"{', '.join(found)}{scope}." if found else "None failed, was cut or is empty."
    return text + "".join(f" {each}." for each in list_missing([run]))


def build_title(runs: ReportRuns) -> str:
    """Build the title of a report."""
    if runs.suite is not None:
        return runs.suite.name.removesuffix(".out")
    if len(runs.runs) == 1:
        run = runs.runs[0]
        return f"{run.label} on {describe_model(run)}"
    if len(runs.runs) == 2:
        return f"{runs.runs[0].label} and {runs.runs[1].label}"
    return f"{len(runs.runs)} runs"


def describe_model(run: ReportRun) -> str:
    """Return the model of a run, as its config names it."""
    model: Any = run.manifest.get("model") or {}
    return str(model.get("path", "?"))


def list_facts(runs: ReportRuns) -> list[str]:
    """List when and on what the runs ran: a line for each of at most MOST_DATED runs, else one line for
    all."""
    if len(runs.runs) > MOST_DATED:
        manifests = [run.manifest for run in runs.runs]
        machines = sorted({describe_machine(manifest) for manifest in manifests})
        return [" · ".join([describe_span(manifests), *machines])]
    return [_describe_run(run, with_label=len(runs.runs) > 1) for run in runs.runs]


def _describe_run(run: ReportRun, *, with_label: bool) -> str:
    label = f"{run.label}: {describe_model(run)} · " if with_label else ""
    state = "" if run.folder.state == DONE else f"{run.folder.shown_state}, "
    mixed = "answers of several versions or devices" if run.manifest.get("mixed") else ""
    times = describe_times(run.manifest, is_running=run.folder.state == RUNNING)
    parts = (times, describe_machine(run.manifest), mixed)
    return state + label + " · ".join(filter(None, parts))


def count_states(runs: ReportRuns) -> list[tuple[str, str, int]]:
    """List the filters of the table, each with its number of lines. Filters without lines are left out."""
    rows, unscored = runs.rows, any(run.counts["unscored"] for run in runs.runs)
    found = [
        ("wrong", "wrong", sum(bool(row.marks & {WRONG, PARTLY}) for row in rows)),
        ("failed", "failed", sum(FAILED in row.marks for row in rows)),
        ("unscored", "not scored", sum(UNSCORED in row.marks for row in rows) if unscored else 0),
        ("cut", "cut", sum(any(each.flags & CUT for each in row.answers.values()) for row in rows)),
        ("empty", "empty", sum(any(each.flags & EMPTY for each in row.answers.values()) for row in rows)),
        ("flip", "differ between runs", sum(row.is_flip for row in rows)),
    ]
    return [("all", "all", len(rows)), *(each for each in found if each[2])]
