"""Prints the score table: with rich on a terminal, else as plain text."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import TextIO

from mlxrun.batch.scoring import Scores

_HEAD = ("group", "lines", "correct", "share", "failed")


def pluralize(number: int, noun: str) -> str:
    """`1 line`, `2 lines`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def print_scores(scores: Scores, stream: TextIO) -> None:
    """Print the table, or nothing if no line had an `eval`."""
    rows: list[tuple[str, ...]] = [
        (name, str(group.lines), str(group.correct), f"{group.share:.1%}", str(group.failed))
        for name, group in scores.list_rows()
    ]
    if not rows:
        return
    if stream.isatty():
        _print_rich(rows, stream)
    else:
        _print_plain(rows, stream)


def _print_plain(rows: list[tuple[str, ...]], stream: TextIO) -> None:
    widths = [max(map(len, column)) for column in zip(_HEAD, *rows, strict=True)]
    for row in (_HEAD, *rows):
        first, *rest = (
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join((first, *rest)), file=stream)


def _print_rich(rows: list[tuple[str, ...]], stream: TextIO) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="Score")
    for at, name in enumerate(_HEAD):
        table.add_column(name, justify="right" if at else "left")
    for name, *rest in rows:
        table.add_row(escape(name), *rest, style="bold" if name == "total" else "")
    Console(file=stream).print(table)


def list_common_reasons(errors: Path, read: int = 1000) -> list[tuple[str, int]]:
    """The reasons of the first `read` error records, each with its count, the most common first."""
    found: Counter[str] = Counter()
    with errors.open(encoding="utf-8") as lines:
        for line in islice(lines, read):
            found[str(json.loads(line)["error"]["message"])[:200]] += 1
    return found.most_common()
