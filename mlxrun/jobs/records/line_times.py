"""timings.jsonl: when each line began, had its first token and was finished; only reports read it.

It is appended to and never rewritten, so that it has the lines of all runs. A damaged entry is skipped, and a
file that cannot be written loses nothing else: answers and journal do not depend on it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson

from mlxrun.core.errors import JobError
from mlxrun.jobs.lines.line_files import Appender

log = logging.getLogger(__name__)


@dataclass(slots=True)
class LineTimes:
    """How far one line got, in seconds of the job's clock; None: not yet. `tries`: how often it was sent to
    the engine; `computed` and `answered`: its first prompt tokens and its first output token."""

    started: float = 0.0
    computed: float | None = None
    answered: float | None = None
    tries: int = 0

    def mark_progress(self, now: float, output: int) -> None:
        """Record an event of the engine that brought `output` tokens."""
        if self.computed is None:
            self.computed = now
        if output and self.answered is None:
            self.answered = now


@dataclass(frozen=True, slots=True)
class LineTiming:
    """An entry of the file. `started`: seconds since 1970; `waited`, `first` and `took`: seconds from there
    until the first prompt tokens were computed, the first output token came and the line was finished.
    `computed` and `reused`: prompt tokens, `output`: output tokens of this run, all tries together."""

    run: int
    key: str
    failed: bool
    started: float
    waited: float | None
    first: float | None
    took: float
    computed: int
    reused: int
    output: int
    tries: int


class TimingFile:
    """Appends the entries of one run."""

    def __init__(self, path: Path) -> None:
        self._file: Appender | None = Appender(path)

    def add(self, timings: Iterable[LineTiming]) -> None:
        """Append entries; once that has failed, no more are written."""
        if self._file is None:
            return
        try:
            self._file.append(b"".join(map(_dump_timing, timings)))
        except JobError as error:
            log.warning("%s; reports will lack the times of the lines from here on", error)
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _dump_timing(timing: LineTiming) -> bytes:
    fields = {name: getattr(timing, name) for name in timing.__slots__}
    return orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE)


def read_timings(path: Path) -> Iterator[LineTiming]:
    """All entries that are whole, in the order in which lines were finished; none if there is no file."""
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        for data in file:
            try:
                yield _parse_timing(json.loads(data))
            except (ValueError, TypeError, RecursionError):
                continue  # a kill interrupted its writing


def _parse_timing(value: object) -> LineTiming:
    """ValueError or TypeError if it is not what `add` writes."""
    if not isinstance(value, dict):
        raise TypeError("an entry is an object")
    timing = LineTiming(**value)
    numbers = (timing.run, timing.started, timing.took, timing.computed, timing.reused, timing.output)
    maybe = (each for each in (timing.waited, timing.first) if each is not None)
    if not all(isinstance(each, int | float) for each in (*numbers, *maybe)) or timing.took < 0:
        raise TypeError("times and tokens are numbers")
    return timing


def make_timing(
    run: int, key: str, failed: bool, times: LineTimes, now: float, tokens: tuple[int, int, int]
) -> LineTiming:
    """The entry of a line that is finished `now`, by the job's clock; `tokens`: computed, reused, output."""

    def measure(at: float | None) -> float | None:
        return None if at is None else round(at - times.started, 3)

    took = round(now - times.started, 3)
    started = round(time.time() - took, 3)
    waits = measure(times.computed), measure(times.answered)
    return LineTiming(run, key, failed, started, *waits, took, *tokens, times.tries)
