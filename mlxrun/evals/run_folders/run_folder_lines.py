"""Reads the lines of a run: those of the job file, each with its record.

A line has a record by its key, which `mlxrun batch` or a server has computed. What has none is named, and so
is a record that fits no line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from mlxrun.evals.run_folders.run_folder_records import RecordPlace, RecordTable, RunProblem
from mlxrun.evals.run_folders.run_line import RunLine
from mlxrun.jobs.lines.job_file import BadLine, JobLine, RawLine, open_job, parse_line, read_lines
from mlxrun.jobs.lines.line_keys import LineKeys, digest_settings, find_local_images, make_run_keys
from mlxrun.jobs.records.manifest import hash_file
from mlxrun.jobs.scoring.eval_spec import EvalReader


class _IgnoredEvals(EvalReader):
    """Reads no `eval`, so that a line cannot be a bad one because of it."""

    def read(self, value: Any) -> None:
        return None


# As most lines ran: scorers were loaded. With `--scorer`, an `eval` may be replaced; in a server, one that
# names a scorer is refused.
_EVAL_READERS = (EvalReader(scorers=None), _IgnoredEvals(), EvalReader())


@dataclass(slots=True)
class RunLineReader:
    """Matches the lines of the job file with the records of a run. `table`: has been scanned; `_missed`: the
    numbers of lines without a record, by id, and whether they name images."""

    table: RecordTable
    _missed: dict[str, tuple[int, bool]] = field(default_factory=dict)

    def read(self) -> Iterator[RunLine]:
        """The lines in the order of the job, then those that it no longer has."""
        paths, total = self.table.paths, 0
        is_same = self._check_job()
        with ExitStack() as files:
            outputs = [self.table.open(path) for path in (paths.out, paths.errors)]
            for file in filter(None, outputs):
                files.enter_context(file)
            for custom_id, number, line, place in self._match_lines():
                total += 1
                yield RunLine(custom_id, number, line, _read_record(outputs, place))
            for place in self.table.pop_all():
                record = _read_record(outputs, place)
                custom_id = record["custom_id"] or f"line {record['error']['line']}"
                self._explain_rest(custom_id, place, is_same)
                total += 1
                yield RunLine(custom_id, None, None, record)
        if self.table.finished:
            self._report_missing(total, is_same)

    def _check_job(self) -> bool:
        job = self.table.paths.job
        digest = hash_file(job) if job.is_file() else None
        if digest == self.table.manifest["input"]["sha256"]:
            return True
        what = "has changed since the run" if digest else "is missing"
        self.table.on_problem(RunProblem("job", job, f"the job file {what}"))
        return False

    def _match_lines(self) -> Iterator[tuple[str, int, JobLine | BadLine, RecordPlace]]:
        """The lines that have a record: id, number, line and place of the record."""
        job, seen = self.table.paths.job, set[int]()
        if not job.is_file():
            return
        keys = self._make_keys()
        with open_job(job) as file:
            for raw in read_lines(file):
                line, place = self._find_place(raw, keys)
                custom_id = _choose_name(line, seen)
                if place is not None:
                    yield custom_id, raw.number, line, place
                else:
                    self._missed[custom_id] = raw.number, _names_images(line)

    def _find_place(
        self, raw: RawLine, keys: Sequence[LineKeys]
    ) -> tuple[JobLine | BadLine, RecordPlace | None]:
        """A line as it was read when it ran, and the place of its record. Its `eval` may have been refused
        then, or replaced, which only matters to whether the line was a bad one."""
        first = None
        for evals in _EVAL_READERS:
            line = parse_line(raw, evals=evals)
            first = first or line
            for each in keys:
                if isinstance(line, BadLine):
                    key = each.compute_bad_key(raw.data, line.reason)
                else:
                    key = each.compute_key(line)
                place = self.table.pop(key.hex(), raw.number)
                if place is not None:
                    return line, place
        assert first is not None
        return first, None

    def _make_keys(self) -> list[LineKeys]:
        """How the keys of lines are computed: as by `mlxrun batch`, and as by a server for its batches."""
        paths, manifest = self.table.paths, self.table.manifest
        settings, batch_id = digest_settings(manifest["settings"]), paths.job.absolute().parent.name
        return [
            make_run_keys(manifest, settings, paths.job.parent),
            make_run_keys(manifest, settings, None, batch_id),
        ]

    def _explain_rest(self, custom_id: str, place: RecordPlace, is_same: bool) -> None:
        """Report a record that fits no line of the job file."""
        paths = self.table.paths
        path = paths.errors if place.failed else paths.out
        number, has_images = self._missed.pop(custom_id, (None, False))
        if not is_same:
            text = "changed in the job file since the run, or is no longer in it"
            self.table.on_problem(RunProblem("job", path, text, place.number, custom_id))
        elif has_images:
            text = f"names a file that has changed since the run (line {number} of {paths.job})"
            self.table.on_problem(RunProblem("job", path, text, place.number, custom_id))
        else:
            text = f"has a record that belongs to another job, model or settings than {paths.manifest} names"
            self.table.on_problem(RunProblem("mixed", path, text, place.number, custom_id))

    def _report_missing(self, found: int, is_same: bool) -> None:
        """Report lines of a finished run that have no record."""
        paths, total = self.table.paths, int(self.table.manifest["input"]["lines"])
        if is_same:
            for custom_id, (number, _) in self._missed.items():
                text = f"has neither an answer nor an error (line {number} of {paths.job})"
                self.table.on_problem(RunProblem("incomplete", paths.out, text, id=custom_id))
        elif found < total:
            text = f"{total - found} of {total} lines have neither an answer nor an error"
            self.table.on_problem(RunProblem("incomplete", paths.out, text))


def _choose_name(line: JobLine | BadLine, seen: set[int]) -> str:
    """The id of a line, or its number if it has none or that of a line before. `seen`: hashes of the names
    before, to which this one is added."""
    name = line.custom_id
    if name is None or hash(name) in seen:
        name = f"line {line.number}"
    while hash(name) in seen:  # an id may be such a text
        name += " of the job"
    seen.add(hash(name))
    return name


def _names_images(line: JobLine | BadLine) -> bool:
    return isinstance(line, JobLine) and next(find_local_images(line.body), None) is not None


def _read_record(outputs: Sequence[BinaryIO | None], place: RecordPlace) -> dict[str, Any]:
    file = outputs[place.failed]
    assert file is not None
    file.seek(place.offset)
    record: dict[str, Any] = json.loads(file.readline())
    return record
