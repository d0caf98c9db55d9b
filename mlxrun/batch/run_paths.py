"""Where a job's files are, who may write them, and how small ones are replaced.

    X.jsonl -> X.out.jsonl, X.errors.jsonl, X.out.jsonl.run/{manifest.json,status.json,journal.jsonl,...}

One process at a time holds the lock. A file that is replaced is complete before it gets its name.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mlxrun.errors import JobError


@dataclass(frozen=True, slots=True)
class Paths:
    """All files of one job."""

    job: Path
    out: Path

    @classmethod
    def of(cls, job: Path, out: Path | None = None) -> Paths:
        """The files of `job`, whose output goes to `out` or beside it."""
        found = cls(job, out or job.with_name(job.name.removesuffix(".jsonl") + ".out.jsonl"))
        if out is not None and found.out.resolve() == job.resolve():
            raise JobError(f"{out}: the output would replace the job file; give another -o")
        why = None
        if not found.out.parent.is_dir():
            why = f"its folder {found.out.parent} does not exist"
        elif found.out.exists() and not found.out.is_file():
            why = "it is a folder" if found.out.is_dir() else "it is not a regular file"
        if why is not None:
            raise JobError(f"{found.out}: the output cannot be written: {why}")
        return found

    @property
    def errors(self) -> Path:
        stem = self.out.name.removesuffix(".jsonl").removesuffix(".out")
        return self.out.with_name(stem + ".errors.jsonl")

    @property
    def folder(self) -> Path:
        return self.out.with_name(self.out.name + ".run")

    @property
    def journal(self) -> Path:
        return self.folder / "journal.jsonl"

    @property
    def manifest(self) -> Path:
        return self.folder / "manifest.json"

    @property
    def status(self) -> Path:
        return self.folder / "status.json"

    @property
    def answers(self) -> Path:
        """Partial answers; only there while lines are left."""
        return self.folder / "answers.jsonl"

    @property
    def cache(self) -> Path:
        """The prefix cache of the job; only there while lines are left."""
        return self.folder / "cache"

    @property
    def dropped(self) -> Path:
        """Answers that no longer belong to a line; nothing computed is thrown away."""
        return self.folder / "dropped.jsonl"

    def forget(self) -> None:
        """Remove what earlier runs wrote (`--fresh`)."""
        files = (self.journal, self.out, self.errors, self.manifest, self.status, self.dropped, self.answers)
        for path in files:
            with writing(path):
                path.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError into the JobError that says how to go on."""
    try:
        yield
    except OSError as error:
        raise JobError(
            f"{path}: cannot be written: {error.strerror or error}. What is finished is kept; "
            "when this is mended, the next run goes on from there"
        ) from error


@contextmanager
def locked(paths: Paths) -> Iterator[None]:
    """Makes the run folder and holds it; JobError if another process does."""
    with writing(paths.folder):
        paths.folder.mkdir(exist_ok=True)
        handle = os.open(paths.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.read(handle, 20).decode("ascii", "replace").strip() or "unknown"
        os.close(handle)
        raise JobError(
            f"{paths.folder}: another mlxrun (process {owner}) runs this job; wait for it, or give another -o"
        ) from error
    try:
        os.truncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(handle)


def replace(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write `path` as a whole: a reader, or the next start, sees the old content or the new one."""
    temp = path.with_name(path.name + ".tmp")
    with temp.open("wb") as file:
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    temp.replace(path)
    if durable:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
