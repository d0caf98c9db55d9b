"""The server's folder on disk: uploaded files, and the folders of batches. One process at a time may use it.

    files/ID.jsonl + files/ID.json    a file and its description; one without the other is not a file
    batches/                          see BatchFolders in batch.py

Everything is complete before it gets its name, so a kill loses nothing that a client was told of. A file that
has expired does not exist for clients, and is removed from the disk soon after. Methods block: call them on a
worker thread, except `find`, `list_files`, `find_content`, `get_time` and `create_id`.
"""

from __future__ import annotations

import fcntl
import logging
import mimetypes
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mlxrun.api.stored_files import FileContent, ReadFile
from mlxrun.core.durable_writes import sync_handle
from mlxrun.core.errors import BodyTooLarge, NotFound
from mlxrun.core.field_errors import quote
from mlxrun.server.batches.batch import MIN_COUNTED_BYTES, BatchFolders
from mlxrun.server.batches.durable_files import (
    StorageError,
    convert_errors,
    link_file,
    read_object,
    write_json,
)
from mlxrun.server.http.access import may_access

log = logging.getLogger(__name__)
UNKNOWN_TYPE = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """The description of a file. Times are seconds since 1970; it never expires if `expires_at` is None.
    `owner`: the name of the API key that it was sent with; empty if there are no keys."""

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
        """The part of the id that sorts files by age."""
        return self.id[len("file-") :]

    def has_expired(self, now: float) -> bool:
        return self.expires_at is not None and self.expires_at <= now

    def describe(self) -> dict[str, Any]:
        """Build OpenAI's file object."""
        found = {name: value for name, value in asdict(self).items() if name not in ("owner", "media_type")}
        return {"object": "file", **found, "status": "processed"}


def guess_media_type(given: str | None, filename: str) -> str:
    """Return the media type that a client gave, else the one of the file's name."""
    if given and given != UNKNOWN_TYPE:
        return given
    return mimetypes.guess_type(filename)[0] or UNKNOWN_TYPE


class Upload:
    """A file of at most `max_bytes` that is being received."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self.size = 0  # bytes received, some of which may not be written yet
        self._max_bytes = max_bytes
        self._file: BinaryIO = path.open("xb")

    def receive(self, size: int) -> None:
        """Count `size` received bytes. BodyTooLarge if there are too many."""
        self.size += size
        self.check(0)

    def check(self, more: int) -> None:
        """Raise BodyTooLarge if `more` further bytes are too many."""
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
            sync_handle(self._file.fileno())
            self._file.close()

    def discard(self) -> None:
        """Remove the file unless it was added to the storage."""
        with suppress(OSError):  # a full disk: the unwritten rest is not needed
            self._file.close()
        self.path.unlink(missing_ok=True)


class QuotaExceeded(BodyTooLarge):
    """server.files_max_bytes is reached. The status is 413, since clients would retry after 507."""

    code = "storage_full"


class Storage:
    """All files of one server. Call `open` first. StorageError if the folder cannot be used."""

    def __init__(self, root: Path, max_bytes: int, now: Callable[[], float] = time.time) -> None:
        """`max_bytes`: of all files and batches together. `now`: returns seconds since 1970."""
        self.root = root
        self.now = now
        self._max_bytes = max_bytes
        self.batches = BatchFolders(root / "batches")
        self._files: dict[str, StoredFile] = {}
        self._uploads: set[Upload] = set()
        self._batch_bytes = 0  # as `measure_batches` found them
        self._folder = root / "files"
        self._lock: int | None = None
        self._opening = threading.Lock()
        self._newest = 0  # microseconds since 1970, in the newest id

    def open(self) -> None:
        """Lock the folder, remove incomplete files, and load the others. Does nothing if it is open."""
        with self._opening:
            if self._lock is not None:
                return
            with convert_errors(self.root):
                for folder in (self.root, self._folder, self.batches.root):
                    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                handle = _lock(self.root / "lock")
            try:
                with convert_errors(self._folder):
                    self._load()
                    self.remove_expired()
                    self.measure_batches()
            except BaseException:
                os.close(handle)
                raise
            self._lock = handle

    def close(self) -> None:
        """Unlock the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def get_time(self) -> int:
        """Return the time in whole seconds since 1970."""
        return int(self.now())

    def create_id(self, prefix: str) -> str:
        """Make an id that sorts after earlier ones, and that nobody can guess. For the event loop only."""
        self._newest = max(self._newest + 1, int(self.now() * 1e6))
        return f"{prefix}{self._newest:014x}{secrets.token_hex(5)}"

    def find(self, file_id: str) -> StoredFile | None:
        """Return the file; None if there is none, or it has expired."""
        file = self._files.get(file_id)
        return None if file is None or file.has_expired(self.now()) else file

    def find_own(self, key: str, file_id: str) -> StoredFile | None:
        """Return the file if requests with the API key of this name may see it, else None."""
        file = self.find(file_id)
        return file if file is not None and may_access(key, file.owner) else None

    def make_reader(self, key: str) -> ReadFile:
        """Make the function that reads files for requests with the API key of this name."""

        def read(file_id: str, max_bytes: int) -> FileContent:
            file = self.find_own(key, file_id)
            if file is None:
                raise NotFound(f"there is no file {quote(file_id)}")
            if file.bytes > max_bytes:
                raise BodyTooLarge(f"the file has {file.bytes} bytes: the body would be too large with it")
            content = self.find_content(file_id)
            with convert_errors(content):
                return FileContent(file.media_type, content.read_bytes())

        return read

    def list_files(self) -> list[StoredFile]:
        """List all files that have not expired, newest first."""
        now = self.now()
        files = (file for file in tuple(self._files.values()) if not file.has_expired(now))
        return sorted(files, key=lambda file: file.age_key, reverse=True)

    def find_content(self, file_id: str) -> Path:
        """Return the path of a file's bytes."""
        return self._folder / f"{file_id}.jsonl"

    @property
    def used_bytes(self) -> int:
        """The bytes of all files, uploads and jobs. Each counts as at least MIN_COUNTED_BYTES."""
        sizes = [file.bytes for file in tuple(self._files.values())]
        sizes += [upload.size for upload in tuple(self._uploads)]
        return sum(max(MIN_COUNTED_BYTES, size) for size in sizes) + self._batch_bytes

    def measure_batches(self) -> None:
        """Count the bytes of all jobs again."""
        self._batch_bytes = self.batches.count_bytes()

    def check_quota(self, more: int, param: str) -> None:
        """Raise QuotaExceeded if `more` further bytes do not fit. `param`: the field that the error names."""
        if self.used_bytes + max(0, more) > self._max_bytes:
            raise QuotaExceeded(
                f"{param}: all files and batches together may have {self._max_bytes} bytes (server."
                f"files_max_bytes), each counting {MIN_COUNTED_BYTES} at least; delete some files first",
                param=param,
            )

    def start_upload(self, max_bytes: int) -> Upload:
        """Create a file for an upload. Call `discard_upload` in the end."""
        self.measure_batches()
        with convert_errors(self._folder):
            upload = Upload(self._folder / f"{secrets.token_hex(12)}.part", max_bytes)
        self._uploads.add(upload)
        return upload

    def add(self, upload: Upload, file: StoredFile) -> None:
        """Turn a complete upload into a file of the server."""
        upload.finish()
        self._add(file, lambda path: upload.path.replace(path))
        self._uploads.discard(upload)

    def discard_upload(self, upload: Upload) -> None:
        """Remove an upload unless it was added."""
        self._uploads.discard(upload)
        upload.discard()

    def adopt(self, path: Path, file: StoredFile) -> bool:
        """Turn a batch's output into a file of the server, unless the id is known. False if it is empty."""
        if file.id not in self._files and file.bytes:
            self._add(file, lambda target: link_file(path, target))
        return file.id in self._files

    def delete(self, file_id: str) -> None:
        """Delete a file if it exists. StorageError if that fails; then the file still exists."""
        if file_id in self._files:
            with convert_errors(self._folder):
                # Without its description, the content is not a file.
                self._find_description(file_id).unlink(missing_ok=True)
                self._files.pop(file_id, None)
                self.find_content(file_id).unlink(missing_ok=True)

    def remove_expired(self) -> None:
        """Remove files that have expired from the disk."""
        now = self.now()
        for file in tuple(self._files.values()):
            if file.has_expired(now):
                self.delete(file.id)
                log.info("%s: removed, as it has expired", file.id)

    def _add(self, file: StoredFile, put_content: Callable[[Path], object]) -> None:
        with convert_errors(self._folder):
            put_content(self.find_content(file.id))
            write_json(self._find_description(file.id), asdict(file))
        self._files[file.id] = file

    def _find_description(self, file_id: str) -> Path:
        return self._folder / f"{file_id}.json"

    def _load(self) -> None:
        self._files.clear()
        for path in self._folder.glob("*.json"):
            file, content = read_object(path, StoredFile), path.with_suffix(".jsonl")
            size = content.stat().st_size if content.is_file() else None
            if file is not None and path.stem == file.id and file.bytes == size:
                self._files[file.id] = file
            else:
                log.warning("%s: does not describe an existing file; it is skipped", path)
        for path in self._folder.iterdir():
            is_lone = path.suffix == ".jsonl" and not path.with_suffix(".json").exists()
            if path.is_file() and (path.suffix in (".part", ".tmp") or is_lone):
                path.unlink(missing_ok=True)  # an unfinished upload or deletion


def _lock(path: Path) -> int:
    """Lock the folder for this process, and return the handle of the lock file."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise StorageError(
            f"{path.parent}: another mlxrun process serves the files and batches there; "
            "give one of them another server.data_path"
        ) from error
    return handle
