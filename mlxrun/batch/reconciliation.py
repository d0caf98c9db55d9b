"""Reconciles output, errors and journal of earlier runs with the job file before a run starts.

A record is kept if its id contains the line's key and the digest in the journal fits, or if it is complete
and has no journal entry (the process was killed before writing it). All others are discarded and their lines
run again; discarded answers go to dropped.jsonl. Output, errors and journal are replaced in this order, so a
kill in between leaves journal entries without records, which the next start detects.
"""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from mlxrun.batch import output_records
from mlxrun.batch.journal import FORMAT, Journal, JournalEntry, dump_line
from mlxrun.batch.line_files import filter_lines, replace_file
from mlxrun.batch.line_index import DONE, FAILED, TODO, LineIndex
from mlxrun.batch.line_keys import digest_short
from mlxrun.batch.run_paths import JobPaths, wrap_write_errors
from mlxrun.batch.scoring import Scores
from mlxrun.errors import JobError

_STATES = {"done": DONE, "failed": FAILED}
_CLAIM_FORMAT = struct.Struct("<B16s16s")  # state, digests of record and `eval`; state 0: none


@dataclass(slots=True)
class RunTotals:
    """Totals of one run: prompt tokens computed and reused, lines done and failed."""

    computed: int = 0
    reused: int = 0
    done: int = 0
    failed: int = 0


@dataclass(slots=True)
class JobState:
    """How far earlier runs got. `discarded` counts records that were not kept, by reason."""

    done: int = 0
    failed: int = 0
    prompt: int = 0
    output: int = 0
    scores: Scores = field(default_factory=Scores)
    discarded: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    runs: dict[int, RunTotals] = field(default_factory=dict)
    old_settings: str | None = None

    def count(self, state: int, record: dict[str, Any]) -> None:
        """Add one more finished line."""
        prompt, output = output_records.read_usage(record)
        self.done += state == DONE
        self.failed += state == FAILED
        self.prompt += prompt
        self.output += output
        self.scores.add(record)


class Reconciler:
    """Call `read_journal`, then `rewrite`; both block, so call them off the event loop.
    `retry`: failed lines before this position are run again."""

    def __init__(self, index: LineIndex, paths: JobPaths, *, retry: int = 0) -> None:
        self._index = index
        self._paths = paths
        self._retry = retry
        self._claims = bytearray(_CLAIM_FORMAT.size * len(index))  # what the journal claims of each line
        self.state = JobState()

    def read_journal(self) -> JobState:
        """Read the claims of the journal; nothing is written."""
        known = Journal(self._paths.journal)
        for entry in known.read_entries():
            total = self.state.runs.setdefault(entry.run, RunTotals())
            total.done += entry.state == "done"
            total.failed += entry.state == "failed"
            total.computed += entry.computed
            total.reused += entry.reused
            position = self._find_position(entry.custom_id, entry.line, entry.key)
            if position is not None:
                check, wanted = (text.encode("ascii", "replace") for text in (entry.check, entry.eval))
                at = position * _CLAIM_FORMAT.size
                _CLAIM_FORMAT.pack_into(self._claims, at, _STATES[entry.state], check, wanted)
        self.state.problems = known.problems
        self.state.old_settings = known.settings
        return self.state

    def rewrite(self, settings: str) -> JobState:
        """Discard records that do not fit, set the index's states, and rewrite the journal."""
        paths = self._paths
        has_journal = paths.journal.exists()
        temp = paths.folder / "journal.jsonl.tmp"
        with wrap_write_errors(temp), temp.open("wb") as new:
            new.write(dump_line({"format": FORMAT, "settings": settings}))
            self._filter(paths.out, DONE, has_journal, new)
            self._filter(paths.errors, FAILED, has_journal, new)
            replace_file(new, temp, paths.journal)
            if paths.errors.exists() and not paths.errors.stat().st_size:
                paths.errors.unlink()
        return self.state

    def _find_position(self, custom_id: str | None, number: int | None, key: str) -> int | None:
        """The position of the line with this id or number, if its key has not changed."""
        bad = self._index.find_bad(number) if number is not None else None
        line = self._index.find(custom_id) if custom_id is not None else None
        for position in (bad, line):
            if position is not None and self._index.get_row(position).key.hex() == key:
                return position
        return None

    def _filter(self, path: Path, state: int, has_journal: bool, new: BinaryIO) -> None:
        """Keep the records in `path` that `_classify` accepts, and write their entries to the new journal."""

        def rewrite(data: bytes) -> bytes | None:
            complete = data.endswith(b"\n")
            record = output_records.parse_record(data) if complete else None
            if record is None and complete and not has_journal:
                raise JobError(
                    f"{path}: exists and was not written by this job (there is no {self._paths.journal}); "
                    "move it away, give another -o, or replace it with --fresh"
                )
            position = self._classify(data, record, state)
            if isinstance(position, int) and record is not None:
                kept, entry = self._keep_record(position, data, record, state)
                new.write(entry.dump())
                return kept
            self.state.discarded[str(position)] += 1
            if state == DONE and complete:
                with wrap_write_errors(self._paths.dropped), self._paths.dropped.open("ab") as file:
                    file.write(data)
            return None

        with wrap_write_errors(path):
            filter_lines(path, self._paths.folder / (path.name + ".tmp"), rewrite)

    def _classify(self, data: bytes, record: dict[str, Any] | None, state: int) -> int | str:
        """The position of the line to which a record belongs, or the reason why it is discarded."""
        if record is None or (record["error"] is None) != (state == DONE):
            return "broken" if data.endswith(b"\n") else "torn"
        number = record["error"]["line"] if state == FAILED else None
        position = self._find_position(
            record["custom_id"], number, record["id"].removeprefix(output_records.ID_PREFIX)
        )
        if position is None:
            known = record["custom_id"] is not None and self._index.find(record["custom_id"]) is not None
            return "changed" if known else "gone"
        if self._index.state[position] != TODO:
            return "twice"
        if state == FAILED and position < self._retry:
            return "retried"
        claimed, check, _ = _CLAIM_FORMAT.unpack_from(self._claims, position * _CLAIM_FORMAT.size)
        return "edited" if claimed == state and check != digest_short(data).hex().encode() else position

    def _keep_record(
        self, position: int, data: bytes, record: dict[str, Any], state: int
    ) -> tuple[bytes, JournalEntry]:
        """The record, updated to the line's present number and `eval`, and its journal entry."""
        row = self._index.get_row(position)
        _, _, wanted = _CLAIM_FORMAT.unpack_from(self._claims, position * _CLAIM_FORMAT.size)
        moved = state == FAILED and record["error"]["line"] != row.number
        if moved or wanted != row.eval.hex().encode():
            record = output_records.add_score(record, self._index.load(position).line.eval)
            if moved:
                record["error"]["line"] = row.number
            data = output_records.dump_record(record)
        self._index.state[position] = state
        self.state.count(state, record)
        entry = JournalEntry(
            run=0,
            state="failed" if state == FAILED else "done",
            custom_id=record["custom_id"],
            line=row.number if state == FAILED else None,
            key=row.key.hex(),
            check=digest_short(data).hex(),
            eval=row.eval.hex(),
        )
        return data, entry
