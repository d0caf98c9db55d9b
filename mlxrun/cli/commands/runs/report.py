"""`mlxrun report`: writes a report of runs as one HTML file, or as Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlxrun.cli.options import say
from mlxrun.core.errors import JobError
from mlxrun.core.terminal import print_line, print_text

if TYPE_CHECKING:
    from mlxrun.evals.reports.report_runs import ReportRuns

EPILOG = """\b
Examples:
  mlxrun report jobs/eval.jsonl                       writes jobs/eval.out.jsonl.run/report.html
  mlxrun report suite.out                             every cell of a suite: suite.out/report.html
  mlxrun report old.out.jsonl new.out.jsonl -o diff.html
  mlxrun report old.out.jsonl new.out.jsonl --format md -o - | gh pr comment --body-file -

\b
RUN is a job file, its output, its run folder, or the folder of a suite. With two runs of the same lines the
report has their difference: lines that became right or wrong, and the tests of `mlxrun compare`.
The HTML file contains all that it shows, images included, and loads nothing; it may be sent or archived.
Prompts and answers are in it: share it with those who may read them.
Records that were edited or are missing are named on the page and on standard error.

\b
Exit codes: 0 written; 2 no such run, or its manifest is damaged.
"""


@click.command(epilog=EPILOG)
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    metavar="FILE",
    help="Where the report goes; - prints it. Default: report.html or report.md beside the (first) run.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["html", "md"]),
    help="HTML, or Markdown for pull requests. Default: what FILE ends in, else html.",
)
@click.option("--full", is_flag=True, help="Keep long texts whole, and images at up to 1,024 pixels.")
def command(runs: tuple[Path, ...], output: Path | None, form: str | None, full: bool) -> int:
    """Write a report of RUN..., to look at scores, failures, speed and every line."""
    from mlxrun.evals.reports.page import render_markdown, render_page
    from mlxrun.evals.reports.report_runs import read_runs

    form = form or ("md" if output is not None and output.suffix == ".md" else "html")
    found = read_runs(runs, full=full, images=form == "html", say=lambda text: say(f"mlxrun: {text}"))
    text = (render_markdown if form == "md" else render_page)(found)
    if output == Path("-"):
        print_text(text)
        return 0
    path = output or choose_path(found, form)
    write_page(path, text)
    print_line(str(path))
    return 0


def choose_path(runs: ReportRuns, form: str) -> Path:
    """Choose where a report goes by default: the folder of the only suite that the user named, else the run
    folder of the first run."""
    from mlxrun.evals.run_folders.run_folder_paths import find_suite

    suite = find_suite(runs.paths[0]) if len(runs.paths) == 1 else None
    folder = suite or runs.runs[0].folder.paths.folder
    return folder / f"report.{form}"


def write_page(path: Path, text: str) -> None:
    """Write a page. JobError if that fails."""
    from mlxrun.core.durable_writes import write_atomically

    try:
        write_atomically(path, text.encode("utf-8", "replace"), durable=False)
    except OSError as error:
        raise JobError(f"{path}: cannot be written: {error.strerror or error}") from error
