"""The files of a job: where they are, who may write them, and how they are replaced, appended to and sorted.

    X.jsonl -> X.out.jsonl, X.errors.jsonl, X.out.jsonl.run/{manifest,scores,status}.json, journal.jsonl, ...

One process at a time holds the lock. Whatever the disk does, a file has its old content or the new one, never
a mix. Files of lines are filtered and sorted in bounded memory.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import shutil
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from mlxrun.core.durable_writes import sync_file, sync_folder, sync_handle
from mlxrun.core.errors import DiskFailed, JobError
from mlxrun.core.text_files import open_regular

# A quota or a limit of the process looks like a full disk to a writer, and is mended like one.
_DISK_FAILURES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def name_output(job: str) -> str:
    """Return the name of the output beside a job file of this name."""
    return job.removesuffix(".jsonl") + ".out.jsonl"


class JobPaths:
    """All files of one job. Its output goes to `out`, or beside the job file. JobError if it cannot be
    written there, or if `job` has no name."""

    def __init__(self, job: Path, out: Path | None = None) -> None:
        if not job.name:  # of `.` and `/`: there is nothing beside them
            raise JobError(f"{job}: cannot read the job file: {os.strerror(errno.EISDIR)}")
        self.job = job
        self.out = out or job.with_name(name_output(job.name))
        if out is not None and os.path.realpath(out) == os.path.realpath(job):
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
        # Partial answers, conversations and the prefix cache of the job exist only while lines are left.
        self.answers = self.folder / "answers.jsonl"
        self.turns = self.folder / "turns.jsonl"
        self.cache = self.folder / "cache"

    def _find_problem(self) -> str:
        """Why the output cannot be where it should be; empty if it can."""
        if str(self.out) == "-":  # which other commands take for standard output
            return "answers are kept in a file, and not written to standard output"
        if not self.out.parent.is_dir():
            return f"its folder {self.out.parent} does not exist"
        if not self.out.exists() or self.out.is_file():
            return ""
        return "it is a folder" if self.out.is_dir() else "it is not a regular file"

    def find_twin(self) -> Path | None:
        """Find the manifest of a run beside this one whose failed lines are in the same file, as those of
        X.jsonl and X.out.jsonl are. None if there is none."""
        stem = self.errors.name.removesuffix(".errors.jsonl")
        folders = [self.out.with_name(f"{stem}{end}.run") for end in ("", ".out", ".jsonl", ".out.jsonl")]
        manifests = (each / self.manifest.name for each in folders if each != self.folder)
        return next(filter(Path.is_file, manifests), None)

    def has_answers(self) -> bool:
        """Whether earlier runs have left answers or errors."""
        return any(path.exists() and path.stat().st_size for path in (self.out, self.errors))

    def set_outputs_aside(self) -> Path | None:
        """Move the files of earlier runs to a new folder below `earlier`, and return it. If they have no
        answers, delete them and return None."""
        folder = self._make_dated_folder() if self.has_answers() or self.dropped.exists() else None
        # Answers are moved before the journal that claims them: a kill in between loses none.
        files = (self.out, self.errors, self.dropped, self.journal, self.manifest, self.scores, self.timings)
        for path in files:
            with wrap_write_errors(path):
                if folder is None:
                    path.unlink(missing_ok=True)
                elif path.exists():
                    path.rename(folder / path.name)
        for path in (self.status, self.answers, self.turns):
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
    """Turn an OSError into a JobError that says how to continue; into DiskFailed if the disk, not the path,
    is to blame. `begun`: whether there may be finished lines."""
    try:
        yield
    except OSError as error:
        kept = ". Finished lines are kept; once this is fixed, the next run continues from there"
        reason = f"{error.strerror or error}{kept if begun else ''}"
        kind = DiskFailed if error.errno in _DISK_FAILURES else JobError
        raise kind(f"{path}: cannot be written: {reason}") from error


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Create a folder and hold its lock; JobError if another process holds it. A new folder is removed if the
    block writes nothing into it."""
    is_old, lock = folder.exists(), folder / "lock"
    with wrap_write_errors(folder, begun=is_old):
        folder.mkdir(exist_ok=True)
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(handle), os.stat(lock)):
            raise OSError  # its folder was removed since it was opened
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
        with suppress(OSError):
            if not is_old and os.listdir(folder) == [lock.name]:
                lock.unlink()
                folder.rmdir()
        os.close(handle)


class Appender:
    """A file that the first `append` creates. JobError if it cannot be written; a failed `append` leaves
    nothing in it. `begun`: as of `wrap_write_errors`."""

    def __init__(self, path: Path, *, begun: bool = True) -> None:
        self.path = path
        self._begun = begun
        self._handle: int | None = None

    def append(self, data: bytes) -> None:
        """Append `data`, completely or not at all."""
        with wrap_write_errors(self.path, begun=self._begun):
            if self._handle is None:
                self._handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                sync_folder(self.path.parent)
            size = os.fstat(self._handle).st_size
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(self._handle, rest) :]
            except OSError:
                os.ftruncate(self._handle, size)  # no torn line stays behind a full disk
                raise

    def sync(self) -> None:
        """Make what was written durable."""
        if self._handle is not None:
            with wrap_write_errors(self.path, begun=self._begun):
                sync_handle(self._handle)

    def close(self) -> None:
        """Close the file; the next `append` opens it again."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def delete(self) -> None:
        """Delete the file, if that is possible."""
        self.close()
        with suppress(OSError):
            self.path.unlink(missing_ok=True)


def filter_lines(
    path: Path,
    temp: Path,
    rewrite: Callable[[bytes], bytes | None],
    before_replace: Callable[[], object] = lambda: None,
) -> None:
    """Replace each line of `path` by `rewrite(line)`; None removes it. The file is replaced only if a line
    changes; `before_replace` is called right before. If only an incomplete last line is removed, the file is
    truncated in place."""
    if not path.exists():
        return
    path, temp = _follow_link(path, temp)
    new: BinaryIO | None = None
    good = 0  # bytes of the old file that stay as they are
    with open_regular(path) as old, ExitStack() as files:
        for data in old:
            new_line = rewrite(data)
            if new is None and new_line != data:
                if new_line is None and not data.endswith(b"\n"):
                    return os.truncate(path, good)
                shutil.copyfile(path, temp)
                new = files.enter_context(temp.open("r+b"))
                new.truncate(good)
                new.seek(good)
            if new is not None:
                new.write(new_line or b"")
            good += len(data)
        if new is not None:
            before_replace()
            replace_file(new, temp, path)


def sort_lines(path: Path, temp: Path, find_position: Callable[[bytes], int], size: int) -> None:
    """Sort the lines of `path` by `find_position(line)`: a different number below `size` for each line."""
    if not path.exists():
        return
    path, temp = _follow_link(path, temp)
    starts = array("Q", bytes(8 * size))  # offset + 1 of the line at each position, 0 for none
    offset, last, in_order = 0, -1, True
    with open_regular(path) as old:
        for data in old:
            at = find_position(data)
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
            replace_file(new, temp, path)


def _follow_link(path: Path, temp: Path) -> tuple[Path, Path]:
    """The file that a symbolic link names, and a temporary file beside it, as it may be on another disk."""
    if not path.is_symlink():
        return path, temp
    path = Path(os.path.realpath(path))
    return path, path.with_name(temp.name)


def replace_file(new: BinaryIO, temp: Path, path: Path) -> None:
    """Rename `temp`, open as `new`, to `path` once its content is durable."""
    sync_file(new)
    temp.replace(path)
    sync_folder(path.parent)


def list_common_reasons(*errors: Path, read: int = 1000) -> list[tuple[str, int]]:
    """Count the reasons of the first `read` error records of each file, the most common first. What is no
    record, as after a kill, is left out."""
    found: Counter[str] = Counter()
    for path in filter(Path.exists, errors):
        with open_regular(path) as lines:
            for line in islice(lines, read):
                with suppress(ValueError, LookupError, TypeError, RecursionError):
                    found[str(json.loads(line)["error"]["message"])[:200]] += 1
    return found.most_common()
