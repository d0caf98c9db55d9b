"""Rewrites of line files in bounded memory: the old content or the new one, never a mix."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from mlxrun.batch.run_paths import sync_folder


def filter_lines(path: Path, temp: Path, verdict: Callable[[bytes], bytes | None]) -> None:
    """Put `verdict(line)` in the place of each line of `path`, None removes it.

    The file is only replaced if something changes; a torn end that goes is cut off in place.
    """
    if not path.exists():
        return
    new: BinaryIO | None = None
    good = 0  # bytes of the old file that stay as they are
    try:
        with path.open("rb") as old:
            for data in old:
                kept = verdict(data)
                if new is None and kept != data:
                    if kept is None and not data.endswith(b"\n"):
                        os.truncate(path, good)
                        return
                    new = _copy_head(path, temp, good)
                if new is not None and kept is not None:
                    new.write(kept)
                good += len(data)
        if new is not None:
            _put(new, temp, path)
    finally:
        if new is not None:
            new.close()


def _copy_head(path: Path, temp: Path, size: int) -> BinaryIO:
    new = temp.open("wb")
    with path.open("rb") as old:
        left = size
        while block := old.read(min(left, 1 << 20)):
            new.write(block)
            left -= len(block)
    return new


def sort_lines(path: Path, temp: Path, place: Callable[[bytes], int], size: int) -> None:
    """Put the lines of `path` in the order of `place(line)`: below `size`, and no two are equal."""
    if not path.exists():
        return
    starts = array("Q", bytes(8 * size))  # offset + 1 of the line at each place, 0 for none
    offset, last, in_order = 0, -1, True
    with path.open("rb") as old:
        for data in old:
            at = place(data)
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
            _put(new, temp, path)


def _put(new: BinaryIO, temp: Path, path: Path) -> None:
    new.flush()
    os.fsync(new.fileno())
    temp.replace(path)
    sync_folder(path.parent)
