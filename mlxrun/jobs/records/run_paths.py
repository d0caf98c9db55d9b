"""The files of a job: where they are, who may write them, and how small ones are replaced.

    X.jsonl -> X.out.jsonl, X.errors.jsonl, X.out.jsonl.run/{manifest,scores,status}.json, journal.jsonl, ...

One process at a time holds the lock. A file that is replaced is complete before it gets its name.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from mlxrun.core.errors import DiskFailed, JobError

# A quota or a limit of the process looks like a full disk to a writer, and is mended like one.
_DISK_FAILURES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class JobPaths:
    """All files of one job, whose output goes to `out` or beside it; JobError if it cannot be written."""

    def __init__(self, job: Path, out: Path | None = None) -> None:
        self.job = job
        self.out = out or job.with_name(job.name.removesuffix(".jsonl") + ".out.jsonl")
        if out is not None and out.resolve() == job.resolve():
            raise JobError(f"{out}: the output would replace the job file; give another -o")
        try:
            reason = self._find_problem()
        except OSError as error:  # of a folder that may not be entered
            reason = str(error.strerror)
        if reason:
            raise JobError(f"{self.out}: the output cannot be written: {reason}")
        stem = self.out.name.removesuffix(".jsonl").removesuffix(".out")
        self.errors = self.out.with_name(stem + ".errors.jsonl")
        self.folder = self.out.with_name(self.out.name + ".run")
        self.journal = self.folder / "journal.jsonl"
        self.manifest = self.folder / "manifest.json"
        self.scores = self.folder / "scores.json"
        self.status = self.folder / "status.json"
        self.timings = self.folder / "timings.jsonl"
        self.dropped = self.folder / "dropped.jsonl"  # answers that belong to no line any more
        self.earlier = self.folder / "earlier"  # folders of what `--fresh` replaced, by date
        # Partial answers and the prefix cache of the job exist only while lines are left.
        self.answers = self.folder / "answers.jsonl"
        self.cache = self.folder / "cache"

    def _find_problem(self) -> str:
        """Why the output cannot be where it should be; empty if it can."""
        if not self.out.parent.is_dir():
            return f"its folder {self.out.parent} does not exist"
        if not self.out.exists() or self.out.is_file():
            return ""
        return "it is a folder" if self.out.is_dir() else "it is not a regular file"

    def has_answers(self) -> bool:
        """Whether earlier runs have left answers or errors."""
        return any(path.exists() and path.stat().st_size for path in (self.out, self.errors))

    def set_outputs_aside(self) -> Path | None:
        """Move what earlier runs wrote to a new folder below `earlier`, which is returned. None if they left
        no answers; what they wrote is deleted then."""
        folder = self._make_dated_folder() if self.has_answers() or self.dropped.exists() else None
        # Answers are moved before the journal that claims them: a kill in between loses none.
        files = (self.out, self.errors, self.dropped, self.journal, self.manifest, self.scores, self.timings)
        for path in files:
            with wrap_write_errors(path):
                if folder is None:
                    path.unlink(missing_ok=True)
                elif path.exists():
                    path.rename(folder / path.name)
        for path in (self.status, self.answers):
            with wrap_write_errors(path):
                path.unlink(missing_ok=True)
        return folder

    def _make_dated_folder(self) -> Path:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%SZ")
        names = (now if number == 1 else f"{now}-{number}" for number in itertools.count(1))
        folder = next(self.earlier / name for name in names if not (self.earlier / name).exists())
        with wrap_write_errors(folder):
            folder.mkdir(parents=True)
        return folder


@contextmanager
def wrap_write_errors(path: Path, *, begun: bool = True) -> Iterator[None]:
    """Turn an OSError into a JobError that says how to continue: DiskFailed if the disk is to blame, and not
    the path. `begun`: whether there may be lines."""
    try:
        yield
    except OSError as error:
        kept = ". Finished lines are kept; once this is fixed, the next run continues from there"
        reason = f"{error.strerror or error}{kept if begun else ''}"
        kind = DiskFailed if error.errno in _DISK_FAILURES else JobError
        raise kind(f"{path}: cannot be written: {reason}") from error


@contextmanager
def lock_run_folder(paths: JobPaths) -> Iterator[None]:
    """Create the run folder and hold its lock; JobError if another process holds it."""
    with lock_folder(paths.folder):
        yield


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Create a folder and hold its lock; JobError if another process holds it."""
    with wrap_write_errors(folder, begun=folder.exists()):
        folder.mkdir(exist_ok=True)
        handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.read(handle, 20).decode("ascii", "replace").strip() or "unknown"
        os.close(handle)
        raise JobError(
            f"{folder}: another mlxrun (process {owner}) runs this job; wait for it, or give another -o"
        ) from error
    try:
        os.truncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(handle)


def write_atomically(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace `path` by `data`: a reader, or the next start, sees the old content or the new one."""
    temp = path.with_name(path.name + ".tmp")
    try:
        with temp.open("wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temp.replace(path)
    except OSError:  # a full disk would keep an empty file
        with suppress(OSError):
            temp.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
