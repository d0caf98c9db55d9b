"""The disk tier of the prefix cache: Files (cache/entry.py) over one model's folder.

The engine thread calls; one writer thread, which gets bytes only, writes and deletes. Reads go first: nothing
is written while one is under way. Nothing is synced: after a power loss a torn file is a miss, which its
checksum finds. Other processes may use the same folder: files may come and go, and each counts what it saw.
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

from mlxrun.cache.cache_folder import ModelFolder
from mlxrun.cache.entry import CacheCounters, CacheEntry, Key, SerializedPayload
from mlxrun.cache.entry_file import BadFile, Check, dump, load, peek

logger = logging.getLogger(__name__)

QUEUE_BYTES = 512_000_000
RETRY_SECONDS = 60.0
CLOSE_SECONDS = 60.0


@dataclass(frozen=True, slots=True, eq=False)
class _Write:
    """A file that is not there yet."""

    record: CacheEntry
    blob: SerializedPayload
    nbytes: int


class DiskTier:
    """Files in FOLDER/<root hex>. The thread starts with the first write or delete.

    `dropped` counts records that were not written: the queue was full, or the disk was.
    """

    def __init__(
        self,
        folder: Path,
        root: bytes,
        *,
        counters: CacheCounters,
        check: Check | None = None,
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        self.dropped = 0
        self._home = ModelFolder(folder, root)
        self._counters = counters
        self._check = check
        self._queue_bytes = queue_bytes
        # All below is guarded by the lock of _changed.
        self._changed = threading.Condition()
        self._sizes: dict[Key, int] = {}  # files
        self._pending: dict[Key, _Write] = {}  # oldest first; stays here until it is a file
        self._doomed: dict[Key, None] = {}  # files to delete, before anything is written
        self._on_disk = 0
        self._queued = 0
        self._reading = 0
        self._paused_until = 0.0
        self._warned = False
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the files, those under way included."""
        with self._changed:
            return self._on_disk + self._queued

    def scan(self) -> Sequence[CacheEntry]:
        """What is there, least recently used first. Reads headers and ids only; bad files are deleted."""
        self._home.sweep()
        found = []
        for path in self._home.files():
            try:
                record, stat = peek(path, self._home.root, check=self._check)
            except BadFile as bad:
                self._refuse(path, bad)
            except OSError as error:  # gone meanwhile, or not ours to read
                logger.debug("%s: not read: %s", path, error)
            else:
                found.append((stat.st_mtime_ns, -record.stop, record, stat.st_size))
        found.sort(key=lambda entry: entry[:2])  # of equal age, what is longer is given up first
        with self._changed:
            kept = [(record, size) for _, _, record, size in found if record.key not in self._doomed]
            self._sizes = {record.key: size for record, size in kept}
            self._on_disk = sum(self._sizes.values())
            self._count()
        return [record for record, _ in kept]

    def write(self, record: CacheEntry, blob: SerializedPayload) -> bool:
        """Hand it to the writer thread; False if it is not taken: disk full or read-only, or queue full."""
        write = _Write(record, blob, blob.nbytes + 8 * len(record.ids))
        with self._changed:
            if record.key in self._pending:
                return True
            if self._closing or time.monotonic() < self._paused_until:
                return False
            if self._pending and self._queued + write.nbytes > self._queue_bytes:
                self.dropped += 1
                return False
            self._pending[record.key] = write
            self._queued += write.nbytes
            self._count()
            self._wake()
        return True

    def stored(self, record: CacheEntry) -> bool:
        """Whether it is a complete file."""
        with self._changed:
            return record.key in self._sizes and record.key not in self._pending

    def read(self, record: CacheEntry) -> SerializedPayload | None:
        """The bytes, checked, also of a write under way; None if the file is gone or bad (then deleted)."""
        with self._changed:
            if record.key in self._pending:
                return self._pending[record.key].blob
            if record.key in self._doomed:
                return None
            self._reading += 1
        try:
            return self._load(record)
        finally:
            with self._changed:
                self._reading -= 1
                self._changed.notify_all()

    def delete(self, record: CacheEntry) -> None:
        """Forget it, also if it is being written; nothing happens if it is not there."""
        with self._changed:
            self._unqueue(record.key)
            self._forget(record.key)
            if not self._closing:
                self._doomed[record.key] = None
                self._wake()
                return
        self._unlink(record.key)

    def close(self) -> None:
        """Finish the writes under way and stop; a disk that hangs is not waited for forever."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                logger.warning("%s: the disk is too slow; not all prefixes were saved", self._home.path)

    def _load(self, record: CacheEntry) -> SerializedPayload | None:
        path = self._home.file(record.key)
        try:
            found, blob = load(path, self._home.root, check=self._check)
            if not _same(found, record):
                raise BadFile("it holds another record than was asked for")
        except BadFile as bad:
            self._refuse(path, bad)
        except OSError as error:
            logger.debug("%s: not read: %s", path, error)
        else:
            self._counters.read += 1
            with suppress(OSError):  # the order of use is a help, not a need
                now = time.time_ns()
                os.utime(path, ns=(now, now))
            return blob
        with self._changed:
            self._forget(record.key)
        return None

    def _refuse(self, path: Path, bad: BadFile) -> None:
        logger.info("%s: deleted and computed again when needed: %s", path, bad)
        self._counters.refused += 1
        with suppress(OSError):
            path.unlink()

    # Under the lock.

    def _forget(self, key: Key) -> None:
        self._on_disk -= self._sizes.pop(key, 0)
        self._count()

    def _unqueue(self, key: Key) -> None:
        write = self._pending.pop(key, None)
        if write is not None:
            self._queued -= write.nbytes
            self._count()

    def _count(self) -> None:
        self._counters.disk_bytes = self._on_disk + self._queued

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="mlxrun-cache-writer", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _has_work(self) -> bool:
        return self._closing or (not self._reading and bool(self._doomed or self._pending))

    # The writer thread.

    def _work(self) -> None:
        while (task := self._next()) is not None:
            if isinstance(task, _Write):
                self._save(task)
            else:
                self._unlink(task)
                with self._changed:
                    self._doomed.pop(task, None)

    def _next(self) -> _Write | Key | None:
        with self._changed:
            self._changed.wait_for(self._has_work)
            if self._doomed:
                return next(iter(self._doomed))
            return next(iter(self._pending.values()), None)

    def _unlink(self, key: Key) -> None:
        try:
            self._home.file(key).unlink(missing_ok=True)
        except OSError as error:
            logger.debug("%s: not deleted: %s", self._home.file(key), error)

    def _save(self, write: _Write) -> None:
        key = write.record.key
        try:
            size = self._home.put(key, dump(write.record, write.blob, self._home.root))
        except (FileNotFoundError, IsADirectoryError, ValueError) as error:  # cleared meanwhile, or odd
            logger.debug("%s: not saved: %s", self._home.file(key), error)
            with self._changed:
                self.dropped += 1
                self._drop(write)
            return
        except OSError as error:
            self._pause(error)
            return
        with self._changed:
            if self._drop(write):  # otherwise it was deleted meanwhile, and the file is doomed
                self._forget(key)
                self._sizes[key] = size
                self._on_disk += size
                self._counters.written += 1
                self._count()

    def _drop(self, write: _Write) -> bool:
        """Take it out of the queue, under the lock; False if it is no longer there."""
        if self._pending.get(write.record.key) is not write:
            return False
        self._unqueue(write.record.key)
        return True

    def _pause(self, error: OSError) -> None:
        """The disk takes no more: give up what waits, and try again later."""
        with self._changed:
            self.dropped += len(self._pending)
            self._pending.clear()
            self._queued = 0
            self._count()
            self._paused_until = time.monotonic() + RETRY_SECONDS
            first, self._warned = not self._warned, True
        if first:
            logger.warning(
                "%s: prefixes cannot be saved: %s; requests go on, what is there is used, and saving is "
                "tried again every %d s",
                self._home.path,
                error.strerror or error,
                RETRY_SECONDS,
            )


def _same(found: CacheEntry, wanted: CacheEntry) -> bool:
    facts = ("key", "parent", "part", "start", "stop", "ids")
    return all(getattr(found, fact) == getattr(wanted, fact) for fact in facts)
