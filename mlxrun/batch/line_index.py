"""What is kept of every line of a job while it runs: about 180 bytes, whatever the line holds.

`scan` reads the file once: digest, line keys, bad lines, duplicates. `load` reads one line again. The two
agree, or JobError says that the file changed. A custom_id is recognised by 64 bits of its hash.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mlxrun.batch.job_file import BadLine, JobLine, RawLine, open_job, parse_line, read_lines
from mlxrun.batch.line_keys import KEY_BYTES, SHORT_BYTES, LineKeys, eval_digest
from mlxrun.batch.lookahead import likeness
from mlxrun.errors import JobError

TODO, DONE, FAILED = 0, 1, 2
_LINE, _BAD, _TWICE = 0, 1, 2
_ROW = struct.Struct(f"<IQBQ{KEY_BYTES}s{SHORT_BYTES}s")


@dataclass(frozen=True, slots=True)
class Entry:
    """One line, loaded: what it asks for, and under which key its answer is stored."""

    index: int
    key: str
    line: JobLine | BadLine


class IndexRow(NamedTuple):
    """What is kept of one line. `eval`: digest of what its answer is compared with."""

    number: int
    offset: int
    kind: int
    likeness: int
    key: bytes
    eval: bytes


class Index:
    """All lines of one job file by position (0-based, empty lines not counted). `url`: the only one that
    lines may have, None for any."""

    def __init__(self, path: Path, keys: LineKeys, url: str | None = None) -> None:
        self.path = path
        self.sha256 = ""
        self.state = bytearray()
        self._url = url
        self._keys = keys
        self._rows = bytearray()
        self._positions: dict[int, int] = {}  # by hash of the custom_id, or of a bad line's number
        self._file = open_job(path)

    def __len__(self) -> int:
        return len(self.state)

    def close(self) -> None:
        self._file.close()

    def scan(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Read the whole file; returns early, with part of it, once `stopped()`."""
        digest = hashlib.sha256()
        for raw in read_lines(self._file, tap=digest.update):
            self._add(raw)
            if stopped():
                return
        self.sha256 = digest.hexdigest()
        if not len(self):
            raise JobError(f"{self.path}: the job has no lines")

    def load(self, position: int) -> Entry:
        """Read one line again."""
        row = self.row(position)
        raw = next(read_lines(self._file, row.number, row.offset), RawLine(row.number, row.offset, b""))
        line, key = self._parse(raw)
        if key != row.key:
            what = "the line, or an image it names, changed while the job was running"
            raise JobError(f"{self.path}:{row.number}: {what}; run the job again")
        if row.kind == _TWICE and isinstance(line, JobLine):
            first = self.row(self._positions[hash(line.custom_id)]).number
            reason = f"custom_id {line.custom_id!r} is already used by line {first}"
            line = BadLine(row.number, line.custom_id, reason, "custom_id", line.eval)
        return Entry(position, key.hex(), line)

    def row(self, position: int) -> IndexRow:
        """What is kept of one line."""
        return IndexRow._make(_ROW.unpack_from(self._rows, position * _ROW.size))

    def likeness(self, position: int) -> int:
        """What the line begins with, as `order` sees it."""
        return self.row(position).likeness

    def is_bad(self, position: int) -> bool:
        """Whether `load` gives a BadLine there."""
        return self.row(position).kind != _LINE

    def find(self, custom_id: str) -> int | None:
        """The position of the line that has this custom_id first."""
        return self._positions.get(hash(custom_id))

    def find_bad(self, number: int) -> int | None:
        """The position of line `number` if it is a bad one."""
        return self._positions.get(hash(("bad", number)))

    def _parse(self, raw: RawLine) -> tuple[JobLine | BadLine, bytes]:
        line = parse_line(raw)
        if isinstance(line, JobLine) and self._url not in (None, line.url):
            reason = f"url is {line.url}, but these lines are for {self._url}"
            line = BadLine(line.number, line.custom_id, reason, "url", line.eval)
        if isinstance(line, BadLine):
            return line, self._keys.bad_key(raw.data, line.reason)
        return line, self._keys.key(line)

    def _add(self, raw: RawLine) -> None:
        line, key = self._parse(raw)
        kind, like, name = _BAD, 0, hash(("bad", raw.number))
        if isinstance(line, JobLine):
            twice = self.find(line.custom_id) is not None
            kind, like = _TWICE if twice else _LINE, likeness(line)
            name = name if twice else hash(line.custom_id)
        self._positions[name] = len(self)
        self._rows += _ROW.pack(raw.number, raw.offset, kind, like, key, eval_digest(line.eval))
        self.state.append(TODO)
