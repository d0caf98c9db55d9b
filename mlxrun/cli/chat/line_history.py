"""The lines that were typed in conversations, in a file that all conversations of a user share.

Readline has the lines and the format of the file. It would write all that it read when a conversation began,
without what others have added since. So at the end only the lines of this conversation are added.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MOST = 1000  # lines of the file


class LineHistory:
    """The history of one conversation, with the file at `path`. It does nothing where Python has no readline,
    or where the file cannot be used."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._earlier = 0  # lines that were in the file

    def load(self) -> None:
        """Give readline the lines of earlier conversations."""
        with suppress(ImportError):
            import readline

            with suppress(OSError):
                readline.read_history_file(self._path)
            self._earlier = readline.get_current_history_length()

    def save(self) -> None:
        """Add the lines of this conversation to the file, which then has the newest MOST lines."""
        with suppress(ImportError, OSError):
            import readline

            numbers = range(self._earlier + 1, readline.get_current_history_length() + 1)
            typed = [readline.get_history_item(number) for number in numbers]
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with _hold_lock(self._path.with_suffix(".lock")):
                readline.clear_history()
                with suppress(OSError):
                    readline.read_history_file(self._path)
                self._earlier = readline.get_current_history_length() + len(typed)
                for line in typed:
                    readline.add_history(line)
                readline.set_history_length(MOST)
                readline.write_history_file(self._path)
            self._path.chmod(0o600)


@contextmanager
def _hold_lock(path: Path) -> Iterator[None]:
    """Hold the lock of a file in the block. Where the file system has no locks, none is held."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
