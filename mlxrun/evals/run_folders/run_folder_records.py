"""Where the records of a run are in its outputs, and which of them are not as the run wrote them.

Some 300 bytes are kept for each line, however long its answer is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from mlxrun.core.text_files import open_regular
from mlxrun.jobs.lines.line_keys import digest_settings, digest_short
from mlxrun.jobs.records.journal import Journal
from mlxrun.jobs.records.output_records import ID_PREFIX, parse_record
from mlxrun.jobs.records.run_paths import JobPaths

_HEAD = re.compile(rb'\{"id": "' + ID_PREFIX.encode() + rb'([0-9a-f]{32})"')
_STATES = {False: "done", True: "failed"}
_NO_RECORD = "this is no record: it was damaged, or mlxrun did not write it"


@dataclass(frozen=True, slots=True)
class RunProblem:
    """What is wrong at one place of a run folder. `kind`: `edited`, `mixed` (from another run), `incomplete`,
    or `job` (the job file is not the run's; the answers are). `number`: the line in the file `path`; `id`:
    the id of the job's line, if any, which is then the subject of `text`."""

    kind: str
    path: Path
    text: str
    number: int | None = None
    id: str | None = None

    def __str__(self) -> str:
        place = f"{self.path}:{self.number}" if self.number else str(self.path)
        return f"{place}: {self.text if self.id is None else f'line {self.id!r} {self.text}'}"


OnProblem = Callable[[RunProblem], None]


class RecordPlace(NamedTuple):
    """Where a record is: in the errors file or the output, by line number and byte offset."""

    failed: bool
    number: int
    offset: int


class _Claim(NamedTuple):
    """What the journal says of a finished line."""

    state: str
    check: str
    custom_id: str | None


@dataclass(slots=True)
class RecordTable:
    """The records of a run. `finished`: every record must have its journal entry; a kill may leave one out
    otherwise."""

    paths: JobPaths
    manifest: Mapping[str, Any]
    finished: bool
    on_problem: OnProblem
    _claims: dict[tuple[str, int | None], _Claim] = field(default_factory=dict)
    _places: dict[str, dict[int | None, RecordPlace]] = field(default_factory=dict)

    def scan(self) -> None:
        """Read the journal and both outputs. Of the output, only records that do not fit are parsed."""
        has_journal = self._read_journal()
        for path, failed in ((self.paths.out, False), (self.paths.errors, True)):
            file = self.open(path)
            if file is None:
                continue
            offset = 0
            with file:
                for number, data in enumerate(file, 1):
                    if data.endswith(b"\n") or self.finished:
                        self._add(data, RecordPlace(failed, number, offset), has_journal)
                    offset += len(data)
        for claim in self._claims.values():
            path = self.paths.errors if claim.state == "failed" else self.paths.out
            text = f"has no record here, but {self.paths.journal.name} names it as {claim.state}"
            self.on_problem(RunProblem("incomplete", path, text, id=claim.custom_id))

    def open(self, path: Path) -> BinaryIO | None:
        """Open an output; None if it is not there, or cannot be read, which is a problem."""
        try:
            return open_regular(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            self.on_problem(RunProblem("edited", path, f"cannot be read: {error.strerror}"))
            return None

    def pop(self, key: str, number: int) -> RecordPlace | None:
        """Return the place of the record of line `number`, and remove it from the table. The record of a
        failed line is found even if its number has changed."""
        found = self._places.get(key)
        if not found:
            return None
        failed_at = number if number in found else next(iter(found))
        place = found.pop(None if None in found else failed_at)
        if not found:
            del self._places[key]
        return place

    def pop_all(self) -> Iterator[RecordPlace]:
        """Yield the places that are left, in the order of the outputs, and empty the table."""
        rest = sorted(place for found in self._places.values() for place in found.values())
        self._places.clear()
        yield from rest

    def _read_journal(self) -> bool:
        """Read the claims; whether there is a journal."""
        paths, journal = self.paths, Journal(self.paths.journal)
        if not paths.journal.exists():
            text = "is missing: whether records were edited cannot be seen"
            self.on_problem(RunProblem("incomplete", paths.journal, text))
            return False
        for entry in journal.read_entries():
            claim = _Claim(entry.state, entry.check, entry.custom_id)
            self._claims[entry.key, entry.line] = claim
        for problem in journal.problems:
            self.on_problem(RunProblem("edited", paths.journal, problem.removeprefix(f"{paths.journal}:")))
        if journal.settings not in (None, digest_settings(self.manifest["settings"])):
            text = f"was written with other settings than {paths.manifest.name} records"
            self.on_problem(RunProblem("mixed", paths.journal, text, 1))
        return True

    def _add(self, data: bytes, place: RecordPlace, has_journal: bool) -> None:
        path = self.paths.errors if place.failed else self.paths.out
        head = _HEAD.match(data)
        record = None
        if place.failed or head is None:
            record = parse_record(data)
        if head is None and record is None:
            return self.on_problem(RunProblem("edited", path, _NO_RECORD, place.number))
        key = head[1].decode() if head else str((record or {})["id"]).removeprefix(ID_PREFIX)
        number = record["error"]["line"] if record and record["error"] else None
        claim = self._claims.pop((key, number), None) or self._claims.pop((key, None), None)
        good = claim is not None and (claim.state, claim.check) == (
            _STATES[place.failed],
            digest_short(data).hex(),
        )
        if not good:
            record = record or parse_record(data)
            problem = self._explain(data, place, claim, record, has_journal)
            if problem is not None:
                self.on_problem(problem)
            if record is None:
                return
        known = self._places.setdefault(key, {})
        if number in known:
            return self.on_problem(
                RunProblem("mixed", path, "has a second record", place.number, _find_id(data))
            )
        known[number] = place

    def _explain(
        self,
        data: bytes,
        place: RecordPlace,
        claim: _Claim | None,
        record: Mapping[str, Any] | None,
        has_journal: bool,
    ) -> RunProblem | None:
        """What is wrong with a record that is not what the journal says; None if that may be."""
        path = self.paths.errors if place.failed else self.paths.out
        name = self.paths.journal.name
        if claim is None:
            if record is None:
                return RunProblem("edited", path, _NO_RECORD, place.number, _find_id(data))
            if not has_journal or not self.finished:
                return None
            text = f"has a record of which {name} knows nothing: it is from another run, or was edited"
            return RunProblem("mixed", path, text, place.number, _find_id(data))
        if claim.state != _STATES[place.failed]:
            text = f"has a record here, but {name} names it as {claim.state}"
            return RunProblem("mixed", path, text, place.number, claim.custom_id)
        text = f"was edited or damaged: its record does not have the digest that {name} has of it"
        return RunProblem("edited", path, text, place.number, claim.custom_id)


def _find_id(data: bytes) -> str | None:
    """The custom_id of a record; None if it has none that can be read."""
    try:
        found = json.loads(data).get("custom_id")
    except (ValueError, AttributeError, RecursionError):
        return None
    return found if isinstance(found, str) else None
