"""A report as Markdown, short enough for a pull request: scores, differences, failures, speed, versions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mlxrun.evals.reports import report_view
from mlxrun.evals.reports.charts import format_seconds
from mlxrun.evals.reports.difference import RunDifference, describe_difference
from mlxrun.evals.reports.report_lines import LineRow
from mlxrun.evals.reports.report_runs import ReportRuns, list_differences
from mlxrun.evals.reports.shown_text import (
    escape_markdown,
    format_bounds,
    format_count,
    format_share,
    show_markdown,
)
from mlxrun.evals.reports.speed import list_speeds
from mlxrun.evals.reports.suite_matrix import SuiteMatrix, build_matrix

MOST_FLIPS = 20  # that are listed
MOST_REASONS = 5
MOST_SCORED = 6  # runs whose scores by group are listed
MOST_DIFFERENCES = 20  # settings


def render_markdown(runs: ReportRuns) -> str:
    """The report of these runs."""
    parts = [f"## {show_markdown(report_view.build_title(runs))}"]
    parts.append(
        "".join(
            f"**{escape_markdown(part.text)}**" if part.strong else escape_markdown(part.text)
            for part in report_view.build_lead(runs)
        )
    )
    difference, matrix = describe_difference(runs.paths), build_matrix(runs)
    if difference is not None:
        parts += _write_difference(difference, runs)
    if matrix is not None:
        parts.append(_write_matrix(matrix))
    if len(runs.runs) <= MOST_SCORED:
        parts.append(_write_scores(runs))
    parts += [_write_reliability(runs), _write_speed(runs), *_write_settings(runs)]
    return "\n\n".join(part for part in parts if part) + "\n"


def write_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table whose cells are Markdown; all columns but the first `left` are aligned right."""
    if not rows:
        return ""
    rule = [":--" if at < left else "--:" for at in range(len(head))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def _write_scores(runs: ReportRuns) -> str:
    many = len(runs.runs) > 1
    found = report_view.list_score_rows(runs.runs)
    has_unscored = any(row.group.unscored for row in found)
    rows = [
        [
            *([show_markdown(row.name)] if row.is_first or not many else [""]),
            *([show_markdown(row.label)] if many else []),
            *(format_count(row.group.lines), format_share(row.group.share)),
            format_bounds(row.interval) if row.interval else "",
            *(format_count(row.group.failed), format_count(row.group.cut_by_length)),
            *([format_count(row.group.unscored)] if has_unscored else []),
        ]
        for row in found
    ]
    head = ["group", *(["run"] if many else []), "lines", "score", "95 % interval", "failed", "cut"]
    head += ["unscored"] if has_unscored else []
    return write_table(head, rows, 2 if many else 1)


def _write_matrix(matrix: SuiteMatrix) -> str:
    rows = []
    for model, cells in matrix.rows:
        found = []
        for cell in cells:
            if cell is None:
                found.append("not run")
                continue
            missing = [show_markdown(each, 80) for each in cell.missing]
            scores = [format_share(each.score) for each in cell.variants]
            interval = cell.variants[0].interval if len(cell.variants) == 1 else None
            spread = f" {format_bounds(interval)}" if interval else ""
            spread = f" ({', '.join(scores)})" if len(scores) > 1 else spread
            found.append(", ".join(([format_share(cell.mean) + spread] if scores else []) + missing))
        rows.append([show_markdown(model), *found])
    return write_table(["model", *map(show_markdown, matrix.tasks)], rows)


def _write_difference(difference: RunDifference, runs: ReportRuns) -> Iterator[str]:
    yield escape_markdown(difference.sentence)
    head = ["group", "pairs", "first", "second", "difference", "95 % interval", "better", "worse", "p"]
    rows = [
        [
            *(show_markdown(row.name), format_count(result.lines)),
            *(format_share(result.first), format_share(result.second), row.points),
            format_bounds(result.interval),
            *(format_count(row.group.better), format_count(row.group.worse), row.p),
        ]
        for row in difference.rows
        for result in (row.group.result,)
    ]
    yield write_table(head, rows)
    yield "\n".join(f"- {show_markdown(note, 1000)}" for note in difference.notes)
    flips = [row for row in runs.rows if row.is_flip]
    if flips and len(runs.runs) == 2:
        yield _write_flips(flips, *(show_markdown(run.label) for run in runs.runs))


def _write_flips(flips: Sequence[LineRow], before: str, after: str) -> str:
    def show(row: LineRow, run: int) -> str:
        answer = row.answers.get(run)
        mark = "" if answer is None else "✓ " if answer.mark == "c" else "✗ "
        return "" if answer is None else mark + show_markdown(answer.answer, 60)

    rows = [
        [
            show_markdown(row.id, 60),
            show_markdown(row.answers[max(row.answers)].expected, 60),
            show(row, 0),
            show(row, 1),
        ]
        for row in flips[:MOST_FLIPS]
    ]
    table = write_table(["line", "expected", before, after], rows, 4)
    more = len(flips) - len(rows)
    rest = f"\n\n{more} more are in the HTML report." if more else ""
    return f"<details><summary>Lines that differ: {len(flips)}</summary>\n\n{table}{rest}\n\n</details>"


def _write_reliability(runs: ReportRuns) -> str:
    troubled = [run for run in runs.runs if any(value for value, _ in run.troubles)]
    table = ""
    if len(runs.runs) > 1:
        head = ["run", "lines", "failed", "cut", "empty", "tried again", "not finished"]
        rows = [
            [show_markdown(run.label), *map(format_count, (run.total, *(value for value, _ in run.troubles)))]
            for run in troubled
        ]
        table = write_table(head, rows)
    reasons = report_view.list_reasons(runs.runs)
    listed = [f"- {reason.count} × {show_markdown(reason.message)}" for reason, _ in reasons[:MOST_REASONS]]
    if len(reasons) > MOST_REASONS:
        listed.append(f"- and {len(reasons) - MOST_REASONS} more reasons")
    problems = [f"- {show_markdown(problem, 400)}" for run in runs.runs for problem in run.problems]
    parts = [table]
    parts += ["Failed lines:\n\n" + "\n".join(listed)] if listed else []
    parts += ["**Problems in the run folders:**\n\n" + "\n".join(problems[:20])] if problems else []
    return "\n\n".join(filter(None, parts))


def _write_speed(runs: ReportRuns) -> str:
    rows = [
        [
            *([show_markdown(row.label)] if len(runs.runs) > 1 else []),
            *(
                format_seconds(row.totals.seconds),
                format_count(row.totals.prompt_rate),
                format_count(row.totals.output_rate),
            ),
            format_seconds(row.totals.latency[0]) if row.totals.latency else "",
            format_share(row.totals.reused_share),
        ]
        for row in list_speeds(runs.runs)
    ]
    head = ["time", "prompt tok/s", "output tok/s", "a line, median", "prompt from cache"]
    many = len(runs.runs) > 1
    return write_table([*(["run"] if many else []), *head], rows, 1 if many else 0)


def _write_settings(runs: ReportRuns) -> Iterator[str]:
    """What differs between runs, and where and with which versions they ran."""
    if 1 < len(runs.runs) <= MOST_SCORED:
        rows = [
            [show_markdown(name), *(show_markdown(value, 60) for value in values)]
            for name, values in list_differences(runs.runs)[:MOST_DIFFERENCES]
        ]
        table = write_table(
            ["setting", *(show_markdown(run.label) for run in runs.runs)], rows, len(runs.runs) + 1
        )
        if table:
            yield f"<details><summary>Settings that differ</summary>\n\n{table}\n\n</details>"
    yield "\n".join(f"- {show_markdown(line, 400)}" for line in report_view.list_facts(runs))
    versions: Any = runs.runs[0].manifest.get("versions") or {}
    yield ", ".join(
        f"{show_markdown(name)} {show_markdown(str(version))}" for name, version in versions.items()
    )
