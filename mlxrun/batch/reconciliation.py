"""Brings output, errors and journal of earlier runs in line with the job file before a run starts.

Kept is a record whose id holds the line's key and which the journal vouches for; or, with no journal entry
(the process was killed before it was written), one that is whole. All else is cut, and its line runs again;
answers that are cut go to dropped.jsonl. Order of replacement: output, errors, journal, so that a kill in
between leaves a journal that claims too much, which the next start notices.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from mlxrun.batch import journal, output_records
from mlxrun.batch.line_files import filter_lines
from mlxrun.batch.line_index import DONE, FAILED, TODO, Index
from mlxrun.batch.line_keys import SHORT_BYTES, short_digest
from mlxrun.batch.output_records import Usage
from mlxrun.batch.run_paths import Paths, sync_folder, writing
from mlxrun.batch.scoring import Scores
from mlxrun.errors import JobError

log = logging.getLogger(__name__)
_STATES = {"done": DONE, "failed": FAILED}


@dataclass(slots=True)
class RunSum:
    """What one earlier run did, added up from its journal entries."""

    done: int = 0
    failed: int = 0
    computed: int = 0
    reused: int = 0


@dataclass(slots=True)
class Resumed:
    """Where the job stands. `cut` counts records that were not kept, by reason."""

    done: int = 0
    failed: int = 0
    prompt: int = 0
    output: int = 0
    scores: Scores = field(default_factory=Scores)
    cut: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    runs: dict[int, RunSum] = field(default_factory=dict)
    old_settings: str | None = None

    def count(self, state: int, record: dict[str, Any], usage: Usage) -> None:
        """One more finished line."""
        self.done += state == DONE
        self.failed += state == FAILED
        self.prompt += usage.prompt
        self.output += usage.output
        self.scores.add(record)


class Reconciler:
    """One start of one job. `read_journal`, then `rewrite`; both block, so call them off the event loop."""

    def __init__(self, index: Index, paths: Paths, *, retry: int = 0) -> None:
        self._index = index
        self._paths = paths
        self._retry = retry  # failed lines before this position are to be run again
        self._claims = bytearray(len(index))  # state the journal claims, 0 for none
        self._checks = bytearray(SHORT_BYTES * len(index))
        self._same_eval = bytearray(len(index))
        self._new: BinaryIO | None = None
        self.found = Resumed()

    def read_journal(self) -> Resumed:
        """Take in what the journal claims; nothing is written."""
        known = journal.Journal(self._paths.journal)
        for entry in known.entries():
            self._sum(entry)
            position = self._position(entry.custom_id, entry.line, entry.key)
            if position is not None:
                self._claims[position] = _STATES[entry.state]
                self._checks[_at(position)] = _short(entry.check)
                self._same_eval[position] = entry.eval == self._index.eval(position).hex()
        self.found.problems = known.problems
        self.found.old_settings = known.settings
        return self.found

    def rewrite(self, settings: str) -> Resumed:
        """Cut what does not belong, set the index's states, and write the journal anew."""
        paths = self._paths
        ours = paths.journal.exists()
        temp = paths.folder / "journal.jsonl.tmp"
        with writing(temp), temp.open("wb") as self._new:
            self._new.write(journal.header(settings))
            self._filter(paths.out, DONE, ours)
            self._filter(paths.errors, FAILED, ours)
            self._new.flush()
            os.fsync(self._new.fileno())
        with writing(paths.journal):
            temp.replace(paths.journal)
            sync_folder(paths.folder)
            if paths.errors.exists() and not paths.errors.stat().st_size:
                paths.errors.unlink()
        return self.found

    def _sum(self, entry: journal.Entry) -> None:
        total = self.found.runs.setdefault(entry.run, RunSum())
        total.done += entry.state == "done"
        total.failed += entry.state == "failed"
        total.computed += entry.computed
        total.reused += entry.reused

    def _position(self, custom_id: str | None, number: int | None, key: str) -> int | None:
        """The line that this id or number stands for, if its key is still this."""
        bad = self._index.find_bad(number) if number is not None else None
        line = self._index.find(custom_id) if custom_id is not None else None
        for position in (bad, line):
            if position is not None and self._index.key(position).hex() == key:
                return position
        return None

    def _filter(self, path: Path, state: int, ours: bool) -> None:
        """Keep of the records in `path` what `_verdict` keeps."""

        def verdict(data: bytes) -> bytes | None:
            record = output_records.parse(data) if data.endswith(b"\n") else None
            if record is None and data.endswith(b"\n") and not ours:
                raise JobError(
                    f"{path}: exists and was not written by this job (there is no {self._paths.journal}); "
                    "move it away, give another -o, or replace it with --fresh"
                )
            kept = self._verdict(data, record, state)
            if kept is None and state == DONE and data.endswith(b"\n"):
                with writing(self._paths.dropped), self._paths.dropped.open("ab") as file:
                    file.write(data)
            return kept

        with writing(path):
            filter_lines(path, self._paths.folder / (path.name + ".tmp"), verdict)

    def _verdict(self, data: bytes, record: dict[str, Any] | None, state: int) -> bytes | None:
        """The bytes to keep of a record, or None; what is kept is counted and goes to the new journal."""
        position, reason = self._judge(data, record, state)
        if position is None or record is None:
            self.found.cut[reason] += 1
            return None
        kept, record = self._refreshed(position, data, record)
        self._index.state[position] = state
        usage = output_records.usage(record)
        self.found.count(state, record, usage)
        line = record["error"]["line"] if state == FAILED else None
        entry = journal.Entry(
            run=0,
            state="done" if state == DONE else "failed",
            custom_id=record["custom_id"],
            line=line,
            key=self._index.key(position).hex(),
            check=short_digest(kept).hex(),
            eval=self._index.eval(position).hex(),
        )
        assert self._new is not None
        self._new.write(entry.dump())
        return kept

    def _judge(self, data: bytes, record: dict[str, Any] | None, state: int) -> tuple[int | None, str]:
        if record is None or (record["error"] is None) != (state == DONE):
            return None, "torn" if not data.endswith(b"\n") else "broken"
        number = record["error"]["line"] if state == FAILED else None
        position = self._position(
            record["custom_id"], number, record["id"].removeprefix(output_records.ID_PREFIX)
        )
        if position is None:
            known = record["custom_id"] is not None and self._index.find(record["custom_id"]) is not None
            return None, "changed" if known else "gone"
        if self._index.state[position] != TODO:
            return None, "twice"
        if state == FAILED and position < self._retry:
            return None, "retried"
        if self._claims[position] == state and self._checks[_at(position)] != short_digest(data):
            return None, "edited"
        return position, ""

    def _refreshed(self, position: int, data: bytes, record: dict[str, Any]) -> tuple[bytes, dict[str, Any]]:
        """The record with today's line number and a score by today's `eval`."""
        moved = record["error"] is not None and record["error"]["line"] != self._index.number(position)
        if not moved and self._claims[position] and self._same_eval[position]:
            return data, record
        record = output_records.scored(record, self._index.load(position).line.eval)
        if moved:
            record["error"]["line"] = self._index.number(position)
        return output_records.dump(record), record


def _at(position: int) -> slice:
    return slice(position * SHORT_BYTES, (position + 1) * SHORT_BYTES)


def _short(text: str) -> bytes:
    """A digest from the journal; one that is none fits no record."""
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    return found if len(found) == SHORT_BYTES else bytes(SHORT_BYTES)
