"""The scores of a job by group, and their table: with rich on a terminal, else as plain text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from mlxrun.core.terminal import open_console, print_line
from mlxrun.core.visible_text import make_line
from mlxrun.jobs.scoring.answer_text import is_cut
from mlxrun.jobs.scoring.intervals import ConfidenceInterval, ScoreMean
from mlxrun.jobs.scoring.measure import SHARE, MeasuredLines, ScoreMeasure, describe_measure, read_measure
from mlxrun.jobs.scoring.perplexity import BITS_PER_BYTE, PERPLEXITY, describe_perplexities
from mlxrun.jobs.scoring.verdict import is_metric

NOT_SCORED = "not scored"  # in place of a score, where no answer of a group could be scored
MIXED = "several units"  # in place of a score, where lines have several measures
_DIGITS = 10  # so many that a share which is printed with fewer is not rounded twice


@dataclass(slots=True)
class ScoreGroup:
    """The scores of one group. `correct`: lines that score 1; `failed`: lines that failed, which score 0;
    `cut_by_length`: answers cut by their limit of tokens; `unscored`: answers on which a scorer, a judge or a
    pattern failed, which score 0; `waiting`: those of them that a judge is to score; `matches`: how the lines
    are scored; `scores`: those from 0 to 1; `measured`: the others, by measure; `named`: further scores, by
    match and name. `lost`: lines of `scores` that failed or could not be scored. They do not count where the
    other lines have a measure, in which 0 would be a score as any other. `nameless`: zeros of such lines, by
    match and the names that they have."""

    lines: int = 0
    correct: int = 0
    failed: int = 0
    cut_by_length: int = 0
    unscored: int = 0
    waiting: int = 0
    lost: int = 0
    scores: ScoreMean = field(default_factory=ScoreMean)
    named: dict[tuple[str, str], ScoreMean] = field(default_factory=lambda: defaultdict(ScoreMean))
    nameless: dict[tuple[str, frozenset[str]], ScoreMean] = field(
        default_factory=lambda: defaultdict(ScoreMean)
    )
    measured: dict[ScoreMeasure, MeasuredLines] = field(default_factory=dict)
    matches: set[str] = field(default_factory=set)

    @property
    def is_mixed(self) -> bool:
        """Whether lines have several measures, so that no figure is one of all."""
        return len(self.measured) > 1 or (bool(self.measured) and self.scores.count > self.lost)

    @property
    def measure(self) -> ScoreMeasure:
        """The measure of the figure; that of shares if there is no other, or if there are several."""
        return SHARE if self.is_mixed else next(iter(self.measured), SHARE)

    @property
    def sample(self) -> ScoreMean | MeasuredLines:
        """What the figure, its interval and its standard error are computed from."""
        return self.measured.get(self.measure, self.scores)

    @property
    def value(self) -> float | None:
        """The figure of all lines: their mean score, or what their measure makes of them. None if it is
        undefined."""
        return None if self.is_mixed else self.sample.value

    @property
    def interval(self) -> ConfidenceInterval | None:
        """The interval of `value`."""
        return None if self.is_mixed else self.sample.compute_interval()

    @property
    def is_unscored(self) -> bool:
        """Whether no line has a score, as all failed or could not be scored: a share of 0 says nothing."""
        is_lost = bool(self.lines) and self.failed + self.unscored == self.lines
        return is_lost and not self.scores.total and not self.measured

    def add(self, result: Mapping[str, Any], *, failed: bool, is_cut_answer: bool) -> None:
        """Count the `eval` of one record."""
        score, cluster, measure = result.get("score"), result.get("cluster"), read_measure(result)
        number = float(score) if isinstance(score, int | float) else 0.0
        self.lines += 1
        self.failed += failed
        self.cut_by_length += is_cut_answer
        self.unscored += "note" in result
        self.waiting += "note" in result and result.get("match") == "judge"
        match, named = str(result.get("match", "none")), result.get("scores") or {}
        self.matches.add(match)
        if measure is None:
            self.correct += number == 1
            self.lost += failed or "note" in result
            self.scores.add(number, cluster)
        else:
            lines = self.measured.setdefault(measure, MeasuredLines(measure))
            lines.add(number, result.get("sums") or {}, cluster)
        for name, value in named.items():
            self.named[match, name].add(value, cluster)
        if failed or "note" in result:
            self.nameless[match, frozenset(named)].add(0.0, cluster)

    def merge(self, other: ScoreGroup) -> None:
        """Count all lines of another group."""
        for name in ("lines", "correct", "failed", "cut_by_length", "unscored", "waiting", "lost"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.scores.merge(other.scores)
        self.matches |= other.matches
        for measure, lines in other.measured.items():
            self.measured.setdefault(measure, MeasuredLines(measure)).merge(lines)
        for key, mean in other.named.items():
            self.named[key].merge(mean)
        for lost, mean in other.nameless.items():
            self.nameless[lost].merge(mean)

    @property
    def metrics(self) -> dict[str, ScoreMean]:
        """Further scores from 0 to 1 by name. A line that failed or could not be scored counts as 0 in those
        that a scorer gives to other lines of its match. Metrics of choices are in its own record."""
        found: dict[str, ScoreMean] = defaultdict(ScoreMean)
        for (match, name), mean in self.named.items():
            found[name].merge(mean)
            for (other, names), zeros in self.nameless.items():
                if match == other and name not in names and not is_metric(name):
                    found[name].merge(zeros)
        return dict(found)

    def compute_metrics(self) -> dict[str, float]:
        """Compute the mean of each further score."""
        return {name: each.value for name, each in self.metrics.items()}

    def describe_partial_metrics(self) -> Iterator[str]:
        """Yield sentences that say of how many lines further scores are which not all lines have."""
        names: dict[int, list[str]] = {}
        for name, mean in self.metrics.items():
            names.setdefault(mean.count, []).append(name)
        for count, own in names.items():
            if count < self.lines:
                them = "it" if len(own) == 1 else "them"
                yield f"{', '.join(own)}: of {count:,} of {self.lines:,} lines; the others do not have {them}"

    def describe(self) -> dict[str, Any]:
        """Describe the group as scores.json and the manifest contain it."""
        found: dict[str, Any] = {
            "lines": self.lines,
            "correct": self.correct,
            "failed": self.failed,
            "cut_by_length": self.cut_by_length,
            "unscored": self.unscored,
            **self.describe_value(self.interval),
        }
        if metrics := self.compute_metrics():
            found["metrics"] = {name: round(value, _DIGITS) for name, value in metrics.items()}
        if BITS_PER_BYTE in self.measured:
            found[PERPLEXITY] = describe_perplexities(self.measured[BITS_PER_BYTE].add_up())
        return found

    def describe_value(self, interval: ConfidenceInterval | None) -> dict[str, Any]:
        """Describe the figure with an interval of it: `share` of scores from 0 to 1, else `value` and its
        `measure`, whose `share` is None."""
        value = self.value
        rounded = None if value is None else round(value, _DIGITS)
        found: dict[str, Any] = {
            "share": None if self.measured else rounded,
            "interval": None if interval is None else [round(bound, _DIGITS) for bound in interval.bounds],
            "interval_method": None if interval is None else interval.method,
        }
        if not self.measured:
            return found
        return found | {
            "value": rounded,
            "measure": None if self.is_mixed else describe_measure(self.measure),
        }


@dataclass(slots=True)
class Scores:
    """The scores of a job, from records as they are read or written. `cut_by_length` also counts answers
    without an `eval`."""

    groups: dict[str, ScoreGroup] = field(default_factory=dict)
    cut_by_length: int = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Count an output or error record."""
        is_cut_answer = record["error"] is None and is_cut(record["response"]["body"])
        self.cut_by_length += is_cut_answer
        result = record.get("eval")
        if not isinstance(result, dict):
            return
        group = self.groups.setdefault(str(result.get("group", "all")), ScoreGroup())
        group.add(result, failed=record["error"] is not None, is_cut_answer=is_cut_answer)

    def compute_total(self) -> ScoreGroup:
        """Merge all groups."""
        total = ScoreGroup()
        for group in self.groups.values():
            total.merge(group)
        return total

    @property
    def waiting(self) -> int:
        """The number of answers that a judge is to score, or could not score."""
        return sum(group.waiting for group in self.groups.values())

    @property
    def broken(self) -> int:
        """The number of answers on which a scorer or a pattern failed, without those that wait for a
        judge."""
        return sum(group.unscored - group.waiting for group in self.groups.values())

    def list_rows(self) -> list[tuple[str, ScoreGroup]]:
        """List the groups by name, and `total` if there are several."""
        rows = sorted(self.groups.items())
        return [*rows, ("total", self.compute_total())] if len(rows) > 1 else rows

    def describe(self) -> dict[str, Any]:
        """Describe the scores as scores.json and the manifest contain them."""
        groups = {name: group.describe() for name, group in sorted(self.groups.items())}
        return {"groups": groups, "total": self.compute_total().describe()}


_HEAD = ("group", "lines", "correct", "score [95 %]", "failed")


def print_scores(scores: Scores, stream: TextIO) -> None:
    """Print the table, or nothing if no line has an `eval`. Unscored answers and metrics get columns if there
    are any. Metrics that only some lines have are named below."""
    groups = scores.list_rows()
    if not groups:
        return
    has_unscored = any(group.unscored for _, group in groups)
    metrics = list(dict.fromkeys(name for _, group in groups for name in group.metrics))
    head = [*_HEAD, *(["unscored"] if has_unscored else []), *metrics]
    rows = [_make_row(make_line(name), group, has_unscored, metrics) for name, group in groups]
    if stream.isatty():
        _print_rich(head, rows, stream)
    else:
        _print_plain(head, rows, stream)
    for text in scores.compute_total().describe_partial_metrics():
        print_line(text, stream)


def format_score(group: ScoreGroup, *, with_interval: bool = True) -> str:
    """Format the figure of a group, with its interval: `72.5 % [65.1, 78.9]`."""
    found = group.describe_value(group.interval if with_interval else None)
    return NOT_SCORED if group.is_unscored else format_described(found)


def format_described(found: Mapping[str, Any]) -> str:
    """Format the figure of a described group, or of what else has its keys."""
    if "measure" in found:
        measure = found["measure"]
        return MIXED if measure is None else ScoreMeasure(**measure).format(found["value"], found["interval"])
    if is_described_unscored(found):
        return NOT_SCORED
    return SHARE.format(found["share"], found["interval"])


def is_described_unscored(found: Mapping[str, Any]) -> bool:
    """Whether `is_unscored` holds of a described group."""
    lost = found.get("failed", 0) + found.get("unscored", 0)
    return bool(lost) and lost == found.get("lines") and "measure" not in found and not found["share"]


def _make_row(name: str, group: ScoreGroup, has_unscored: bool, metrics: Sequence[str]) -> list[str]:
    found = group.compute_metrics()
    return [
        *(
            name,
            str(group.lines),
            "" if group.measured else str(group.correct),
            format_score(group),
            str(group.failed),
        ),
        *([str(group.unscored)] if has_unscored else []),
        *(f"{100 * found[each]:.1f} %" if each in found else "" for each in metrics),
    ]


def _print_plain(head: Sequence[str], rows: Sequence[Sequence[str]], stream: TextIO) -> None:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        first, *rest = (
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print_line("  ".join((first, *rest)), stream)


def _print_rich(head: Sequence[str], rows: Sequence[Sequence[str]], stream: TextIO) -> None:
    from rich.table import Table

    table = Table(title="Score")
    for at, name in enumerate(head):
        table.add_column(name, justify="right" if at else "left")
    for row in rows:
        table.add_row(*row, style="bold" if row[0] == "total" else "")
    open_console(stream).print(table)
