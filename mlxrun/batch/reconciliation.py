"""Brings output, errors and journal of earlier runs in line with the job file before a run starts.

Kept is a record whose id holds the line's key and which the journal vouches for; or, with no journal entry
(the process was killed before it was written), one that is whole. All else is cut, and its line runs again;
answers that are cut go to dropped.jsonl. Order of replacement: output, errors, journal, so that a kill in
between leaves a journal that claims too much, which the next start notices.
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
from mlxrun.batch.line_index import DONE, FAILED, TODO, Index
from mlxrun.batch.line_keys import short_digest
from mlxrun.batch.run_paths import Paths, writing
from mlxrun.batch.scoring import Scores
from mlxrun.errors import JobError

_STATES = {"done": DONE, "failed": FAILED}
_CLAIM = struct.Struct("<B16s16s")  # state, digests of record and `eval`; state 0: none


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

    def count(self, state: int, record: dict[str, Any]) -> None:
        """Add one more finished line."""
        usage = output_records.usage(record)
        self.done += state == DONE
        self.failed += state == FAILED
        self.prompt += usage.prompt
        self.output += usage.output
        self.scores.add(record)


class Reconciler:
    """One start of one job. `read_journal`, then `rewrite`; both block, so call them off the event loop.
    `retry`: failed lines before this position are to be run again."""

    def __init__(self, index: Index, paths: Paths, *, retry: int = 0) -> None:
        self._index = index
        self._paths = paths
        self._retry = retry
        self._claims = bytearray(_CLAIM.size * len(index))  # what the journal says of each line
        self.found = Resumed()

    def read_journal(self) -> Resumed:
        """Take in what the journal claims; nothing is written."""
        known = Journal(self._paths.journal)
        for entry in known.entries():
            total = self.found.runs.setdefault(entry.run, RunSum())
            total.done += entry.state == "done"
            total.failed += entry.state == "failed"
            total.computed += entry.computed
            total.reused += entry.reused
            position = self._position(entry.custom_id, entry.line, entry.key)
            if position is not None:
                check, wanted = (text.encode("ascii", "replace") for text in (entry.check, entry.eval))
                at = position * _CLAIM.size
                _CLAIM.pack_into(self._claims, at, _STATES[entry.state], check, wanted)
        self.found.problems = known.problems
        self.found.old_settings = known.settings
        return self.found

    def rewrite(self, settings: str) -> Resumed:
        """Cut what does not belong, set the index's states, and write the journal anew."""
        paths = self._paths
        ours = paths.journal.exists()
        temp = paths.folder / "journal.jsonl.tmp"
        with writing(temp), temp.open("wb") as new:
            new.write(dump_line({"format": FORMAT, "settings": settings}))
            self._filter(paths.out, DONE, ours, new)
            self._filter(paths.errors, FAILED, ours, new)
            replace_file(new, temp, paths.journal)
            if paths.errors.exists() and not paths.errors.stat().st_size:
                paths.errors.unlink()
        return self.found

    def _position(self, custom_id: str | None, number: int | None, key: str) -> int | None:
        """The line that this id or number stands for, if its key is still this."""
        bad = self._index.find_bad(number) if number is not None else None
        line = self._index.find(custom_id) if custom_id is not None else None
        for position in (bad, line):
            if position is not None and self._index.row(position).key.hex() == key:
                return position
        return None

    def _filter(self, path: Path, state: int, ours: bool, new: BinaryIO) -> None:
        """Keep of the records in `path` what `_judge` keeps, and enter that into the new journal."""

        def verdict(data: bytes) -> bytes | None:
            whole = data.endswith(b"\n")
            record = output_records.parse(data) if whole else None
            if record is None and whole and not ours:
                raise JobError(
                    f"{path}: exists and was not written by this job (there is no {self._paths.journal}); "
                    "move it away, give another -o, or replace it with --fresh"
                )
            position = self._judge(data, record, state)
            if isinstance(position, int) and record is not None:
                kept, entry = self._keep(position, data, record, state)
                new.write(entry.dump())
                return kept
            self.found.cut[str(position)] += 1
            if state == DONE and whole:
                with writing(self._paths.dropped), self._paths.dropped.open("ab") as file:
                    file.write(data)
            return None

        with writing(path):
            filter_lines(path, self._paths.folder / (path.name + ".tmp"), verdict)

    def _judge(self, data: bytes, record: dict[str, Any] | None, state: int) -> int | str:
        """The position of the line that a record is kept for, or why it is cut."""
        if record is None or (record["error"] is None) != (state == DONE):
            return "broken" if data.endswith(b"\n") else "torn"
        number = record["error"]["line"] if state == FAILED else None
        position = self._position(
            record["custom_id"], number, record["id"].removeprefix(output_records.ID_PREFIX)
        )
        if position is None:
            known = record["custom_id"] is not None and self._index.find(record["custom_id"]) is not None
            return "changed" if known else "gone"
        if self._index.state[position] != TODO:
            return "twice"
        if state == FAILED and position < self._retry:
            return "retried"
        claimed, check, _ = _CLAIM.unpack_from(self._claims, position * _CLAIM.size)
        return "edited" if claimed == state and check != short_digest(data).hex().encode() else position

    def _keep(
        self, position: int, data: bytes, record: dict[str, Any], state: int
    ) -> tuple[bytes, JournalEntry]:
        """The record, with today's line number and a score by today's `eval`, and its journal entry."""
        row = self._index.row(position)
        _, _, wanted = _CLAIM.unpack_from(self._claims, position * _CLAIM.size)
        moved = state == FAILED and record["error"]["line"] != row.number
        if moved or wanted != row.eval.hex().encode():
            record = output_records.scored(record, self._index.load(position).line.eval)
            if moved:
                record["error"]["line"] = row.number
            data = output_records.dump(record)
        self._index.state[position] = state
        self.found.count(state, record)
        entry = JournalEntry(
            run=0,
            state="failed" if state == FAILED else "done",
            custom_id=record["custom_id"],
            line=row.number if state == FAILED else None,
            key=row.key.hex(),
            check=short_digest(data).hex(),
            eval=row.eval.hex(),
        )
        return data, entry
