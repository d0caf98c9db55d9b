"""Reconciles output, errors and journal of earlier runs with the job file before a run starts.

A record is kept if its id contains the line's key and the digest in the journal fits. A complete record
without a journal entry is kept too: the journal is damaged, or the process was killed before writing the
entry. All others are discarded and their lines run again; discarded answers go to dropped.jsonl.

Output, errors and journal are replaced in this order, each once the new journal has its entries. After a kill
in between, the next start knows the records by the new journal, and scores them again.
"""

from __future__ import annotations

import itertools
import struct
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from mlxrun.core.durable_writes import sync_file
from mlxrun.core.errors import JobError
from mlxrun.core.text_files import open_regular
from mlxrun.jobs.lines.line_index import DONE, FAILED, TODO, LineIndex
from mlxrun.jobs.lines.line_keys import SHORT_BYTES, digest_short
from mlxrun.jobs.records import output_records
from mlxrun.jobs.records.journal import FORMAT, Journal, JournalEntry, dump_entry, dump_line
from mlxrun.jobs.records.run_paths import JobPaths, filter_lines, replace_file, wrap_write_errors
from mlxrun.jobs.scoring.score_groups import Scores

_REASONS = {
    "broken": "is not a record of this job",
    "torn": "was not written to its end",
    "gone": "has no line in the job file any more",
    "changed": "is of another request: the line has changed since, or the model or the settings",
    "edited": "was edited or damaged",
    "twice": "is the second record of its line",
}
_STATES = {"done": DONE, "failed": FAILED}
_CLAIM_FORMAT = struct.Struct(f"<B{SHORT_BYTES}s{SHORT_BYTES}sI")  # state, digests of record and `eval`, run
_TEMP = "journal.jsonl.tmp"
_NO_CLAIM = 0  # as a state
_MOST_RUNS = 2**32 - 1  # as a claim has room for
_EXPLAINED = 4  # flag of a state: a message says why the line runs again


@dataclass(slots=True)
class RunTotals:
    """Totals of one run: prompt tokens computed and reused, lines done and failed."""

    computed: int = 0
    reused: int = 0
    done: int = 0
    failed: int = 0


@dataclass(slots=True)
class JobState:
    """How far earlier runs got. `discarded`: records that were not kept, by reason; `unverified`: kept
    records without a digest in the journal; `dropped`: records that went to dropped.jsonl; `lines`: kept
    records by the run that wrote them, 0 for an unknown run."""

    done: int = 0
    failed: int = 0
    prompt: int = 0
    output: int = 0
    scores: Scores = field(default_factory=Scores)
    discarded: Counter[str] = field(default_factory=Counter)
    unverified: int = 0
    dropped: int = 0
    problems: list[str] = field(default_factory=list)
    runs: dict[int, RunTotals] = field(default_factory=dict)
    lines: Counter[int] = field(default_factory=Counter)
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
    """Call `read_journal`, then `rewrite`. Both block, so call them off the event loop. `retry`: failed lines
    before this position run again; `check_stop`: raises if the run is to end, as scoring an answer again may
    take a second; `score_all`: score all answers again, also those with the same `eval`."""

    def __init__(
        self,
        index: LineIndex,
        paths: JobPaths,
        *,
        retry: int = 0,
        check_stop: Callable[[], None] = lambda: None,
        score_all: bool = False,
    ) -> None:
        self._index = index
        self._paths = paths
        self._retry = retry
        self._check_stop = check_stop
        self._score_all = score_all
        self._claims = bytearray(_CLAIM_FORMAT.size * len(index))  # what the journal claims of each line
        self._pending: set[tuple[str, str]] = set()  # keys and digests of records that a killed start wrote
        self.state = JobState()

    def read_journal(self) -> JobState:
        """Read what the journal claims. Nothing is written. JobError if it cannot be read or has another
        format."""
        known = Journal(self._paths.journal)
        for path in self._list_pending():
            self._pending |= {(each.key, each.check) for each in Journal(path).read_entries()}
        for entry in known.read_entries():
            total = self.state.runs.setdefault(entry.run, RunTotals())
            total.done += entry.state == "done"
            total.failed += entry.state == "failed"
            total.computed += entry.computed
            total.reused += entry.reused
            position = self._find_position(entry.custom_id, entry.line, entry.key)
            if position is not None:
                if entry.state == "failed" and self._get_claim(position)[0] == DONE:
                    continue  # of a line with the same id, which is no longer in the job
                at, digests = position * _CLAIM_FORMAT.size, map(_parse_digest, (entry.check, entry.eval))
                run = max(0, min(entry.run, _MOST_RUNS))
                _CLAIM_FORMAT.pack_into(self._claims, at, _STATES[entry.state], *digests, run)
        self.state.problems = known.problems
        self.state.old_settings = known.settings
        return self.state

    def count_claims(self, end: int) -> tuple[Counter[int], int]:
        """Count the finished lines that the journal claims, by run, and how many of the first `end` lines are
        left."""
        claims = [self._get_claim(at) for at in range(len(self._index))]
        left = sum(
            state == _NO_CLAIM or (state == FAILED and at < self._retry)
            for at, (state, *_) in enumerate(claims[:end])
        )
        return Counter(run for state, *_, run in claims if state != _NO_CLAIM), left

    def rewrite(self, settings: str) -> JobState:
        """Discard records that do not fit, set the index's states, and rewrite the journal. JobError if this
        job did not write the output."""
        paths = self._paths
        has_journal = paths.journal.exists()
        names = (f"{_TEMP}{number or ''}" for number in itertools.count())
        temp = next(paths.folder / name for name in names if not (paths.folder / name).exists())
        with wrap_write_errors(temp), temp.open("wb") as new:
            new.write(dump_line({"format": FORMAT, "settings": settings}))
            self._filter(paths.out, DONE, has_journal, new)
            self._filter(paths.errors, FAILED, has_journal, new)
            replace_file(new, temp, paths.journal)
            for path in self._list_pending():
                path.unlink()
            if paths.errors.exists() and not paths.errors.stat().st_size:
                paths.errors.unlink()
        todo = (at for at in range(len(self._index)) if self._index.state[at] == TODO)
        self.state.discarded["lost"] = sum(self._get_claim(at)[0] in (DONE, FAILED) for at in todo)
        self.state.discarded += Counter()  # without counts of 0
        return self.state

    def check(self) -> int:
        """Check all records, and return their number; nothing is written. JobError names the first record
        that `rewrite` would discard, that has no digest in a journal, or that the journal has and the outputs
        lack."""
        for path, state in ((self._paths.out, DONE), (self._paths.errors, FAILED)):
            with open_regular(path) if path.exists() else nullcontext(()) as lines:
                for number, data in enumerate(lines, 1):
                    record = output_records.parse_record(data)
                    position = self._classify(data, record, state)
                    if isinstance(position, str):
                        name = "this" if record is None else f"the record of line {record['custom_id']!r}"
                        raise JobError(f"{path}:{number}: {name} {_REASONS.get(position, position)}")
                    if record is not None and not self._has_digest(position, data, record, state):
                        raise JobError(
                            f"{path}:{number}: the record of line {record['custom_id']!r} has no digest in "
                            f"{self._paths.journal.name}, so that it cannot be seen whether it was edited"
                        )
                    self._index.state[position] = state
        left = [at for at in range(len(self._index)) if self._index.state[at] == TODO]
        lost = [at for at in left if self._get_claim(at)[0] in (DONE, FAILED)]
        self._index.state[:] = bytes(len(self._index))
        if lost:
            line, state = self._index.load(lost[0]).line, self._get_claim(lost[0])[0]
            path = self._paths.out if state == DONE else self._paths.errors
            name = f"line {line.number}" if line.custom_id is None else f"line {line.custom_id!r}"
            more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
            raise JobError(f"{path}: the record of {name} is missing, which the journal has{more}")
        return len(self._index) - len(left)

    def _list_pending(self) -> list[Path]:
        """New journals of starts that were killed: the records that such a start replaced fit these."""
        return sorted(self._paths.folder.glob(f"{_TEMP}*"))

    def _get_claim(self, position: int) -> tuple[int, bytes, bytes, int]:
        """What the journal claims of a line: its state, the digests of its record and of its `eval`, its
        run."""
        state, check, wanted, run = _CLAIM_FORMAT.unpack_from(self._claims, position * _CLAIM_FORMAT.size)
        return state, check, wanted, run

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
            if state == DONE:  # later the output is replaced, and the journal has to follow
                self._check_stop()
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
                new.write(dump_entry(entry))
                return kept
            self.state.discarded[str(position)] += 1
            if state == DONE and complete:
                with wrap_write_errors(self._paths.dropped), self._paths.dropped.open("ab") as file:
                    file.write(data)
                self.state.dropped += 1
            return None

        with wrap_write_errors(path):
            temp = self._paths.folder / (path.name + ".tmp")
            filter_lines(path, temp, rewrite, partial(sync_file, new))

    def _classify(self, data: bytes, record: dict[str, Any] | None, state: int) -> int | str:
        """The position of the line to which a record belongs, or the reason why it is discarded."""
        if record is None or (record["error"] is None) != (state == DONE):
            return "broken" if data.endswith(b"\n") else "torn"
        number = record["error"]["line"] if state == FAILED else None
        key = record["id"].removeprefix(output_records.ID_PREFIX)
        position = self._find_position(record["custom_id"], number, key)
        if position is None:
            known = None if record["custom_id"] is None else self._index.find(record["custom_id"])
            if known is None:
                return "gone"
            return "changed" if self._get_claim(known)[0] == _NO_CLAIM else self._explain(known, "edited")
        if self._index.state[position] != TODO:
            return "twice"
        if output_records.is_of_bad_line(record) and not self._index.get_row(position).bad:
            return self._explain(position, "gone")  # a line with the same id and content, which was removed
        if state == FAILED and position < self._retry:
            return self._explain(position, "retried")
        claimed, check, *_ = self._get_claim(position)
        digest = digest_short(data)
        if claimed & ~_EXPLAINED == state and check != digest and (key, digest.hex()) not in self._pending:
            return self._explain(position, "edited")
        return position

    def _has_digest(self, position: int, data: bytes, record: dict[str, Any], state: int) -> bool:
        """Whether the journal, or that of a killed start, has a digest of the record of a line."""
        key = record["id"].removeprefix(output_records.ID_PREFIX)
        is_claimed = self._get_claim(position)[0] & ~_EXPLAINED == state
        return is_claimed or (key, digest_short(data).hex()) in self._pending

    def _explain(self, position: int, reason: str) -> str:
        """The reason why a record is discarded; its line then does not count as one whose record is lost."""
        self._claims[position * _CLAIM_FORMAT.size] |= _EXPLAINED
        return reason

    def _keep_record(
        self, position: int, data: bytes, record: dict[str, Any], state: int
    ) -> tuple[bytes, JournalEntry]:
        """The record, updated to the line's present number and `eval`, and its journal entry."""
        row = self._index.get_row(position)
        claimed, check, wanted, run = self._get_claim(position)
        if claimed & ~_EXPLAINED != state:
            self.state.unverified, run = self.state.unverified + 1, 0
        self.state.lines[run] += 1
        line = None
        moved = state == FAILED and record["error"]["line"] != row.number
        if moved or self._score_all or wanted != row.eval or check != digest_short(data):
            line = self._index.load(position).line
            record = output_records.add_score(record, line)
            if moved:
                record["error"]["line"] = row.number
            data = output_records.dump_record(record)
        self._index.state[position] = state
        self.state.count(state, record)
        if line is not None:
            output_records.warn_unscored(record, line, self._index.path, self.state.scores)
        entry = JournalEntry(
            run=run,
            state="failed" if state == FAILED else "done",
            custom_id=record["custom_id"],
            line=row.number if state == FAILED else None,
            key=row.key.hex(),
            check=digest_short(data).hex(),
            eval=row.eval.hex(),
        )
        return data, entry


def _parse_digest(text: str) -> bytes:
    """A digest of the journal; of what is none, bytes that are equal to no digest."""
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        return b""
    return digest if len(digest) == SHORT_BYTES else b""
