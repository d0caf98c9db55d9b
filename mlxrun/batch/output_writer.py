"""Appends the records of finished lines to the outputs, and their entries to the journal.

`add` writes a record and then its entry, each completely or not at all: after a kill, the journal names no
line that the outputs do not contain, and has the digest of each record. `commit` makes them durable, the
outputs first; a power cut may leave entries without records, whose lines run again. `add` and `close` belong
to the event loop; `commit` may run in a thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from mlxrun.batch import output_records
from mlxrun.batch.job_file import BadLine
from mlxrun.batch.journal import JournalEntry
from mlxrun.batch.line_files import Appender, sort_lines
from mlxrun.batch.line_index import DONE, FAILED, IndexedLine, LineIndex
from mlxrun.batch.line_keys import digest_short
from mlxrun.batch.line_times import TimingFile, make_timing
from mlxrun.batch.output_records import LineTokens
from mlxrun.batch.run_paths import JobPaths, wrap_write_errors


class OutputWriter:
    """Writes output, errors, journal and timings of one run; `clock`: the one of `LineTimes`."""

    def __init__(
        self, paths: JobPaths, index: LineIndex, run: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._index = index
        self._run = run
        self._files = {DONE: Appender(paths.out), FAILED: Appender(paths.errors)}
        self._journal = Appender(paths.journal)
        self._timings = TimingFile(paths.timings)
        self._added = 0
        self._committed = 0
        self._lock = threading.Lock()

    @property
    def pending(self) -> int:
        """The number of records that are not durable yet."""
        return self._added - self._committed

    def add(self, indexed: IndexedLine, record: dict[str, Any], tokens: LineTokens) -> None:
        """Write the record of a finished line, and its journal entry."""
        failed = record["error"] is not None
        data = output_records.dump_record(record)
        self._files[FAILED if failed else DONE].append(data)
        self._index.state[indexed.position] = FAILED if failed else DONE
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
        self._journal.append(entry.dump())
        counts = tokens.computed, tokens.reused, tokens.output
        self._timings.add(make_timing(self._run, indexed.key, failed, tokens.times, self._clock(), counts))
        self._added += 1

    def commit(self) -> None:
        """Make all records so far durable, and then their journal entries."""
        with self._lock:
            added = self._added  # what is added from here on waits for the next commit
            if added == self._committed:
                return
            for file in (*self._files.values(), self._journal):
                file.sync()
            self._committed = added

    def close(self) -> None:
        """Commit what is left."""
        try:
            self.commit()
        finally:
            self._timings.close()
            for file in (*self._files.values(), self._journal):
                file.close()


def sort_outputs(paths: JobPaths, index: LineIndex) -> None:
    """Sort output and errors by the order of the job (`batch.order: input`), once all lines are finished.

    Until then they are in order of completion: finished lines are written at once, so a kill loses none.
    """

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
