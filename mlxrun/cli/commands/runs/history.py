"""`mlxrun history`: notes the scores of repeated runs in a file, draws their trend, and finds drift."""

from __future__ import annotations

from pathlib import Path

import click

from mlxrun.cli.run_setup import report_stale
from mlxrun.core.errors import JobError
from mlxrun.core.terminal import make_columns, print_error, print_json, print_line, print_table

EPILOG = """\b
Examples:
  mlxrun history nightly.jsonl main.out                     adds the scores of a suite, and shows the trend
  mlxrun history nightly.jsonl main.out --fail-if drift --fail-if jump
  mlxrun history nightly.jsonl --fail-if "drift in */sums/*"   adds nothing
  mlxrun history nightly.jsonl --json                       all figures
  mlxrun history nightly.jsonl --html trend.html            the trends as a page

\b
FILE is JSONL, and is made if it is not there. RUN is a job file, its output, or the folder of a suite, each
of whose cells has a trend. A run that is in FILE already is not added again.
  jump    the newest score is worse than the 95 % prediction interval of those before it; from the fourth
          run on
  drift   scores get worse over time (Mann-Kendall, p < 0.05); from the fifth run on

\b
Exit codes: 0 noted; 1 a --fail-if holds; 2 a run that is unfinished or has no score, or usage.
"""


@click.command(epilog=EPILOG)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("run", required=False, type=click.Path(path_type=Path))
@click.option(
    "--fail-if",
    "conditions",
    multiple=True,
    metavar="CONDITION",
    help="Exit with 1 if it holds: jump or drift, or one of them in CELL, where * stands for any text.",
)
@click.option("--json", "as_json", is_flag=True, help="Print all figures as JSON.")
@click.option(
    "--html",
    "page",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="PAGE",
    help="Write the trends as a page for a browser, too.",
)
def command(
    file: Path, run: Path | None, conditions: tuple[str, ...], as_json: bool, page: Path | None
) -> int:
    """Note the scores of RUN in FILE, and show how scores change from run to run."""
    from mlxrun.evals.history import add_runs, find_failures, find_trends, list_cells, read_history
    from mlxrun.evals.run_folders.run_folder import open_runs
    from mlxrun.jobs.run.progress import pluralize

    rows = known = read_history(file)
    runs = [] if run is None else open_runs(run)
    if run is not None:
        rows = add_runs(file, runs)
        report_stale(runs, run)
    added = len(rows) - len(known)
    if not rows:
        raise JobError(f"{file}: is no history yet; give a run to begin it with")
    trends = find_trends(rows)
    reasons = list(find_failures(trends, conditions))
    if page is not None:
        from mlxrun.cli.commands.runs.report import write_page
        from mlxrun.evals.reports.page import render_history

        write_page(page, render_history(trends, file.name))
    if as_json:
        counts = {"added": added, "already_there": len(runs) - added}
        print_json({"format": 1, **counts, "cells": [each.describe() for each in trends]}, indent=1)
    else:
        shown = list(list_cells(trends))
        print_table(make_columns(shown[0]), (each.values() for each in shown))
        if runs:
            print_line(f"{file}: {pluralize(added, 'row')} added, {len(runs) - added} already there")
    for reason in reasons:
        print_error(f"mlxrun: --fail-if {reason}")
    return 1 if reasons else 0
