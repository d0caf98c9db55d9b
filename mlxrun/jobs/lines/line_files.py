"""Appends to, filters and sorts files of lines, in bounded memory.

Whatever the disk does, a file has its old content or the new one, never a mix.
"""

from __future__ import annotations

import json
import os
import shutil
from array import array
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from mlxrun.jobs.records.run_paths import sync_folder, wrap_write_errors


class Appender:
    """A file that is created at the first `append`. JobError if it cannot be written; a failed `append`
    leaves nothing in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None

    def append(self, data: bytes) -> None:
        """Append `data`, completely or not at all."""
        with wrap_write_errors(self.path):
            if self._handle is None:
                self._handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                sync_folder(self.path.parent)
            size = os.fstat(self._handle).st_size
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(self._handle, rest) :]
            except OSError:
                os.ftruncate(self._handle, size)  # no torn line stays behind a full disk
                raise

    def sync(self) -> None:
        """Make what was written durable."""
        if self._handle is not None:
            with wrap_write_errors(self.path):
                os.fsync(self._handle)

    def close(self) -> None:
        """Close the file; the next `append` opens it again."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def filter_lines(
    path: Path,
    temp: Path,
    rewrite: Callable[[bytes], bytes | None],
    before_replace: Callable[[], object] = lambda: None,
) -> None:
    """Replace each line of `path` by `rewrite(line)`; None removes it.

    The file is only replaced if a line changes, and `before_replace` is called right before; an incomplete
    last line that is removed is truncated in place.
    """
    if not path.exists():
        return
    new: BinaryIO | None = None
    good = 0  # bytes of the old file that stay as they are
    with path.open("rb") as old, ExitStack() as files:
        for data in old:
            new_line = rewrite(data)
            if new is None and new_line != data:
                if new_line is None and not data.endswith(b"\n"):
                    return os.truncate(path, good)
                shutil.copyfile(path, temp)
                new = files.enter_context(temp.open("r+b"))
                new.truncate(good)
                new.seek(good)
            if new is not None:
                new.write(new_line or b"")
            good += len(data)
        if new is not None:
            before_replace()
            replace_file(new, temp, path)


def sort_lines(path: Path, temp: Path, find_position: Callable[[bytes], int], size: int) -> None:
    """Sort the lines of `path` by `find_position(line)`, which is below `size` and different for each."""
    if not path.exists():
        return
    starts = array("Q", bytes(8 * size))  # offset + 1 of the line at each position, 0 for none
    offset, last, in_order = 0, -1, True
    with path.open("rb") as old:
        for data in old:
            at = find_position(data)
            starts[at] = offset + 1
            in_order = in_order and at > last
            last = at
            offset += len(data)
        if in_order:
            return
        with temp.open("wb") as new:
            for start in starts:
                if start:
                    old.seek(start - 1)
                    new.write(old.readline())
            replace_file(new, temp, path)


def replace_file(new: BinaryIO, temp: Path, path: Path) -> None:
    """Give `temp`, open as `new`, the name of `path` once it is safe on disk."""
    new.flush()
    os.fsync(new.fileno())
    temp.replace(path)
    sync_folder(path.parent)


def list_common_reasons(errors: Path, read: int = 1000) -> list[tuple[str, int]]:
    """The reasons of the first `read` error records, each with its count, the most common first."""
    found: Counter[str] = Counter()
    with errors.open(encoding="utf-8") as lines:
        for line in islice(lines, read):
            found[str(json.loads(line)["error"]["message"])[:200]] += 1
    return found.most_common()
