"""The index of a job file: about 60 bytes for each line, however long the line is.

`scan` reads the file once and computes digests, line keys, bad lines and duplicates. `load` reads one line
again. Two custom_ids are the same if 64 bits of their hashes are.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mlxrun.core.errors import JobError
from mlxrun.jobs.lines.job_file import NO_SCORERS, BadLine, JobLine, RawLine, open_job, parse_line, read_lines
from mlxrun.jobs.lines.line_keys import KEY_BYTES, SHORT_BYTES, LineKeys, digest_eval
from mlxrun.jobs.lines.lookahead import hash_prefix
from mlxrun.jobs.scoring.eval_spec import EvalReader

TODO, DONE, FAILED = 0, 1, 2
_ROW = struct.Struct(f"<IQ?Q{KEY_BYTES}s{SHORT_BYTES}sH")
_BAD_OFFSET = 12  # of the flag in a row


@dataclass(frozen=True, slots=True)
class IndexedLine:
    """One loaded line: its position in the index, the key of its answer, and its content."""

    position: int
    key: str
    line: JobLine | BadLine


class IndexRow(NamedTuple):
    """The index's record of one line. `bad`: `load` returns a BadLine; `eval`: digest of what its answer is
    compared with; `group`: lines of one group run together."""

    number: int
    offset: int
    bad: bool
    prefix_hash: int
    key: bytes
    eval: bytes
    group: int = 0

    @property
    def grouped_prefix(self) -> int:
        """The hash of the prefix, which no lines of different groups share."""
        return self.prefix_hash ^ self.group << 48


class LineIndex:
    """All lines of one job file by position (from 0, without empty lines). `url`: the only URL that lines may
    have, None for any; `evals`: reads their `eval`; `find_group`: finds the group of a line, below 65536."""

    def __init__(
        self,
        path: Path,
        keys: LineKeys,
        url: str | None = None,
        evals: EvalReader = NO_SCORERS,
        find_group: Callable[[JobLine], int] = lambda line: 0,
    ) -> None:
        self.path = path
        self.sha256 = ""
        self.state = bytearray()
        self._url = url
        self._evals = evals
        self._find_group = find_group
        self._groups: set[int] = set()
        self._keys = keys
        self._rows = bytearray()
        self._hashes: Any = array("q")  # of custom_ids; sorted after the scan
        self._positions: Any = None  # of the lines with these hashes
        self._file = open_job(path)

    def __len__(self) -> int:
        return len(self.state)

    def close(self) -> None:
        self._file.close()

    def scan(self, is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Read the whole file. Once `is_stopped()`, return early with an unusable index. JobError if there
        are no lines."""
        import numpy as np

        digest = hashlib.sha256()
        for raw in read_lines(self._file, watch=digest.update):
            self._add(raw)
            if is_stopped():
                return
        self.sha256 = digest.hexdigest()
        if not len(self):
            raise JobError(f"{self.path}: the job has no lines")
        hashes = np.asarray(self._hashes)
        self._positions = np.argsort(hashes, kind="stable")  # of equal hashes the first line comes first
        self._hashes = hashes[self._positions]
        for repeated in self._positions[1:][self._hashes[1:] == self._hashes[:-1]]:
            self._rows[int(repeated) * _ROW.size + _BAD_OFFSET] = True

    def load(self, position: int) -> IndexedLine:
        """Read one line again. JobError if it, or an image that it names, has changed since the scan."""
        row = self.get_row(position)
        raw = next(read_lines(self._file, row.number, row.offset), RawLine(row.number, row.offset, b""))
        line, key = self._parse(raw)
        if key != row.key:
            what = "the line, or an image it names, changed while the job was running"
            raise JobError(f"{self.path}:{row.number}: {what}; run the job again")
        if row.bad and isinstance(line, JobLine):
            first = self.get_row(self._positions[self._hashes.searchsorted(hash(line.custom_id))]).number
            reason = f"{line.id_key} {line.custom_id!r} is already used by line {first}"
            line = BadLine(row.number, line.custom_id, reason, line.id_key, line.eval, line.id_key)
        return IndexedLine(position, key.hex(), line)

    def get_row(self, position: int) -> IndexRow:
        """Return the index's record of one line."""
        return IndexRow._make(_ROW.unpack_from(self._rows, int(position) * _ROW.size))

    def get_size(self, position: int) -> int:
        """Return the bytes of one line; 0 for the last line, whose end is not stored."""
        if position + 1 >= len(self):
            return 0
        return self.get_row(position + 1).offset - self.get_row(position).offset

    def iterate_todo(self, end: int) -> Iterator[int]:
        """Yield the positions before `end` of lines to run, one group after the other."""
        for group in sorted(self._groups):
            for position in range(end):
                if self.state[position] == TODO and self.get_row(position).group == group:
                    yield position

    def list_todo_keys(self) -> Iterator[str]:
        """Yield the keys, in hex, of the lines to run."""
        return (self.get_row(at).key.hex() for at, state in enumerate(self.state) if state == TODO)

    def find(self, custom_id: str) -> int | None:
        """Return the position of the first line with this custom_id."""
        at = self._hashes.searchsorted(hash(custom_id))
        found = at < len(self) and self._hashes[at] == hash(custom_id)
        return int(self._positions[at]) if found else None

    def find_bad(self, number: int) -> int | None:
        """Return the position of line `number` if it is a bad line."""
        position = bisect_left(range(len(self)), number, key=lambda at: self.get_row(at).number)
        if position < len(self) and (row := self.get_row(position)).bad and row.number == number:
            return position
        return None

    def _parse(self, raw: RawLine) -> tuple[JobLine | BadLine, bytes]:
        line = parse_line(raw, self._url, self._evals)
        if isinstance(line, BadLine):
            return line, self._keys.compute_bad_key(raw.data, line.reason)
        return line, self._keys.compute_key(line)

    def _add(self, raw: RawLine) -> None:
        line, key = self._parse(raw)
        bad, name, prefix, group = True, hash(("bad", raw.number)), 0, 0
        if isinstance(line, JobLine):
            bad, name, prefix, group = False, hash(line.custom_id), hash_prefix(line), self._find_group(line)
        self._groups.add(group)
        self._hashes.append(name)
        self._rows += _ROW.pack(raw.number, raw.offset, bad, prefix, key, digest_eval(line.eval), group)
        self.state.append(TODO)
