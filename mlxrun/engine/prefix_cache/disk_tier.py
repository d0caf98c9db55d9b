"""The disk tier of the prefix cache: the entries of one model as files (entry_file.py) in its folder.

The engine thread calls it. One writer thread gets bytes only, and writes and deletes. It waits while a read
is under way. Nothing is synced: after a power loss, a torn file is found by its checksum and counts as a
miss. Other processes may use the same folder, so files may come and go; each process counts what it saw.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mlxrun.config.settings import CacheSettings
from mlxrun.core.step_plan import SerializedPayload
from mlxrun.engine.prefix_cache.cache_folder import ModelFolder, check_folder, resolve_cache_folder
from mlxrun.engine.prefix_cache.entry import CacheCounters, CacheEntry, Key
from mlxrun.engine.prefix_cache.entry_file import BadFile, encode_entry, load_entry, peek_entry

logger = logging.getLogger(__name__)

QUEUE_BYTES = 512_000_000
RETRY_SECONDS = 60.0
CLOSE_SECONDS = 60.0
_FIELDS = ("key", "parent", "kind", "start", "stop", "ids")  # equal for the same entry


@dataclass(frozen=True, slots=True, eq=False)
class _Write:
    """A file that is yet to be written."""

    entry: CacheEntry
    payload: SerializedPayload
    nbytes: int


class DiskTier:
    """The files in FOLDER/<fingerprint, hex>. The writer thread starts with the first write or delete. No
    method raises, and only `read` and `scan` wait for the disk."""

    survives_restart = True

    def __init__(
        self,
        folder: Path,
        fingerprint: bytes,
        *,
        counters: CacheCounters,
        max_bytes: int = CacheSettings().disk_bytes,
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        self.max_bytes = max_bytes
        self._folder = ModelFolder(folder, fingerprint)
        self._counters = counters
        self._queue_bytes = queue_bytes
        # All below is protected by the lock of _changed.
        self._changed = threading.Condition()
        self._sizes: dict[Key, int] = {}  # of files
        self._pending: dict[Key, _Write] = {}  # oldest first; a write stays here until it is a file
        self._to_delete: dict[Key, None] = {}  # files that are deleted before anything is written
        self._on_disk = 0
        self._queued = 0
        self._reading = 0
        self._paused_until = 0.0
        self._warned = False
        self._has_undeleted = False
        self._closing = False
        self._thread: threading.Thread | None = None

    @classmethod
    def open(cls, settings: CacheSettings, fingerprint: bytes, counters: CacheCounters) -> DiskTier:
        """The tier in the folder of the config. ConfigError if the folder cannot be written to."""
        folder = resolve_cache_folder(settings.disk_path)
        check_folder(folder)
        return cls(folder, fingerprint, counters=counters, max_bytes=settings.disk_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the files, pending writes included."""
        with self._changed:
            return self._on_disk + self._queued

    def scan(self) -> Sequence[CacheEntry]:
        """Return the entries on disk, least recently used first, without payloads. Only headers and ids are
        read. Bad files are deleted."""
        self._folder.remove_leftovers()
        found = []
        for path in self._folder.list_files():
            try:
                entry, stat = peek_entry(path, self._folder.fingerprint)
            except BadFile as error:
                self._delete_bad_file(path, error)
            except OSError as error:  # gone meanwhile, or not ours to read
                logger.debug("%s: not read: %s", path, error)
            else:
                found.append((stat.st_mtime_ns, -entry.stop, entry, stat.st_size))
        found.sort(key=lambda item: item[:2])  # of equal age, the longer one is evicted first
        with self._changed:
            usable = [(entry, size) for _, _, entry, size in found if entry.key not in self._to_delete]
            self._sizes = {entry.key: size for entry, size in usable}
            self._on_disk = sum(self._sizes.values())
        return [entry for entry, _ in usable]

    def write(self, entry: CacheEntry, payload: SerializedPayload) -> bool:
        """Queue a file for the writer thread. False if the queue is full, or the disk full or read-only."""
        write = _Write(entry, payload, payload.nbytes + 8 * len(entry.ids))
        with self._changed:
            pending = self._pending.get(entry.key)
            if pending is not None:  # the writer may have read the entry before it got logprobs: once more
                self._pending[entry.key] = write
                self._queued += write.nbytes - pending.nbytes
                return True
            if self._closing or time.monotonic() < self._paused_until:
                return False
            if self._pending and self._queued + write.nbytes > self._queue_bytes:
                return False
            self._pending[entry.key] = write
            self._queued += write.nbytes
            self._wake_writer()
        return True

    def is_stored(self, entry: CacheEntry) -> bool:
        """Whether the entry is a complete file, and not a pending write."""
        with self._changed:
            return entry.key in self._sizes and entry.key not in self._pending

    def read(self, entry: CacheEntry) -> SerializedPayload | None:
        """Return the verified payload, also of a pending write. None if the file is missing, or bad and thus
        deleted."""
        with self._changed:
            if entry.key in self._pending:
                return self._pending[entry.key].payload
            if entry.key in self._to_delete:
                return None
            self._reading += 1
        try:
            return self._load(entry)
        finally:
            with self._changed:
                self._reading -= 1
                self._changed.notify_all()

    def delete(self, entry: CacheEntry) -> None:
        """Delete a file, or cancel its pending write. A missing entry is ignored."""
        with self._changed:
            self._cancel_write(entry.key)
            self._forget_file(entry.key)
            if not self._closing:
                self._to_delete[entry.key] = None
                self._wake_writer()
                return
        self._delete_file(entry.key)

    def close(self) -> None:
        """Finish the pending writes and stop. A disk that hangs is waited for at most CLOSE_SECONDS."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                logger.warning("%s: the disk is too slow; not all prefixes were saved", self._folder.path)

    def _load(self, entry: CacheEntry) -> SerializedPayload | None:
        path = self._folder.locate_file(entry.key)
        try:
            found, payload = load_entry(path, self._folder.fingerprint)
            if any(getattr(found, field) != getattr(entry, field) for field in _FIELDS):
                raise BadFile("it holds another entry than expected")
        except BadFile as error:
            self._delete_bad_file(path, error)
        except OSError as error:
            logger.debug("%s: not read: %s", path, error)
        else:
            self._counters.read += 1
            with suppress(OSError):  # a wrong order of use does no harm
                now = time.time_ns()
                os.utime(path, ns=(now, now))
            return payload
        with self._changed:
            self._forget_file(entry.key)
        return None

    def _delete_bad_file(self, path: Path, error: BadFile) -> None:
        logger.info("%s: deleted, and computed again when needed: %s", path, error)
        self._counters.refused += 1
        with suppress(OSError):
            path.unlink()

    # The caller of these methods holds the lock.

    def _forget_file(self, key: Key) -> None:
        self._on_disk -= self._sizes.pop(key, 0)

    def _cancel_write(self, key: Key) -> None:
        write = self._pending.pop(key, None)
        if write is not None:
            self._queued -= write.nbytes

    def _wake_writer(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_writer, name="mlxrun-cache-writer", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    # These methods run in the writer thread.

    def _run_writer(self) -> None:
        while (task := self._wait_for_task()) is not None:
            if isinstance(task, _Write):
                self._write_file(task)
            else:
                self._delete_file(task)
                with self._changed:
                    self._to_delete.pop(task, None)

    def _wait_for_task(self) -> _Write | Key | None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._closing or (not self._reading and bool(self._to_delete or self._pending))
            )
            if self._to_delete:
                return next(iter(self._to_delete))
            return next(iter(self._pending.values()), None)

    def _delete_file(self, key: Key) -> None:
        try:
            self._folder.locate_file(key).unlink(missing_ok=True)
        except NotADirectoryError:
            logger.debug("%s: there is no such folder", self._folder.path)
        except OSError as error:
            level = logging.DEBUG if self._has_undeleted else logging.WARNING
            self._has_undeleted = True
            text = "%s: not deleted: %s; the next start finds this entry, and others like it, again"
            logger.log(level, text, self._folder.locate_file(key), error.strerror or error)

    def _write_file(self, write: _Write) -> None:
        key, size = write.entry.key, None
        try:
            chunks = encode_entry(write.entry, write.payload, self._folder.fingerprint)
            size = self._folder.write_file(key, chunks)
        except (
            FileNotFoundError,
            IsADirectoryError,
            ValueError,
        ) as error:  # cleared meanwhile, or odd data
            logger.debug("%s: not saved: %s", self._folder.locate_file(key), error)
        except OSError as error:
            self._pause(error)
            return
        with self._changed:
            if self._pending.get(key) is not write:  # it was deleted or replaced meanwhile
                return
            self._cancel_write(key)
            if size is not None:
                self._forget_file(key)
                self._sizes[key] = size
                self._on_disk += size
                self._counters.written += 1

    def _pause(self, error: OSError) -> None:
        """Drop the pending writes of a disk that accepts no more, and try again later."""
        with self._changed:
            self._pending.clear()
            self._queued = 0
            self._paused_until = time.monotonic() + RETRY_SECONDS
            first, self._warned = not self._warned, True
        if first:
            message = (
                "%s: prefixes cannot be saved: %s; requests go on, saved prefixes are still used, and saving "
                "is tried again every %d s"
            )
            logger.warning(message, self._folder.path, error.strerror or error, RETRY_SECONDS)
