"""journal.jsonl lists the finished lines, each written right after its record; timings.jsonl has their times.

The journal's first line has the format and the settings digest; each further line is an entry for one
finished line. `check` is a digest of the record's bytes, so an edited or damaged record is detected. A broken
entry is skipped and reported; its record is checked by itself. Another format is refused.

timings.jsonl has the times at which each line began, got its first token and was finished, for reports. It is
appended to and never rewritten, so it has the lines of all runs. A damaged entry is skipped. If the file
cannot be written, nothing else is lost: answers and journal do not depend on it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from mlxrun.core.errors import JobError
from mlxrun.core.text_files import open_regular
from mlxrun.jobs.records.run_paths import Appender

log = logging.getLogger(__name__)
FORMAT = 1
MOST_PROBLEMS = 20
_MOST = 1e15  # seconds or tokens of an entry that is not damaged
_TYPES = (int, str, str | None, int | None, str, str, str, int, int)


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One finished line. `line`: the line number of a bad line, which may have no usable custom_id;
    `computed`, `reused`: prompt tokens."""

    run: int
    state: str  # done or failed
    custom_id: str | None
    line: int | None
    key: str
    check: str
    eval: str
    computed: int = 0
    reused: int = 0


class Journal:
    """An existing journal. Once `read_entries` has ended, `problems` names the entries that were skipped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.settings: str | None = None
        self.problems: list[str] = []

    def read_entries(self) -> Iterator[JournalEntry]:
        """Yield all valid entries in order; a later entry of the same line replaces an earlier one. JobError
        if the file cannot be read or has another format."""
        if not self.path.exists():
            return
        try:
            file = open_regular(self.path)
        except OSError as error:
            raise JobError(f"{self.path}: cannot be read: {error.strerror}; --fresh starts over") from error
        with file:
            for number, data in enumerate(file, 1):
                try:
                    if not data.endswith(b"\n"):
                        return  # a kill interrupted its writing
                    if number == 1:
                        self.settings = self._parse_head(data)
                    else:
                        yield parse_entry(data)
                except ValueError as error:
                    if len(self.problems) < MOST_PROBLEMS:
                        self.problems.append(f"{self.path}:{number}: {error}")

    def _parse_head(self, data: bytes) -> str:
        head = _parse_json(data)
        if not isinstance(head, dict) or not head.keys() >= {"format", "settings"}:
            raise ValueError("not the head of a journal")
        if head["format"] != FORMAT:
            raise JobError(
                f"{self.path}:1: the journal has format {head['format']!r}, this mlxrun writes {FORMAT}; "
                "finish the job with the version that began it, or start over with --fresh"
            )
        return str(head["settings"])


def dump_line(value: dict[str, Any]) -> bytes:
    """Dump the first line of a journal, or an entry, as JSON."""
    try:
        return orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # a lone surrogate
        return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def dump_entry(entry: JournalEntry | LineTiming) -> bytes:
    """Dump an entry as a line of its file."""
    # asdict takes ten times as long.
    return dump_line({name: getattr(entry, name) for name in entry.__slots__})


def parse_entry(data: bytes) -> JournalEntry:
    """Parse an entry. ValueError if `data` is not what `dump_entry` writes."""
    value = _parse_json(data)
    names = JournalEntry.__slots__
    if not isinstance(value, dict) or tuple(value) != names:
        raise ValueError("these are not the keys of a journal entry")
    for name, kind in zip(names, _TYPES, strict=True):
        if not isinstance(value[name], kind) or isinstance(value[name], bool):
            raise ValueError(f"{name} has the wrong type")
    if value["state"] not in ("done", "failed"):
        raise ValueError("state is neither done nor failed")
    return JournalEntry(**value)


def _parse_json(data: bytes) -> Any:
    try:
        return json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError("not JSON") from error


@dataclass(slots=True)
class LineTimes:
    """How far one line got, in seconds of the job's clock; None: not yet. `tries`: how often it was sent to
    the engine; `computed`: when its first prompt tokens were computed; `answered`: when its first output
    token came."""

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
    """An entry of timings.jsonl. `started`: seconds since 1970. `waited`, `first` and `took`: seconds from
    the start until the first prompt tokens were computed, the first output token came and the line was
    finished. `computed`, `reused`: prompt tokens; `output`: output tokens of this run, of all tries
    together."""

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
        """Append entries. After a failure no more are written."""
        if self._file is None:
            return
        try:
            self._file.append(b"".join(map(dump_entry, timings)))
        except JobError as error:
            log.warning("%s; reports will lack the times of the lines from here on", error)
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_timings(path: Path) -> Iterator[LineTiming]:
    """Yield all whole entries in the order in which lines were finished; none if there is no file."""
    try:
        file = open_regular(path)
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
    maybe = ("waited", "first")
    numbers = [each for key, each in value.items() if key != "key" and (each is not None or key not in maybe)]
    if not all(isinstance(each, int | float) and abs(each) <= _MOST for each in numbers) or timing.took < 0:
        raise TypeError("times and tokens are numbers")
    if not isinstance(value["key"], str):
        raise TypeError("a key is a text")
    return timing


def make_timing(
    run: int, key: str, failed: bool, times: LineTimes, now: float, tokens: tuple[int, int, int]
) -> LineTiming:
    """Make the entry of a line that is finished `now`, by the job's clock. `tokens`: computed, reused,
    output."""

    def measure(at: float | None) -> float | None:
        return None if at is None else round(at - times.started, 3)

    took = round(now - times.started, 3)
    started = round(time.time() - took, 3)
    waits = measure(times.computed), measure(times.answered)
    return LineTiming(run, key, failed, started, *waits, took, *tokens, times.tries)
