"""What is kept of every line of a job while it runs: about 70 bytes, whatever the line holds.

`scan` reads the file once: digest, line keys, bad lines, duplicates. `load` reads one line again. The two
agree, or JobError says that the file changed. A duplicate custom_id is told by 64 bits of its digest.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mlxrun.batch.job_file import BadLine, JobLine, RawLine, open_job, parse_line, read_lines
from mlxrun.batch.line_keys import KEY_BYTES, SHORT_BYTES, LineKeys, eval_digest
from mlxrun.batch.lookahead import likeness
from mlxrun.errors import JobError

TODO, DONE, FAILED = 0, 1, 2
_LINE, _BAD, _TWICE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Entry:
    """One line, loaded: what it asks for, and under which key its answer is stored."""

    index: int
    key: str
    line: JobLine | BadLine


class Index:
    """All lines of one job file by position (0-based, empty lines not counted). `url`: the only one that
    lines may have, None for any."""

    def __init__(self, path: Path, keys: LineKeys, url: str | None = None) -> None:
        self.path = path
        self._url = url
        self.sha256 = ""
        self.state = bytearray()
        self._evals = bytearray()
        self._keys = keys
        self._numbers = array("I")
        self._offsets = array("Q")
        self._kinds = bytearray()
        self._line_keys = bytearray()
        self._ids = array("Q")
        self._likeness = array("Q")
        self._slots = array("I", bytes(4 * 1024))  # open addressing: position + 1 in _ids, 0 free
        self._file = open_job(path)

    def __len__(self) -> int:
        return len(self._numbers)

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
        number, offset = self._numbers[position], self._offsets[position]
        raw = next(read_lines(self._file, number, offset), RawLine(number, offset, b""))
        line, key = self._parse(raw)
        if key != self.key(position):
            what = "the line, or an image it names, changed while the job was running"
            raise JobError(f"{self.path}:{number}: {what}; run the job again")
        if self._kinds[position] == _TWICE and isinstance(line, JobLine):
            first = self._numbers[self._find(_hash_id(line.custom_id))]
            reason = f"custom_id {line.custom_id!r} is already used by line {first}"
            line = BadLine(number, line.custom_id, reason, "custom_id", line.eval)
        return Entry(position, key.hex(), line)

    def key(self, position: int) -> bytes:
        return bytes(self._line_keys[position * KEY_BYTES : (position + 1) * KEY_BYTES])

    def eval(self, position: int) -> bytes:
        """Digest of what the line's answer is compared with."""
        return bytes(self._evals[position * SHORT_BYTES : (position + 1) * SHORT_BYTES])

    def likeness(self, position: int) -> int:
        """What the line begins with, as `order` sees it."""
        return self._likeness[position]

    def number(self, position: int) -> int:
        return self._numbers[position]

    def is_bad(self, position: int) -> bool:
        """Whether `load` gives a BadLine there."""
        return self._kinds[position] != _LINE

    def find(self, custom_id: str) -> int | None:
        """The position of the line that has this custom_id first."""
        found = self._find(_hash_id(custom_id))
        return found if found >= 0 else None

    def find_bad(self, number: int) -> int | None:
        """The position of line `number` if it is a bad one."""
        found = self._find(_hash_bad(number))
        return found if found >= 0 else None

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
        kind, hashed = _BAD, _hash_bad(raw.number)
        if isinstance(line, JobLine):
            kind, hashed = _LINE, _hash_id(line.custom_id)
            if self._find(hashed) >= 0:
                kind, hashed = _TWICE, _hash_bad(raw.number)
        self._numbers.append(raw.number)
        self._offsets.append(raw.offset)
        self._kinds.append(kind)
        self._line_keys += key
        self._ids.append(hashed)
        self._likeness.append(likeness(line) if isinstance(line, JobLine) else 0)
        self._evals += eval_digest(line.eval)
        self.state.append(TODO)
        if 2 * len(self) > len(self._slots):
            self._grow()
        else:
            self._place(len(self) - 1)

    def _find(self, hashed: int) -> int:
        mask = len(self._slots) - 1
        slot = hashed & mask
        while position := self._slots[slot]:
            if self._ids[position - 1] == hashed:
                return position - 1
            slot = (slot + 1) & mask
        return -1

    def _place(self, position: int) -> None:
        mask = len(self._slots) - 1
        slot = self._ids[position] & mask
        while self._slots[slot]:
            slot = (slot + 1) & mask
        self._slots[slot] = position + 1

    def _grow(self) -> None:
        self._slots = array("I", bytes(8 * len(self._slots)))
        for position in range(len(self)):
            self._place(position)


def _hash_id(custom_id: str) -> int:
    return _hash(custom_id.encode("utf-8", "surrogatepass"), b"line")


def _hash_bad(number: int) -> int:
    return _hash(str(number).encode(), b"bad line")


def _hash(data: bytes, kind: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=kind).digest(), "big")
