"""A file of the server: its description, and its content while it is received."""

from __future__ import annotations

import mimetypes
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mlxrun.core.errors import BodyTooLarge
from mlxrun.server.batches.durable_files import convert_errors

UNKNOWN_TYPE = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """The description of a file. Times are seconds since 1970; None: it does not expire. `owner`: name of the
    API key that it was sent with, empty without keys."""

    id: str
    filename: str
    bytes: int
    created_at: int
    purpose: str
    owner: str = ""
    media_type: str = UNKNOWN_TYPE
    expires_at: int | None = None

    @property
    def age_key(self) -> str:
        """The part of the id that sorts after those of earlier files."""
        return self.id[len("file-") :]

    def has_expired(self, now: float) -> bool:
        return self.expires_at is not None and self.expires_at <= now

    def describe(self) -> dict[str, Any]:
        """OpenAI's file object."""
        found = {name: value for name, value in asdict(self).items() if name not in ("owner", "media_type")}
        return {"object": "file", **found, "status": "processed"}


def guess_media_type(given: str | None, filename: str) -> str:
    """The type that a client gave, or else the one that belongs to the file's name."""
    if given and given != UNKNOWN_TYPE:
        return given
    return mimetypes.guess_type(filename)[0] or UNKNOWN_TYPE


class Upload:
    """A file that is being received, of at most `max_bytes`."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self.size = 0  # bytes received, some of which may not be written yet
        self._max_bytes = max_bytes
        self._file: BinaryIO = path.open("xb")

    def receive(self, size: int) -> None:
        """Count bytes that were received; BodyTooLarge if they are too many."""
        self.size += size
        self.check(0)

    def check(self, more: int) -> None:
        """BodyTooLarge if so many bytes more are too many."""
        if self.size + more > self._max_bytes:
            text = f"file: has more than {self._max_bytes} bytes (batch.max_file_bytes)"
            raise BodyTooLarge(text, param="file")

    def write(self, data: bytes) -> None:
        with convert_errors(self.path):
            self._file.write(data)

    def finish(self) -> None:
        """Make the file durable."""
        with convert_errors(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def discard(self) -> None:
        """Remove the file; does nothing if it was added to the storage."""
        with suppress(OSError):  # a full disk: the unwritten rest is not needed
            self._file.close()
        self.path.unlink(missing_ok=True)
