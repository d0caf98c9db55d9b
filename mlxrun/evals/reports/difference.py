"""The difference between two runs of the same lines, or two suites, as `mlxrun compare` computes it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from mlxrun.core.errors import JobError
from mlxrun.evals.comparisons.compared_group import ComparedGroup
from mlxrun.evals.comparisons.comparison import ComparisonSet, compare_paths
from mlxrun.evals.comparisons.comparison_table import describe_lines, describe_p, format_p
from mlxrun.evals.comparisons.pairing import PairingRules
from mlxrun.evals.reports.charts import draw_axis, draw_interval
from mlxrun.evals.reports.shown_text import style_numbers
from mlxrun.jobs.run.progress import pluralize

Bounds = tuple[float, float]


@dataclass(frozen=True, slots=True)
class DifferenceRow:
    """One group of lines in both runs, or one cell of both suites (`name`). Its plot reaches from one end of
    `domain` to the other."""

    name: str
    group: ComparedGroup
    is_total: bool
    domain: Bounds

    @property
    def first(self) -> str:
        return style_numbers(self.group.measure.format(self.group.result.first))

    @property
    def second(self) -> str:
        return style_numbers(self.group.measure.format(self.group.result.second))

    @property
    def points(self) -> str:
        result = self.group.result
        return style_numbers(self.group.measure.format_number(result.difference, result.first, "+"))

    @property
    def bounds(self) -> str:
        result = self.group.result
        return style_numbers(self.group.measure.format_bounds(result.interval, result.first))

    @property
    def plot(self) -> Markup:
        """The difference on the scale; nothing for scores with a unit."""
        result = self.group.result
        if not self.group.measure.is_share:
            return Markup("")
        return draw_interval(result.difference, result.interval, self.domain, f"{self.points} {self.bounds}")

    @property
    def p(self) -> str:
        return format_p(self.group.adjusted_p)


@dataclass(frozen=True, slots=True)
class RunDifference:
    """All rows, and the result in words. `notes`: what was not compared, and what else differs between the
    runs."""

    sentence: str
    rows: list[DifferenceRow]
    notes: list[str]

    @property
    def axis(self) -> Markup:
        return draw_axis(self.rows[0].domain)


def describe_difference(first: Path, second: Path) -> RunDifference:
    """Describe the difference between the runs or suites that two paths name. If nothing can be
    compared, there are no rows, and the sentence says why."""
    try:
        found = compare_paths(first, second, rules=PairingRules(common=True))
    except JobError as error:
        return RunDifference(f"The two are not compared: {error}", [], [])
    return RunDifference(_state_result(found), _list_rows(found), list(_list_notes(found)))


def _list_rows(found: ComparisonSet) -> list[DifferenceRow]:
    """The groups of a comparison and their total, or the totals of several comparisons."""
    groups: list[tuple[str, ComparedGroup, bool]]
    if len(found.comparisons) == 1:
        (comparison,) = found.comparisons
        groups = [(group.name, group, False) for group in comparison.groups]
        groups.append(("total", comparison.total, True))
    else:
        groups = [(each.cell.name, each.total, False) for each in found.comparisons]
    domain = _choose_domain([group.result.interval for _, group, _ in groups if group.measure.is_share])
    return [DifferenceRow(name, group, is_total, domain) for name, group, is_total in groups]


def _choose_domain(intervals: Sequence[Bounds]) -> Bounds:
    """A scale with zero in its middle that has all intervals: 5, 10, 20, 50 or 100 points to each side."""
    most = max(
        (abs(bound) for interval in intervals for bound in interval if math.isfinite(bound)), default=1.0
    )
    side = next((side for side in (0.05, 0.1, 0.2, 0.5) if most <= side), 1.0)
    return -side, side


def _state_result(found: ComparisonSet) -> str:
    if len(found.comparisons) != 1:
        changed = sum(each.total.is_significant for each in found.comparisons)
        return f"{changed} of {len(found.comparisons)} cells differ significantly (p < 0.05, adjusted)."
    total = found.comparisons[0].total
    row = DifferenceRow("total", total, True, (0.0, 0.0))
    verdict = "differs significantly" if total.is_significant else "does not differ significantly"
    return (
        f"The second run's score {verdict}: {f'{row.points} {total.measure.points}'.rstrip()}, 95 % interval "
        f"{row.bounds}, {describe_p(total.adjusted_p)}. "
        f"{pluralize(total.better, 'line')} better and {total.worse} worse, of {total.result.lines}."
    )


def _list_notes(found: ComparisonSet) -> Iterator[str]:
    for comparison in found.comparisons:
        name = f"{comparison.cell.name}: " if comparison.cell.name else ""
        yield from (f"{name}{phrase}" for phrase in describe_lines(comparison))
        if len(found.comparisons) == 1 and comparison.differences:
            yield "What differs beside the answers: " + "; ".join(comparison.differences).replace("`", "")
    if found.left_out:
        yield f"Only on one side: {', '.join(found.left_out)}"
    if found.unscored:
        yield f"Without a score on either side: {', '.join(found.unscored)}"
