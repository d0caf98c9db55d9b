"""The matrix of a suite: the score of each model on each task, for each variant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from mlxrun.evals.reports.charts import draw_interval
from mlxrun.evals.reports.report_runs import ReportRun, ReportRuns
from mlxrun.evals.reports.report_view import SHARE_DOMAIN, get_interval
from mlxrun.evals.reports.shown_text import format_share, pluralize_count
from mlxrun.evals.suites.suite_manifest import read_suite_manifest


@dataclass(frozen=True, slots=True)
class VariantScore:
    """The score of one run of a cell."""

    name: str
    score: float
    interval: tuple[float, float] | None

    @property
    def plot(self) -> Markup:
        return draw_interval(
            self.score, self.interval, SHARE_DOMAIN, f"{self.name}: {format_share(self.score)}"
        )


@dataclass(frozen=True, slots=True)
class MatrixCell:
    """One model on one task. `missing`: what is not finished in it, and why."""

    variants: list[VariantScore]
    missing: list[str]

    @property
    def mean(self) -> float:
        return sum(each.score for each in self.variants) / max(1, len(self.variants))


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
    """The matrix of the cells among the runs; None if there are none. Cells of the suite that were not begun
    are in it too."""
    cells = [run for run in runs.runs if run.model]
    if not cells:
        return None
    todo = _list_not_begun(runs)
    tasks = list(dict.fromkeys([*(run.task for run in cells), *(each["task"] for each in todo)]))
    models = list(dict.fromkeys([*(run.model for run in cells), *(each["model"] for each in todo)]))
    rows = []
    for model in models:
        found = []
        for task in tasks:
            own = [run for run in cells if (run.model, run.task) == (model, task)]
            missing = [each for each in todo if (each["model"], each["task"]) == (model, task)]
            found.append(_build_cell(own, missing))
        rows.append((model, found))
    return SuiteMatrix(tasks, list(dict.fromkeys(run.variant for run in cells)), rows)


def _list_not_begun(runs: ReportRuns) -> list[dict[str, Any]]:
    """The records of the suite's cells that have no run."""
    manifest = None if runs.suite is None else read_suite_manifest(runs.suite / "suite.json")
    begun = {run.label for run in runs.runs}
    known = ("model", "task", "variant", "state", "error")
    records = [] if manifest is None else manifest["cells"]
    return [{key: each.get(key) or "" for key in known} for each in records if each["name"] not in begun]


def _build_cell(runs: Sequence[ReportRun], todo: Sequence[Mapping[str, Any]]) -> MatrixCell | None:
    if not runs and not todo:
        return None
    scores = []
    for run in runs:
        if run.scores.groups:
            total = run.scores.compute_total()
            scores.append(VariantScore(run.variant, total.share, get_interval(total)))
    left = sum(run.unfinished for run in runs)
    missing = [f"{pluralize_count(left, 'line')} not finished"] if left else []
    missing += [f"{each['variant']}: {each['error'] or each['state']}" for each in todo]
    return MatrixCell(scores, missing)
