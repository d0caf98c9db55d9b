"""Appends records as lines finish, and tells the journal once they are safe.

`add` writes a record at once, as a whole or not at all. `commit` makes all records so far durable and only
then enters them into the journal: after any kill the journal claims no line that the outputs do not hold.
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
from mlxrun.batch.line_index import DONE, FAILED, Entry, Index
from mlxrun.batch.line_keys import short_digest
from mlxrun.batch.output_records import TokenWork
from mlxrun.batch.run_paths import Paths, writing


class Writer:
    """The outputs of one run."""

    def __init__(self, paths: Paths, index: Index, run: int) -> None:
        self._index = index
        self._run = run
        self._files = {DONE: Appender(paths.out), FAILED: Appender(paths.errors)}
        self._journal = Appender(paths.journal)
        self._pending: deque[JournalEntry] = deque()
        self._lock = threading.Lock()

    @property
    def pending(self) -> int:
        """Records that the journal does not know yet."""
        return len(self._pending)

    def add(self, entry: Entry, record: dict[str, Any], work: TokenWork) -> None:
        """Write the record of a finished line."""
        failed = record["error"] is not None
        data = output_records.dump(record)
        self._files[FAILED if failed else DONE].append(data)
        self._index.state[entry.index] = FAILED if failed else DONE
        self._pending.append(
            JournalEntry(
                run=self._run,
                state="failed" if failed else "done",
                custom_id=entry.line.custom_id,
                line=entry.line.number if isinstance(entry.line, BadLine) else None,
                key=entry.key,
                check=short_digest(data).hex(),
                eval=self._index.row(entry.index).eval.hex(),
                computed=work.computed,
                reused=work.reused,
            )
        )

    def commit(self) -> None:
        """Make all records so far durable, then enter them."""
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


def sort_outputs(paths: Paths, index: Index) -> None:
    """Put output and errors in the order of the job (`batch.order: input`), once all lines are finished.

    Until then they are in order of completion: nothing is held back, so nothing can be lost by a kill.
    """

    def place(data: bytes) -> int:
        record = output_records.parse(data)
        assert record is not None
        bad = index.find_bad(record["error"]["line"]) if record["error"] else None
        found = index.find(record["custom_id"]) if bad is None else bad
        assert found is not None
        return found

    for path in (paths.out, paths.errors):
        with writing(path):
            sort_lines(path, paths.folder / (path.name + ".tmp"), place, len(index))
