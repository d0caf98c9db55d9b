"""Prints the score table: with rich on a terminal, else as plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from mlxrun.core.terminal import open_console, print_line
from mlxrun.core.visible_text import make_line
from mlxrun.jobs.scoring.score_groups import ScoreGroup, Scores

_HEAD = ("group", "lines", "correct", "score [95 %]", "failed")


def print_scores(scores: Scores, stream: TextIO) -> None:
    """Print the table, or nothing if no line had an `eval`. Unscored answers and metrics have columns where
    there are any."""
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


def format_share(group: ScoreGroup) -> str:
    """The mean score of a group with its interval: `72.5 % [65.1, 78.9]`."""
    interval = group.interval
    return f"{100 * group.share:.1f} %" + ("" if interval is None else f" {interval.format_percent()}")


def _make_row(name: str, group: ScoreGroup, has_unscored: bool, metrics: Sequence[str]) -> list[str]:
    found = group.compute_metrics()
    return [
        *(name, str(group.lines), str(group.correct), format_share(group), str(group.failed)),
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
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="Score")
    for at, name in enumerate(head):
        table.add_column(escape(name), justify="right" if at else "left")
    for name, *rest in rows:
        cells = (escape(cell) for cell in rest)
        table.add_row(escape(name), *cells, style="bold" if name == "total" else "")
    open_console(stream).print(table)
