"""The server's folder on disk: uploaded files, and the folders of batches. One process at a time holds it.

    files/ID.jsonl + files/ID.json    a file and what is said of it; one without the other is no file
    batches/ID/                       one batch: batch.json, and its job

Everything is complete before it gets its name, so a kill loses nothing that was answered. All methods block:
call them on a worker thread, but for `find`, `newest`, `content` and `new_id`.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mlxrun.errors import MlxrunError

log = logging.getLogger(__name__)
Clock = Callable[[], float]  # seconds since 1970
LEAST = 4096  # bytes that a file or a batch counts as, however small: else there could be any number of them


class StorageError(MlxrunError):
    """The server's folder cannot be used; the cause is in the text."""

    http_status = 503
    code = "storage_unavailable"


def data_folder(path: str | None, environ: Mapping[str, str]) -> Path:
    """`server.data_path`, or where programs of this user keep their data."""
    if path is not None:
        return Path(path).expanduser()
    base = environ.get("XDG_DATA_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".local" / "share") / "mlxrun"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """What is said of a file. `owner`: the name of the API key that it came with, empty without keys."""

    id: str
    filename: str
    bytes: int
    created_at: int
    purpose: str
    owner: str = ""

    def body(self) -> dict[str, Any]:
        """OpenAI's file object."""
        found = {name: value for name, value in asdict(self).items() if name != "owner"}
        return {"object": "file", **found, "status": "processed"}


class Upload:
    """A file that is still coming. Its methods block."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self.taken = 0  # bytes that have come, some of them not yet written
        self._file: BinaryIO = path.open("xb")

    def write(self, data: bytes) -> None:
        with _writing(self.path):
            self._file.write(data)
        self.size += len(data)

    def finish(self) -> None:
        """Make it durable."""
        with _writing(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def discard(self) -> None:
        """Forget it; does nothing once it was added."""
        with suppress(OSError):  # a full disk: what was not written yet is of no interest
            self._file.close()
        self.path.unlink(missing_ok=True)


class Storage:
    """All files of one server. `open` first; StorageError if the folder cannot be used."""

    def __init__(self, root: Path, now: Clock = time.time) -> None:
        self.root = root
        self.now = now
        self._files: dict[str, StoredFile] = {}
        self._coming: set[Upload] = set()
        self._in_jobs = 0  # bytes, as `measure` found them
        self._folder = root / "files"
        self._batches = root / "batches"
        self._lock: int | None = None
        self._opening = threading.Lock()
        self._newest = 0  # microseconds since 1970, in the newest id

    def open(self) -> None:
        """Take the folder, clear what a kill left half-done, and read what there is. Does nothing twice."""
        with self._opening:
            if self._lock is not None:
                return
            with _writing(self.root):
                for folder in (self.root, self._folder, self._batches):
                    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                handle = _lock(self.root / "lock")
            try:
                with _writing(self._folder):
                    self._read()
                    self.measure()
            except BaseException:
                os.close(handle)
                raise
            self._lock = handle

    def close(self) -> None:
        """Let go of the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def new_id(self, prefix: str) -> str:
        """An id that nobody guesses, and that sorts behind all before it. Belongs to the event loop."""
        self._newest = max(self._newest + 1, int(self.now() * 1e6))
        return f"{prefix}{self._newest:014x}{secrets.token_hex(5)}"

    # -- files --------------------------------------------------------------------------------------------

    def find(self, file_id: str) -> StoredFile | None:
        return self._files.get(file_id)

    def newest(self) -> list[StoredFile]:
        """All files, the newest first."""
        return sorted(self._files.values(), key=lambda file: file.id, reverse=True)

    def content(self, file_id: str) -> Path:
        """Where the bytes of a known file are."""
        return self._folder / f"{file_id}.jsonl"

    @property
    def used(self) -> int:
        """Bytes of all files, of those that are coming, of what else batches hold; LEAST each at least."""
        files = sum(max(LEAST, file.bytes) for file in tuple(self._files.values()))
        coming = sum(max(LEAST, upload.taken) for upload in tuple(self._coming))
        return files + coming + self._in_jobs

    def measure(self) -> None:
        """Look at what batches hold: their jobs grow by themselves."""
        self._in_jobs = sum(max(LEAST, _own_bytes(folder / "job")) for folder in self.batch_folders())

    def begin(self) -> Upload:
        """Room for a new file; `drop` it in the end."""
        self.measure()
        with _writing(self._folder):
            upload = Upload(self._folder / f"{secrets.token_hex(12)}.part")
        self._coming.add(upload)
        return upload

    def add(self, upload: Upload, file: StoredFile) -> StoredFile:
        """Keep a file that has come, under a new id."""
        upload.finish()
        kept = self._keep(file, lambda path: upload.path.replace(path))
        self._coming.discard(upload)
        return kept

    def drop(self, upload: Upload) -> None:
        """Forget an upload; does nothing once it was added."""
        self._coming.discard(upload)
        upload.discard()

    def adopt(self, path: Path, file_id: str, filename: str, owner: str) -> StoredFile | None:
        """Keep what a batch has written; None if that is nothing. The same id again changes nothing."""
        known = self._files.get(file_id)
        size = path.stat().st_size if path.exists() else 0
        if known is not None or not size:
            return known
        file = StoredFile(file_id, filename, size, int(self.now()), "batch_output", owner)
        return self._keep(file, lambda target: link(path, target))

    def delete(self, file_id: str) -> bool:
        """Remove a file; False if there is none."""
        if self._files.pop(file_id, None) is None:
            return False
        with _writing(self._folder):
            self._meta(file_id).unlink(missing_ok=True)  # without it the other is nothing
            self.content(file_id).unlink(missing_ok=True)
        return True

    def _keep(self, file: StoredFile, put: Callable[[Path], object]) -> StoredFile:
        with _writing(self._folder):
            put(self.content(file.id))
            write_json(self._meta(file.id), asdict(file))
        self._files[file.id] = file
        return file

    def _meta(self, file_id: str) -> Path:
        return self._folder / f"{file_id}.json"

    def _read(self) -> None:
        self._files.clear()
        for path in self._folder.glob("*.json"):
            found = read_json(path)
            try:
                file = StoredFile(**found)
                whole = self.content(file.id).stat().st_size == file.bytes and path.stem == file.id
            except (TypeError, OSError):
                whole = False
            if whole:
                self._files[file.id] = file
            else:
                log.warning("%s: does not describe a file that is there; it is passed over", path)
        for path in self._folder.iterdir():
            if path.suffix in (".part", ".tmp") or (
                path.suffix == ".jsonl" and not path.with_suffix(".json").exists()
            ):
                path.unlink(missing_ok=True)  # half an upload, or half a deletion

    # -- batches ------------------------------------------------------------------------------------------

    def batch_folder(self, batch_id: str) -> Path:
        return self._batches / batch_id

    def batch_folders(self) -> list[Path]:
        """Folders of batches, oldest first."""
        with _writing(self._batches):
            return sorted(path for path in self._batches.iterdir() if path.is_dir())


def _own_bytes(folder: Path) -> int:
    """Bytes below a folder. A file with another name is one of the server's files too, and counts there."""
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # gone meanwhile
                found = os.lstat(os.path.join(base, name))
                total += found.st_size if found.st_nlink == 1 else 0
    return total


def link(source: Path, target: Path) -> None:
    """Have the content of a file under another name too: it then outlives the first. A file that is never
    changed again needs no copy, where the disk can do without."""
    temp = target.with_name(target.name + ".tmp")
    temp.unlink(missing_ok=True)
    try:
        os.link(source, temp)
    except OSError:
        shutil.copyfile(source, temp)
    temp.replace(target)


def write_json(path: Path, value: Any) -> None:
    """Replace a small document as a whole, durably."""
    temp = path.with_name(path.name + ".tmp")
    with temp.open("wb") as file:
        file.write(json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace"))
        file.flush()
        os.fsync(file.fileno())
    temp.replace(path)
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_json(path: Path) -> dict[str, Any]:
    """A document of ours; empty if it is none."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turns an OSError into a StorageError that names the path."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: cannot be used: {error.strerror or error}") from error


def _lock(path: Path) -> int:
    """Hold the folder for this process."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise StorageError(
            f"{path.parent}: another mlxrun serves the files and batches there; give one of them another "
            "server.data_path"
        ) from error
    return handle
