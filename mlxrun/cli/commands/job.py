"""`mlxrun job`: makes job files."""

from __future__ import annotations

import fcntl
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from mlxrun.cli.options import parse_field
from mlxrun.core.errors import JobError
from mlxrun.core.terminal import print_error, print_line, print_text
from mlxrun.core.visible_text import escape_json
from mlxrun.jobs.scoring.eval_spec import MATCHES

if TYPE_CHECKING:
    from mlxrun.jobs.lines.job_maker import JobMaker
    from mlxrun.jobs.lines.line_template import LineTemplate

EPILOG = """\b
Examples:
  mlxrun job make cities.csv --prompt "What is the capital of {{ country }}?" --expected capital
  mlxrun job make cities.csv --template question.jinja --expected capital --match contains
  mlxrun job make cities.parquet --template line.yaml -o eval.jsonl

\b
A template is Jinja, and the columns are its variables ({{ row["two words"] }} for names of that kind). A file
that ends in .yaml or .json is a whole job line, with Jinja in its strings; other files are a user's message:
  id: "{{ country }}"
  messages:
    - {role: system, content: Answer with one word.}
    - {role: user, content: "What is the capital of {{ country }}?"}
  max_tokens: 20
  eval: {expected: "{{ capital }}", match: contains, group: "{{ continent }}"}

\b
DATA is .csv, .tsv, .jsonl or .parquet. If a row has a problem, nothing is written; each kind of problem is
shown once, with the first row that has it, and the exit code is 2.
"""


REPORT_SECONDS = 5.0  # between two messages about a long table


@click.group()
def command() -> None:
    """Make job files from tables."""


@command.command(epilog=EPILOG)
@click.argument("data", type=click.Path(path_type=Path))
@click.option(
    "--template", "template_path", type=click.Path(path_type=Path), metavar="FILE", help="Template."
)
@click.option("--prompt", metavar="TEXT", help="Template of the user's message, instead of a file.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    metavar="JOBS",
    help="Where the job lines go; - prints them. Default: DATA with the ending .job.jsonl.",
)
@click.option(
    "--id",
    "id_column",
    metavar="COLUMN",
    help="Column with the id of each line. Default: `custom_id`, `id`, or row-1, row-2 and so on.",
)
@click.option("--expected", metavar="COLUMN", help="Column with the expected answers.")
@click.option(
    "--match",
    type=click.Choice(MATCHES),
    help="How an answer is compared with it. Default: that of the template's `eval`, or exact.",
)
@click.option("--group", metavar="COLUMN", help="Column with the group in which a line is scored.")
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Field of all lines, with a YAML value: max_tokens=20. May be given several times.",
)
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def make(
    data: Path,
    template_path: Path | None,
    prompt: str | None,
    output: Path | None,
    sets: tuple[str, ...],
    **options: Any,
) -> None:
    """Make a job line of each row of DATA."""
    from mlxrun.jobs.lines.job_maker import ColumnChoice, JobMaker
    from mlxrun.jobs.run.progress import pluralize

    if not data.exists():
        raise JobError(f"{data}: cannot be read: there is no such file")
    match, expected = options["match"], options["expected"]
    if expected is None and (options["group"] or match):
        raise click.UsageError("--match and --group need --expected; a template can have `eval` instead")
    template = _load_template(template_path, prompt)
    choice = ColumnChoice(options["id_column"], expected, match, options["group"])
    maker = JobMaker(template, choice, dict(map(parse_field, sets)))
    if str(output) == "-":
        with tempfile.TemporaryFile() as file:  # nothing is printed of a table with a problem
            maker.write_lines(data, file, make_row_report(str(data)))
            file.seek(0)
            for line in file:
                print_text(escape_json(line.decode()))
        return
    output = output or data.with_name(data.stem + ".job.jsonl")
    count = _write_file(maker, data, output, options["force"])
    print_line(f"{output}: {pluralize(count, 'line')}; to run them: mlxrun batch {output}")


def _write_file(maker: JobMaker, data: Path, output: Path, force: bool) -> int:
    from mlxrun.jobs.records.run_paths import replace_file

    temp = output.with_name(output.name + ".tmp")
    try:
        with _open_temporary(temp) as file:
            if output.exists() and not force:
                raise JobError(f"{output} exists already; --force overwrites it")
            count = maker.write_lines(data, file, make_row_report(str(data)))
            replace_file(file, temp, output)
    except OSError as error:
        raise JobError(f"{output}: cannot be written: {error.strerror or error}") from error
    return count


@contextmanager
def _open_temporary(path: Path) -> Iterator[BinaryIO]:
    """The file that becomes the output, empty and locked; it is removed in the end. One that a killed command
    has left is named and used; JobError if another command writes it now."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JobError(f"{path}: another `mlxrun job make` is writing it") from None
        try:
            if file.tell():
                print_error(f"{path}: removed; it was left by a command that was killed")
                file.truncate(0)
            yield file
        finally:
            path.unlink(missing_ok=True)


def make_row_report(name: str) -> Callable[[int], None]:
    """Make a function that reports, every few seconds on stderr, how many rows were read. `name`: the table's
    name."""
    last = time.monotonic()

    def report(rows: int) -> None:
        nonlocal last
        if time.monotonic() - last >= REPORT_SECONDS:
            last = time.monotonic()
            print_error(f"{name}: {rows:,} rows read")

    return report


def _load_template(path: Path | None, prompt: str | None) -> LineTemplate:
    from mlxrun.jobs.lines.line_template import make_message_template, read_template

    if path is not None and prompt is None:
        return read_template(path)
    if prompt is not None and path is None:
        return make_message_template(prompt, "--prompt")
    raise click.UsageError("give one of --template and --prompt")
