"""A file that only ever holds whole lines of ours, whatever the disk does. Made at the first one."""

from __future__ import annotations

import os
from pathlib import Path

from mlxrun.batch.run_paths import sync_folder, writing


class Appender:
    """JobError if the file cannot be written; nothing of what failed stays in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None
        self._size = 0

    def append(self, data: bytes) -> None:
        """Write `data` at the end, as a whole or not at all."""
        with writing(self.path):
            if self._handle is None:
                self._handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                self._size = os.fstat(self._handle).st_size
                sync_folder(self.path.parent)
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(self._handle, rest) :]
            except OSError:
                os.ftruncate(self._handle, self._size)  # no half line stays behind a full disk
                raise
            self._size += len(data)

    def sync(self) -> None:
        """Make what was written durable."""
        if self._handle is not None:
            with writing(self.path):
                os.fsync(self._handle)

    def close(self) -> None:
        """Let go of the file; the next `append` opens it again."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
