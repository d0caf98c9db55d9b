"""Batches of both APIs: their state, OpenAI's object for it, and their folders on disk.

ID/batch.json    the batch
ID/job/          its input and the files of its run, until it has ended
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlxrun.jobs.run.job_service import BatchStamp, JobCounts, LineProblem
from mlxrun.server.batches.durable_files import (
    StorageError,
    convert_errors,
    link_file,
    read_object,
    write_json,
)

log = logging.getLogger(__name__)
FINAL_STATUSES = ("completed", "failed", "expired", "cancelled")
STATUSES = ("validating", "in_progress", "finalizing", "cancelling", *FINAL_STATUSES)
COUNTS = ("total", "completed", "failed")
_OWN_FIELDS = ("owner", "is_message_batch", "output_expires_after")  # which no API shows


@dataclass(slots=True)
class Batch:
    """A batch of either API. Times are seconds since 1970. `owner`: the name of the API key that created it;
    empty if there are no keys. `output_expires_after`: seconds from the end until its files expire; None:
    never.

    `is_message_batch`: Anthropic's API has made it. Then there is no input file, and `output_file_id` is the
    file of its results.
    """

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    owner: str = ""
    metadata: dict[str, str] | None = None
    status: str = "validating"
    errors: dict[str, Any] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    is_message_batch: bool = False
    output_expires_after: int | None = None
    request_counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))

    @property
    def is_whole(self) -> bool:
        """Whether its status and counts are valid. They may not be if its document was damaged."""
        return self.status in STATUSES and self.request_counts.keys() == {*COUNTS}

    @property
    def ended(self) -> bool:
        return self.status in FINAL_STATUSES

    @property
    def stamp(self) -> BatchStamp:
        """What distinguishes its answers from those of other batches."""
        return BatchStamp(self.id, self.created_at)

    def describe(self) -> dict[str, Any]:
        """Build OpenAI's batch object."""
        found = asdict(self)
        return {"object": "batch", **{name: found[name] for name in found if name not in _OWN_FIELDS}}

    @property
    def ended_at(self) -> int | None:
        """The time when it ended; None if it has not."""
        return self.completed_at or self.failed_at or self.expired_at or self.cancelled_at

    def describe_progress(self) -> dict[str, Any]:
        """Describe the progress for /v1/status."""
        counts = self.request_counts
        progress = {"id": self.id, "done": counts["completed"]}
        return progress | {name: counts[name] for name in ("failed", "total")}

    def format_counts(self) -> str:
        """Describe the progress for the log."""
        return "{completed} of {total} lines done, {failed} failed".format(**self.request_counts)

    def set_counts(self, counts: JobCounts) -> None:
        self.request_counts = {"total": counts.total, "completed": counts.done, "failed": counts.failed}

    def fail(self, problems: Sequence[LineProblem], now: int) -> None:
        """End the batch as failed, for these reasons. `now`: seconds since 1970."""
        self.errors = {"object": "list", "data": [asdict(problem) for problem in problems]}
        self.status, self.failed_at = "failed", now


MIN_COUNTED_BYTES = 4096  # that each file and batch counts as, or there could be any number of small ones


class BatchFolders:
    """The folders of all batches, below `root`. All methods block: call them on a worker thread. They raise
    StorageError or OSError if the disk fails."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._save_lock = threading.Lock()

    def find_job(self, batch: Batch) -> Path:
        """Return the path of a batch's job file."""
        return self.root / batch.id / "job" / f"{batch.id}.jsonl"

    def create(self, batch: Batch, content: Path) -> None:
        """Create the folder of a batch. `content`: its input file, which may be deleted afterwards."""
        job = self.find_job(batch)
        try:
            job.parent.mkdir(mode=0o700, parents=True)
            link_file(content, job)
            self.save(batch)
        except OSError as error:
            shutil.rmtree(job.parent.parent, ignore_errors=True)
            raise StorageError(f"{job.parent}: cannot be written: {error.strerror or error}") from error

    def save(self, batch: Batch) -> None:
        """Write the state of a batch."""
        with self._save_lock:  # so that the newest state is written last
            write_json(self.root / batch.id / "batch.json", asdict(batch))

    def load(self) -> dict[str, Batch]:
        """Load all batches, by id. Incomplete folders, and jobs of ended batches, are removed."""
        batches = {}
        for folder in self._list_folders():
            document = folder / "batch.json"
            if not document.exists():  # the server was killed before it answered the request
                shutil.rmtree(folder, ignore_errors=True)
                continue
            batch = read_object(document, Batch)
            if batch is None or batch.id != folder.name or not batch.is_whole:
                log.warning("%s: not a batch of this version of mlxrun; it is skipped", document)
                continue
            batches[batch.id] = batch
            if batch.ended:
                shutil.rmtree(folder / "job", ignore_errors=True)
        return batches

    def add_manifest(self, batch: Batch, manifest: Path) -> None:
        """Keep the manifest of a job that will be removed."""
        if manifest.exists():
            link_file(manifest, self.root / batch.id / "manifest.json")

    def delete(self, batch: Batch) -> None:
        """Delete a batch that has ended. If that is interrupted, the next start completes it."""
        folder = self.root / batch.id
        with convert_errors(folder):
            (folder / "batch.json").unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)

    def remove_job(self, batch: Batch) -> None:
        """Remove the job of a batch that has ended. Its results are among the server's files."""
        shutil.rmtree(self.find_job(batch).parent, ignore_errors=True)

    def count_bytes(self) -> int:
        """Count the bytes of all jobs, without files that are among the server's files too."""
        return sum(
            max(MIN_COUNTED_BYTES, _count_own_bytes(folder / "job")) for folder in self._list_folders()
        )

    def _list_folders(self) -> list[Path]:
        with convert_errors(self.root):
            return sorted(path for path in self.root.glob("*batch_*") if path.is_dir())


def _count_own_bytes(folder: Path) -> int:
    """Bytes below a folder, without files that have a second name elsewhere."""
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # it was removed meanwhile
                found = os.lstat(os.path.join(base, name))
                total += found.st_size if found.st_nlink == 1 else 0
    return total
