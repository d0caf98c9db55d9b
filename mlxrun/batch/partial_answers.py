"""answers.jsonl: what lines under way have answered so far, so that a killed job goes on in the middle.

Held in memory for the lines in flight alone, and appended by `write` without waiting for the disk: a kill
costs what came since. A file that is gone, torn, edited or cannot be written costs time, never an answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from mlxrun.batch.append_file import Appender
from mlxrun.batch.line_index import TODO, Index
from mlxrun.batch.partial_answer import Half, asked, collect
from mlxrun.batch.run_paths import replace
from mlxrun.errors import JobError
from mlxrun.scheduler.request import Request

log = logging.getLogger(__name__)
WRITE_EVERY = 1.0  # seconds
COMPACT_FROM = 1 << 20  # bytes; a smaller file may be as much garbage as it likes


class Answers:
    """The answers under way of one job. All methods belong to the event loop, but `read`.

    `keep`: False for `engine.reproducible`, where answers begin anew: tokens that are known are computed in
    other cuts than one by one, which changes the last digits of what follows.
    """

    def __init__(self, path: Path, *, keep: bool = True) -> None:
        self._file = Appender(path)
        self._keep = keep
        self._halves: dict[str, dict[int, Half]] = {}
        self._bytes: dict[str, int] = {}  # of the file, by line in flight
        self._size = 0  # of the file
        self._failed = False

    def __len__(self) -> int:
        """Lines that something is known of."""
        return len(self._halves)

    def read(self, index: Index) -> None:
        """Take in what an earlier run left of the lines that are still to do; the rest of it goes."""
        if not self._keep:
            return
        path = self._file.path
        try:
            with path.open("rb") as file:
                found = collect(file)
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("%s: cannot be read (%s); half answers begin anew", path, error.strerror)
            found = {}
        todo = (index.key(at).hex() for at in range(len(index)) if index.state[at] == TODO)
        self._halves = {key: found[key] for key in todo if key in found} if found else {}
        self._trying(self._compact)

    def half(self, key: str, choice: int, request: Request) -> Half:
        """What is known of this choice, which goes on from there; nothing if it was asked otherwise."""
        if not self._keep:
            return Half(asked(request))
        halves = self._halves.setdefault(key, {})
        known = halves.get(choice)
        if known is None or not known.fits(request):
            known = halves[choice] = Half(asked(request))
        return known

    def drop(self, key: str) -> None:
        """A line is over and its record is written."""
        self._halves.pop(key, None)
        self._bytes.pop(key, None)

    def write(self) -> None:
        """Append what came since the last time."""
        if self._size > COMPACT_FROM and 2 * sum(self._bytes.values()) < self._size:
            self._trying(self._compact)
        else:
            self._trying(self._append)

    def close(self) -> None:
        """Append what is left."""
        self.write()
        self._file.close()

    def remove(self) -> None:
        """The job is complete."""
        self._file.close()
        self._trying(self._unlink)

    def _unlink(self) -> bool:
        self._file.path.unlink(missing_ok=True)
        return True

    def _append(self) -> bool:
        news = [(key, half, half.news(key, choice)) for key, choice, half in self._all()]
        if not any(data for _, _, data in news):
            return False
        self._file.append(b"".join(data for _, _, data in news))
        self._count(news)
        return True

    def _compact(self) -> bool:
        """Write anew what is in flight; all else in the file is garbage."""
        whole = [(key, half, half.whole().news(key, choice)) for key, choice, half in self._all()]
        self._file.close()
        replace(self._file.path, b"".join(data for _, _, data in whole), durable=False)
        self._bytes.clear()
        self._size = 0
        self._count(whole)
        return True

    def _all(self) -> Iterator[tuple[str, int, Half]]:
        return (
            (key, choice, half) for key, halves in self._halves.items() for choice, half in halves.items()
        )

    def _count(self, written: list[tuple[str, Half, bytes]]) -> None:
        for key, half, data in written:
            half.keep()
            self._bytes[key] = self._bytes.get(key, 0) + len(data)
            self._size += len(data)

    def _trying(self, work: Callable[[], bool]) -> None:
        """What fails is tried again at the next `write`, and said once until `work` has written again."""
        try:
            self._failed = not work() and self._failed
        except (JobError, OSError) as error:
            if not self._failed:
                log.warning("%s: cannot be written (%s); half answers are not kept", self._file.path, error)
            self._failed = True
