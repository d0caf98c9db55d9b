"""Makes the job lines of a suite's cells, and finds problems of its data before a model is loaded.

Cells that differ only in their model or seed have the same lines. A problem that all rows have is reported
once, at its position in the suite. A problem of some rows is reported at the first of them, in the data.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from mlxrun.api.openai.fields import BODIES
from mlxrun.config.settings import Config
from mlxrun.core.errors import JobError, RequestError
from mlxrun.core.field_errors import suggest
from mlxrun.evals.suites.matrix import Cell
from mlxrun.evals.suites.suite_checks import NOT_IN_GENERATION, list_sources
from mlxrun.evals.suites.suite_file import Step, SuiteFile
from mlxrun.evals.suites.suite_settings import MEDIA_COLUMNS, SuiteTask
from mlxrun.evals.suites.task_rows import Prepare, RowSource, open_rows
from mlxrun.evals.suites.task_template import (
    TaskTemplate,
    choose_examples,
    compile_parts,
    locate_scorer,
    parse_task_judge,
)
from mlxrun.jobs.agents.tool_session import describe_tools
from mlxrun.jobs.lines.job_maker import ColumnChoice, JobMaker
from mlxrun.jobs.lines.line_template import LineTemplate
from mlxrun.jobs.lines.table_files import Row, RowError
from mlxrun.jobs.records.manifest import hash_file
from mlxrun.jobs.records.run_paths import replace_file, wrap_write_errors
from mlxrun.jobs.scoring.custom_scorer import import_function, load_scorer

_COLUMNS = ("id", "expected", "group", *MEDIA_COLUMNS)  # keys of a task that name a column
_OWN_VARIABLES = ("row", "row_number")


@dataclass(slots=True)
class CellJobs:
    """The lines of all cells of a suite. `check` finds problems; `write` makes the job file of one cell.
    `make_report`: takes the name of a table, and returns a function that gets the number of rows read."""

    file: SuiteFile
    make_report: Callable[[str], Callable[[int], None]] = lambda name: lambda rows: None
    _sources: dict[tuple[Any, ...], RowSource | str] = field(default_factory=dict)
    _templates: dict[str, TaskTemplate | None] = field(default_factory=dict)
    _prepares: dict[str, Prepare | None] = field(default_factory=dict)
    _tools: dict[str, dict[str, Any]] = field(default_factory=dict)

    def check(self, cells: Sequence[Cell]) -> None:
        """Add the problems of templates and rows to those of the suite. Rows of a task that has a problem are
        not read, as it may be the cause of theirs."""
        for cell in {cell.lines_key: cell for cell in cells}.values():
            template = self._prepare(cell)
            if template is None or cell.task_name in self.file.harmed:
                continue
            try:
                with Path("/dev/null").open("wb") as nowhere:
                    self._make_lines(cell, template, nowhere)
            except JobError as error:
                self.file.lines += str(error).splitlines()

    def write(self, cell: Cell, path: Path) -> str:
        """Write the job file of a cell of a checked suite, and return its SHA-256. An equal file is left as
        it is. JobError if it cannot be written."""
        temp = path.with_name(path.name + ".tmp")
        with wrap_write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with temp.open("wb+") as file:
                digest = self._write_lines(cell, path, file)
                if hash_file(path) == digest:
                    temp.unlink()
                else:
                    replace_file(file, temp, path)
        return digest

    def compute_digest(self, cell: Cell, path: Path) -> str:
        """Compute the SHA-256 of the job file that `write` would make at `path`. Nothing is left there."""
        with tempfile.TemporaryFile() as file:
            return self._write_lines(cell, path, file)

    def _write_lines(self, cell: Cell, path: Path, file: BinaryIO) -> str:
        """Write the lines of a job file at `path` to `file`, and return their sha256."""
        template = self._prepare(cell)
        assert template is not None, "the suite was not checked"
        self._make_lines(cell, replace(template, job_folder=path.parent.resolve()), file)
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # it has readinto

    def copy(self, done: Path, path: Path) -> None:
        """Give a cell the same lines as another cell, whose job file is `done`."""
        with wrap_write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if hash_file(path) == hash_file(done):
                return
            temp = path.with_name(path.name + ".tmp")
            with done.open("rb") as old, temp.open("wb") as new:
                shutil.copyfileobj(old, new)
                replace_file(new, temp, path)

    def add_media_folder(self, cell: Cell) -> Config:
        """Return the config of a cell with the folder of its data as a place of media: paths in its job file
        lead there."""
        source = self._open(cell.task_name, cell.task) if cell.task.media else None
        if not isinstance(source, RowSource) or source.folder is None:
            return cell.config
        media = cell.config.media
        roots = (*media.roots, str(source.folder.resolve()))
        return replace(cell.config, media=replace(media, roots=roots))

    def _make_lines(self, cell: Cell, template: TaskTemplate, out: BinaryIO) -> int:
        task = cell.task
        columns = ColumnChoice(task.id, mark="")
        if not task.choices:
            match, group = (task.match, task.group) if task.expected_column is not None else (None, None)
            columns = ColumnChoice(task.id, task.expected_column, match, group, mark="")
        maker = JobMaker(template, columns, task.generation, f"tasks.{cell.task_name}")
        source = self._open(cell.task_name, task)
        assert isinstance(source, RowSource)
        return maker.write_rows(source.read(task.limit), source.name, out, self.make_report(source.name))

    def _prepare(self, cell: Cell) -> TaskTemplate | None:
        """The template of a cell's lines; None if it has problems, which are added to the suite's once."""
        if cell.lines_key not in self._templates:
            known = len(self.file.problems) + len(self.file.lines)
            template = self._build_template(cell)
            is_good = len(self.file.problems) + len(self.file.lines) == known
            self._templates[cell.lines_key] = template if is_good else None
        return self._templates[cell.lines_key]

    def _build_template(self, cell: Cell) -> TaskTemplate | None:
        name, task = cell.task_name, cell.task
        chosen = cell.settings.get("prompt")

        def find_steps(key: str) -> list[Step]:
            steps = ["prompts", str(chosen)] if key == "prompt" and chosen is not None else key.split(".")
            return ["tasks", name, *steps]

        parts: dict[str, LineTemplate] = {}
        compiled = compile_parts(task, self.file.folder, lambda key: self.file.locate(*find_steps(key)))
        for key, part in compiled:
            if isinstance(part, JobError):
                self.file.lines.append(str(part))
            else:
                parts[key] = part
        self._check_generation(name, task)
        self._check_scorers(name, task)
        template = TaskTemplate(task, parts, None)
        if len(list_sources(task)) != 1:  # which was reported
            return template
        source = self._open(name, task)
        if isinstance(source, RowSource):
            template = replace(template, folder=source.folder, **self._choose_examples(name, task, source))
            template = replace(template, **self._load_tools(name, task))
            for steps, message in _find_missing_columns(template, source):
                self.file.report(find_steps(steps), message)
        return template

    def _open(self, name: str, task: SuiteTask, key: str = "") -> RowSource | str:
        """The rows of a task, or of its examples (`key`: few_shot); the text of a problem if there are none,
        which is reported once."""
        given = task.few_shot if key else task
        assert given is not None
        where = (name, key)
        if where not in self._sources:
            try:
                if given.rows:
                    place = ".".join(each for each in (name, key, "rows") if each)
                    prepare = None if key else self._load_prepare(name, task)
                    self._sources[where] = RowSource(
                        place, self.file.folder, dataset=given.rows, prepare=prepare
                    )
                else:
                    source = open_rows(
                        given.data, given.hub, self.file.folder, self._load_prepare(name, task)
                    )
                    if next(iter(source.read(1)), None) is None:
                        raise JobError(f"{source.name}: the table has no rows")
                    self._sources[where] = source
            except JobError as error:
                steps = [each for each in ("tasks", name, key) if each]
                self.file.report([*steps, "data" if given.hub is None else "hub"], str(error))
                self._sources[where] = str(error)
        return self._sources[where]

    def _choose_examples(self, name: str, task: SuiteTask, source: RowSource) -> dict[str, Any]:
        few_shot = task.few_shot
        if few_shot is None:
            return {}
        given = list_sources(few_shot)
        if len(given) > 1:  # which was reported
            return {}
        own = not given
        found = source if own else self._open(name, task, "few_shot")
        if not isinstance(found, RowSource):
            return {}
        try:
            return {"examples": choose_examples(few_shot, found, own=own), "own_examples": own}
        except JobError as error:
            self.file.report(("tasks", name, "few_shot"), str(error))
            return {}

    def _load_prepare(self, name: str, task: SuiteTask) -> Prepare | None:
        """The function that changes the rows of a task. None if there is none, or if it cannot be loaded,
        which is reported once."""
        if task.prepare is not None and name not in self._prepares:
            self._prepares[name] = None
            try:
                place = locate_scorer(task.prepare, self.file.folder)
                self._prepares[name] = import_function(place, "function")[1]
            except JobError as error:
                self.file.report(("tasks", name, "prepare"), str(error))
        return self._prepares.get(name)

    def _load_tools(self, name: str, task: SuiteTask) -> dict[str, Any]:
        """What lines have of the tools of a task. Those that cannot be used are reported once."""
        if task.agent is None or name in self.file.harmed:
            return {}
        if name not in self._tools:
            folder = self.file.folder.resolve()
            self._tools[name] = {}
            try:
                tools, digests = describe_tools(task.agent, folder)
                self._tools[name] = {"tools": tools, "tool_folder": folder, "tool_digests": digests}
            except RequestError as error:
                self.file.report(("tasks", name, "agent"), str(error).removeprefix("agent: "))
        return self._tools[name]

    def _check_generation(self, name: str, task: SuiteTask) -> None:
        """Report fields of a `generation` that no request has, or whose values are wrong."""
        body = BODIES["completion" if task.is_completion else "chat"]
        given: dict[tuple[str, ...], dict[str, Any]] = {(): task.generation}
        if task.agent is not None and task.agent.user is not None:
            given["agent", "user"] = task.agent.user.generation
        for steps, fields in given.items():
            for key, value in fields.items():
                if key in NOT_IN_GENERATION and not steps:  # which was reported
                    continue
                try:
                    body.check({key: value})
                except RequestError as error:
                    text = str(error).removeprefix(f"{key}: ")
                    self.file.report(("tasks", name, *steps, "generation", key), text, at_key=True)

    def _check_scorers(self, name: str, task: SuiteTask) -> None:
        """Report a judge that is not valid, and a scorer that cannot be loaded. One whose name has columns in
        it is loaded with the job."""
        try:
            place = ("tasks", name, "judge")
            parse_task_judge(
                task,
                self.file.folder,
                self.file.locate(*place),
                lambda steps: self.file.locate(*place, *steps),
            )
        except JobError as error:
            self.file.lines += str(error).splitlines()
        scorer = task.eval.get("scorer")
        if isinstance(scorer, str) and "{" not in scorer:
            try:
                load_scorer(locate_scorer(scorer, self.file.folder))
            except JobError as error:
                self.file.report(("tasks", name, "eval", "scorer"), str(error))


def _read(source: RowSource) -> Iterator[Row]:
    """The rows that can be read; reading them for lines reports the others."""
    with suppress(JobError):
        yield from (row for _, row in source.read() if not isinstance(row, RowError))


def _find_missing_columns(template: TaskTemplate, source: RowSource) -> list[tuple[str, str]]:
    """Keys of the task, each with what is wrong: columns that the table does not have. In JSONL a row may
    lack what others have, which is named with its row where the lines are made."""
    rows = _read(source)
    first = next(rows, None)
    if first is None:
        return []
    found = list(_find_unknown_columns(template, first, source.name))
    if found and source.path is not None and source.path.suffix.lower() in (".jsonl", ".ndjson"):
        columns = dict(first)
        for row in rows:
            columns = {**row, **columns}
        found = list(_find_unknown_columns(template, columns, source.name))
    return found


def _find_unknown_columns(
    template: TaskTemplate, row: Mapping[str, Any], source: str
) -> Iterator[tuple[str, str]]:
    """Keys of the task, each with what is wrong: columns that a row does not have."""
    task = template.task

    def describe(name: str) -> str:
        return f"{source} has no column {name!r}{suggest(name, row)}"

    for key in _COLUMNS:
        name = getattr(task, key)
        if isinstance(name, str) and name not in row:
            yield key, describe(name)
    for key, part in template.parts.items():
        if key == "few_shot.answer" and not template.own_examples:
            continue
        unknown = sorted(part.variables - row.keys() - set(_OWN_VARIABLES))
        for name in unknown:
            others = dict.fromkeys(set(unknown) - {name}, "")
            try:
                part.render({**row, **others}, 1)
            except RowError:  # a template may have a default for what is not there
                yield key, describe(name)
