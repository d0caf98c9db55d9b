"""Appends the records of finished lines to the outputs, and their entries to the journal.

All lines that finish in one turn of the event loop are written together. One call for each file writes first
the records, then their entries. Each call writes completely or not at all. So, after a kill, the journal
names no line that the outputs do not contain.

`commit` makes both durable, the outputs first. A power cut may leave entries without records; their lines run
again. `add` belongs to the event loop; the other methods may run in a thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from mlxrun.core.errors import JobError
from mlxrun.jobs.lines.job_file import BadLine
from mlxrun.jobs.lines.line_index import DONE, FAILED, IndexedLine, LineIndex
from mlxrun.jobs.lines.line_keys import digest_short
from mlxrun.jobs.records import output_records
from mlxrun.jobs.records.journal import JournalEntry, LineTiming, TimingFile, dump_entry, make_timing
from mlxrun.jobs.records.output_records import LineTokens
from mlxrun.jobs.records.run_paths import Appender, JobPaths, sort_lines, wrap_write_errors


class _FinishedLine(NamedTuple):
    """A line that is to be written. `state`: DONE or FAILED."""

    position: int
    state: int
    record: bytes
    entry: bytes
    timing: LineTiming


class OutputWriter:
    """Writes output, errors, journal and timings of one run. `clock`: the clock of `LineTimes`."""

    def __init__(
        self, paths: JobPaths, index: LineIndex, run: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._index = index
        self._run = run
        self._files = {DONE: Appender(paths.out), FAILED: Appender(paths.errors)}
        self._journal = Appender(paths.journal)
        self._timings = TimingFile(paths.timings)
        self._unwritten: list[_FinishedLine] = []
        self._problem: JobError | None = None  # why lines could not be written
        self._written = 0
        self._committed = 0
        self._lock = threading.Lock()
        self._write_lock = threading.Lock()

    @property
    def pending(self) -> int:
        """The number of records that are not durable yet."""
        return self._written + len(self._unwritten) - self._committed

    def add(self, indexed: IndexedLine, record: dict[str, Any], tokens: LineTokens) -> None:
        """Write the record of a finished line and its journal entry once this turn of the event loop is over.
        JobError if earlier lines could not be written."""
        if self._problem is not None:
            raise self._problem
        failed = record["error"] is not None
        data = output_records.dump_record(record)
        entry = JournalEntry(
            run=self._run,
            state="failed" if failed else "done",
            custom_id=indexed.line.custom_id,
            line=indexed.line.number if isinstance(indexed.line, BadLine) else None,
            key=indexed.key,
            check=digest_short(data).hex(),
            eval=self._index.get_row(indexed.position).eval.hex(),
            computed=tokens.computed,
            reused=tokens.reused,
        )
        counts = tokens.computed, tokens.reused, tokens.output
        timing = make_timing(self._run, indexed.key, failed, tokens.times, self._clock(), counts)
        if not self._unwritten:
            asyncio.get_running_loop().call_soon(self._flush_quietly)
        state = FAILED if failed else DONE
        self._unwritten.append(_FinishedLine(indexed.position, state, data, dump_entry(entry), timing))

    def _flush_quietly(self) -> None:
        """What fails is raised by the next `add`, `commit` or `close`."""
        with suppress(JobError):
            self.flush()

    def flush(self) -> None:
        """Write all lines that were added. JobError if that fails; these lines count as not finished."""
        with self._write_lock:  # `close` may run beside the event loop's last turn
            lines, self._unwritten = self._unwritten, []
            if self._problem is not None:
                raise self._problem
            try:
                self._write(lines)
            except JobError as error:
                self._problem = error
                raise
            for line in lines:
                self._index.state[line.position] = line.state
            self._written += len(lines)

    def _write(self, lines: Sequence[_FinishedLine]) -> None:
        for state, file in self._files.items():
            if data := b"".join(line.record for line in lines if line.state == state):
                file.append(data)
        if lines:
            self._journal.append(b"".join(line.entry for line in lines))
            self._timings.add([line.timing for line in lines])

    def commit(self) -> None:
        """Make all records so far durable, then their journal entries. JobError if lines could not be
        written."""
        with self._lock:
            written = self._written  # what is written from here on waits for the next commit
            if self._problem is not None:
                raise self._problem
            if written == self._committed:
                return
            for file in (*self._files.values(), self._journal):
                file.sync()
            self._committed = written

    def close(self) -> None:
        """Write and commit the rest."""
        try:
            self.flush()
            self.commit()
        finally:
            self._timings.close()
            for file in (*self._files.values(), self._journal):
                file.close()


def sort_outputs(paths: JobPaths, index: LineIndex) -> None:
    """Sort output and errors by the order of the job (`batch.order: input`), once all lines are finished.
    Until then they are in order of completion, so that a kill loses no finished line."""

    def find_position(data: bytes) -> int:
        record = output_records.parse_record(data)
        assert record is not None
        bad = index.find_bad(record["error"]["line"]) if record["error"] else None
        found = index.find(record["custom_id"]) if bad is None else bad
        assert found is not None
        return found

    for path in (paths.out, paths.errors):
        with wrap_write_errors(path):
            sort_lines(path, paths.folder / (path.name + ".tmp"), find_position, len(index))
