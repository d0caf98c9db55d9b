"""Appends the records of finished lines to the outputs, and then to the journal.

`add` writes a record at once, completely or not at all. `commit` makes all records so far durable and only
then adds them to the journal: after any kill the journal names no line that the outputs do not contain.
`add` and `close` belong to the event loop; `commit` may run in a thread.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from mlxrun.batch import output_records
from mlxrun.batch.job_file import BadLine
from mlxrun.batch.journal import JournalEntry
from mlxrun.batch.line_files import Appender, sort_lines
from mlxrun.batch.line_index import DONE, FAILED, IndexedLine, LineIndex
from mlxrun.batch.line_keys import digest_short
from mlxrun.batch.output_records import LineTokens
from mlxrun.batch.run_paths import JobPaths, wrap_write_errors


class OutputWriter:
    """Writes output, errors and journal of one run."""

    def __init__(self, paths: JobPaths, index: LineIndex, run: int) -> None:
        self._index = index
        self._run = run
        self._files = {DONE: Appender(paths.out), FAILED: Appender(paths.errors)}
        self._journal = Appender(paths.journal)
        self._pending: deque[JournalEntry] = deque()
        self._lock = threading.Lock()

    @property
    def pending(self) -> int:
        """Records that are not in the journal yet."""
        return len(self._pending)

    def add(self, indexed: IndexedLine, record: dict[str, Any], tokens: LineTokens) -> None:
        """Write the record of a finished line."""
        failed = record["error"] is not None
        data = output_records.dump_record(record)
        self._files[FAILED if failed else DONE].append(data)
        self._index.state[indexed.position] = FAILED if failed else DONE
        self._pending.append(
            JournalEntry(
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
        )

    def commit(self) -> None:
        """Make all records so far durable, then add them to the journal."""
        with self._lock:
            count = len(self._pending)  # what is added from here on waits for the next commit
            if not count:
                return
            for file in self._files.values():
                file.sync()
            entries = [self._pending.popleft() for _ in range(count)]
            self._journal.append(b"".join(entry.dump() for entry in entries))
            self._journal.sync()

    def close(self) -> None:
        """Commit what is left."""
        try:
            self.commit()
        finally:
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
