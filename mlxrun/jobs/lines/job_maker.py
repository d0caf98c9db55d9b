"""Makes the lines of a job from the rows of a table and a template (`mlxrun job make`).

Each kind of problem is reported once, with its number of rows and the first of them. A table with a problem
makes no job.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from mlxrun.core.errors import JobError, RequestError
from mlxrun.core.limited_json import NestedTooDeeply, load_json
from mlxrun.jobs.lines.job_check import check_line_body
from mlxrun.jobs.lines.job_file import BadLine, RawLine, parse_line
from mlxrun.jobs.lines.line_template import check_cell
from mlxrun.jobs.lines.table_files import Row, RowError, read_rows
from mlxrun.jobs.run.progress import pluralize
from mlxrun.jobs.scoring.eval_spec import EvalReader

MOST_PROBLEMS = 20
REPORT_EVERY = 1000  # rows
_ID_COLUMNS = ("custom_id", "id")


@dataclass(frozen=True, slots=True)
class ColumnChoice:
    """The columns that fill fields outside the template. `id`: None for the column custom_id or id, else for
    row numbers; `match`: how answers are compared with `expected`, None for the template's match or `exact`;
    `mark`: what messages put before the names of these fields, `--` for options of a command."""

    id: str | None = None
    expected: str | None = None
    match: str | None = None
    group: str | None = None
    mark: str = "--"


class RowRenderer(Protocol):
    """Makes a job line in the short form from a row, whose `number` counts from 1. RowError if the row has a
    problem."""

    def render(self, row: Mapping[str, Any], number: int) -> dict[str, Any]: ...


@dataclass(slots=True)
class JobMaker:
    """Makes lines. `body`: fields of all lines, which override those of the template; `name`: the job's name
    in messages."""

    template: RowRenderer
    columns: ColumnChoice
    body: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    _problems: dict[str, tuple[int, int]] = field(default_factory=dict)  # the first row, and how many
    _ids: set[str] = field(default_factory=set)
    _names: dict[str, None] = field(default_factory=dict)  # of all columns, in order
    _has_texts_only: bool = False  # cells of the table have no type and no null

    def write_lines(self, path: Path, out: BinaryIO, report: Callable[[int], None] = lambda _: None) -> int:
        """Write the lines of a job to `out` in the order of the table, and return their number. `report` gets
        the number of rows read, every REPORT_EVERY rows. JobError with all problems if there are any; what
        was written is then no job."""
        return self.write_rows(read_rows(path), str(path), out, report)

    def write_rows(
        self,
        rows: Iterable[tuple[int, Row | RowError]],
        source: str,
        out: BinaryIO,
        report: Callable[[int], None] = lambda _: None,
    ) -> int:
        """Do the same as `write_lines` for numbered rows. `source`: where the rows come from, for
        messages."""
        self._has_texts_only = source.lower().endswith((".csv", ".tsv"))
        count = 0
        for count, (number, row) in enumerate(rows, 1):
            if not isinstance(row, RowError):
                self._names.update(dict.fromkeys(row))
            out.write(self._make_line(row, count, number))
            if count % REPORT_EVERY == 0:
                report(count)
        if self._problems:
            raise JobError.from_problems(self._describe_problems(source))
        if not count:
            raise JobError(f"{source}: the table has no rows")
        return count

    def _make_line(self, row: Row | RowError, count: int, number: int) -> bytes:
        """One line; empty if the row has a problem."""
        try:
            if isinstance(row, RowError):
                raise row
            line = self._build_line(row, count)
            data = json.dumps(line, ensure_ascii=False, allow_nan=False).encode() + b"\n"
            checked = parse_line(RawLine(number, 0, data.strip()), evals=EvalReader(scorers=None))
            if isinstance(checked, BadLine):
                column = self.columns.expected if checked.param == "eval" else None
                raise RowError(f"{f'the column {column!r}: ' if column else ''}{checked.reason}")
            check_line_body(checked)
        except (TypeError, ValueError) as error:
            self._add_problem(f"a value cannot be written as JSON: {error}", number)
        except RequestError as error:
            self._add_problem(f"no model can answer the line: {error}", number)
        except RowError as error:
            self._add_problem(str(error), number)
        else:
            return data
        return b""

    def _build_line(self, row: Row, count: int) -> dict[str, Any]:
        line = {**self.template.render(row, count), **self.body}
        custom_id = line.pop("id", None)
        if self.columns.id is not None:
            custom_id = _read_column(row, self.columns.id, f"{self.columns.mark}id")
        elif custom_id is None:
            found = (row[name] for name in _ID_COLUMNS if row.get(name) not in (None, ""))
            custom_id = next(found, f"row-{count}")
        check_cell(custom_id, "id")
        if str(custom_id) in self._ids:
            raise RowError("its id occurs in an earlier row")
        self._ids.add(str(custom_id))
        if self.columns.expected is not None:
            line["eval"] = self._build_eval(row, line.get("eval"))
        return {"id": str(custom_id), **line}

    def _build_eval(self, row: Row, given: Any) -> dict[str, Any]:
        """The `eval` of the options' columns, added to the one that the template gives."""
        mark = self.columns.mark
        given = {} if given is None else given
        if not isinstance(given, dict):
            raise RowError(f"the template's eval is not an object, so {mark}expected cannot be added to it")
        for name in ("expected", "match", "group"):
            if name in given and getattr(self.columns, name) is not None:
                raise RowError(f"the template's eval has `{name}` already, so {mark}{name} cannot be given")
        wanted = _read_column(row, str(self.columns.expected), f"{mark}expected")
        match = self.columns.match or given.get("match", "exact")
        if wanted == "" and match == "exact" and "scorer" not in given and self._has_texts_only:
            raise RowError(
                f"the column {self.columns.expected!r} is empty: in this format an empty text is as a "
                'missing one; for answers that have to be empty, use JSONL with ""'
            )
        if match in ("json", "json_schema") and isinstance(wanted, str):
            try:
                wanted = load_json(wanted)
            except NestedTooDeeply as error:
                raise RowError(f"the column {self.columns.expected!r} is {error}") from error
            except ValueError as error:
                raise RowError(f"the column {self.columns.expected!r} is not JSON") from error
        found = {**given, "expected": wanted, "match": match}
        if self.columns.group is not None:
            option = f"{mark}group"
            found["group"] = str(check_cell(_read_column(row, self.columns.group, option), option))
        return found

    def _add_problem(self, text: str, number: int) -> None:
        first, count = self._problems.get(text, (number, 0))
        self._problems[text] = first, count + 1

    def _describe_problems(self, source: str) -> Iterator[str]:
        """A line for each kind of problem, the most common first."""
        most = sorted(self._problems.items(), key=lambda item: (-item[1][1], item[1][0]))
        for text, (first, count) in most[:MOST_PROBLEMS]:
            more = f" ({count} rows, of which this is the first)" if count > 1 else ""
            yield f"{source}:{first}: {self.name and self.name + ': '}{text}{more}"
        if len(most) > MOST_PROBLEMS:
            yield f"{source}: and {pluralize(len(most) - MOST_PROBLEMS, 'other kind')} of problem"
        names = ", ".join(map(repr, self._names))
        facts = f"the columns are {names}" if names else "no row could be read"
        yield f"{source}: {facts}; nothing was written"


def _read_column(row: Row, name: str, option: str) -> Any:
    if name not in row:
        raise RowError(f"{option} {name}: there is no such column")
    return row[name]
