"""The batches of a server. Each is validated when it is created; then one batch runs at a time, oldest first.

    validating -> failed | in_progress -> finalizing -> completed; or cancelling -> cancelled; or expired

Message batches begin in progress, since their requests are validated as they run. A batch that is unfinished
when the server stops, or is killed, continues at the next start. A batch that is cancelled or expires has no
record of the lines that did not run; a message batch has a result for each.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from mlxrun.config.settings import Config
from mlxrun.core.errors import Draining, EngineDead, JobError, RequestError, describe_error
from mlxrun.core.visible_text import describe_trace
from mlxrun.core.workers import Lane
from mlxrun.jobs.records.run_paths import JobPaths
from mlxrun.jobs.run.job_service import JobService, LineProblem
from mlxrun.server.batches.batch import FINAL_STATUSES, Batch
from mlxrun.server.batches.durable_files import StorageError
from mlxrun.server.batches.results import publish_files
from mlxrun.server.batches.storage import Storage
from mlxrun.server.data_folder import claim_data_folder

log = logging.getLogger(__name__)
RETRY_SECONDS = 30.0  # before a batch whose files cannot be written is tried again
EXPIRY_SECONDS = 60.0  # between two removals of files that have expired
# A lane, as a task that is cancelled may end only when its thread has left the files alone: the storage is
# unlocked after it, or another task changes the same batch.
WRITERS = Lane("batches", 4)


class InvalidState(RequestError):
    """The status of the batch does not allow the operation."""

    http_status = 409
    code = "invalid_state"


class BatchQueue:
    """All batches of one server. They run from `start` to `close`."""

    def __init__(self, storage: Storage, retry_seconds: float = RETRY_SECONDS) -> None:
        self.storage = storage
        self._retry_seconds = retry_seconds
        self._batches: dict[str, Batch] = {}
        self._service: JobService | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}  # one for each batch that has not ended
        self._work: dict[str, asyncio.Task[None]] = {}  # what cancelling a batch interrupts
        self._opening = asyncio.Lock()
        self._closed = False
        self.is_open = False  # whether this process has locked the storage
        self._check_lock = asyncio.Lock()
        self._run_lock = asyncio.Lock()  # taken in the order of arrival
        self._running: Batch | None = None
        self._expiry: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Lock the storage and load its batches; does nothing if it is open. StorageError if that fails, for
        example because another process has locked the folder; Draining after `close`.
        """
        async with self._opening:
            if self._closed:
                raise Draining()
            if not self.is_open:
                await WRITERS.run(self.storage.open)
                self._batches = await WRITERS.run(self.storage.batches.load)
                self.is_open = True
                self._expiry = asyncio.create_task(self._remove_expired_files())
                self._start_tasks()

    async def start(self, service: JobService) -> None:
        """Run batches from now on, also those of an earlier server."""
        self._service = service
        try:
            await self.open()
        except StorageError as error:
            log.warning("files and batches are not served: %s", error)
        self._start_tasks()

    async def close(self) -> None:
        """Stop the running batch, keep its finished lines, and unlock the storage."""
        self._closed, self._service = True, None
        async with self._opening:  # what a request has begun to open is to be closed too
            pass
        tasks = [*self._tasks.values(), *((self._expiry,) if self._expiry is not None else ())]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await WRITERS.run(self.storage.close)

    def find(self, batch_id: str) -> Batch | None:
        return self._batches.get(batch_id)

    def list_batches(self) -> list[Batch]:
        """List all batches, newest first."""
        return sorted(self._batches.values(), key=lambda batch: batch.id.rpartition("_")[2], reverse=True)

    def describe(self) -> dict[str, Any]:
        """Describe for /v1/status the running batch (or None), and how many batches wait."""
        running = self._running
        waiting = [batch for batch in self._batches.values() if batch is not running]
        count = sum(batch.status in ("validating", "in_progress") for batch in waiting)
        return {"running": None if running is None else running.describe_progress(), "waiting": count}

    async def add(self, batch: Batch, content: Path) -> None:
        """Add a new batch. `content`: its input file, which may be deleted afterwards."""
        await WRITERS.run(self.storage.batches.create, batch, content)
        await WRITERS.run(self.storage.measure_batches)
        self._batches[batch.id] = batch
        self._start_tasks()

    async def cancel(self, batch: Batch) -> None:
        """End a batch early, and keep its finished lines. InvalidState if it has ended."""
        if batch.status in (*FINAL_STATUSES, "finalizing"):
            raise InvalidState(f"the batch is {batch.status} and cannot be cancelled any more")
        if batch.status != "cancelling":
            batch.status, batch.cancelling_at = "cancelling", self.storage.get_time()
            await self._save(batch)
        if batch.id in self._work:
            self._work[batch.id].cancel()
        self._start_tasks()

    async def delete(self, batch: Batch) -> None:
        """Delete a batch that has ended, and the results of a message batch. InvalidState if it has not
        ended. Files that clients know by their ids stay."""
        if not batch.ended:
            raise InvalidState(
                f"the batch is {batch.status}: cancel it first, and delete it once it has ended"
            )
        if batch.id in self._tasks:
            await asyncio.wait((self._tasks[batch.id],))  # which still removes its job
        if batch.is_message_batch and batch.output_file_id is not None:
            await WRITERS.run(self.storage.delete, batch.output_file_id)
        await WRITERS.run(self.storage.batches.delete, batch)
        self._batches.pop(batch.id, None)
        await WRITERS.run(self.storage.measure_batches)

    async def _remove_expired_files(self) -> None:
        while True:
            await asyncio.sleep(EXPIRY_SECONDS)
            try:
                await WRITERS.run(self.storage.remove_expired)
            except StorageError as error:
                log.warning("files that have expired cannot be removed: %s", error)

    # -- one batch ----------------------------------------------------------------------------------------

    def _start_tasks(self) -> None:
        """Start a task for each unfinished batch that has none."""
        if self._service is None or not self.is_open:
            return
        for batch in reversed(self.list_batches()):
            if not batch.ended and batch.id not in self._tasks:
                task = asyncio.create_task(self._process(self._service, batch))
                self._tasks[batch.id] = task
                task.add_done_callback(lambda _, name=batch.id: self._tasks.pop(name, None))  # type: ignore[misc]

    async def _process(self, service: JobService, batch: Batch) -> None:
        """Bring a batch to its end. The errors of one batch end here, so that they do not affect others."""
        while not batch.ended:
            try:
                final = {"cancelling": "cancelled", "finalizing": "completed"}.get(batch.status)
                final = final or await self._work_until_expiry(service, batch)
                if final is not None:
                    await self._end(service, batch, final)
                else:
                    await self._remove_job(batch)
            except EngineDead as error:
                log.warning("%s: %s; it continues when the server is started again", batch.id, error)
                return
            except (JobError, StorageError, OSError) as error:
                log.warning("%s: %s; it is tried again in %g s", batch.id, error, self._retry_seconds)
                await asyncio.sleep(self._retry_seconds)
            except Exception as error:
                trace = describe_trace(error.__traceback__)
                log.error("%s: a bug in mlxrun: %s", batch.id, type(error).__name__, extra=trace)
                await self._fail(batch, error)

    async def _work_until_expiry(self, service: JobService, batch: Batch) -> str | None:
        """Validate and run a batch until it is finished, cancelled or expired, and return its final status;
        None if it failed validation."""
        left = batch.expires_at - self.storage.now()
        if left <= 0:
            return "expired"
        work = self._work[batch.id] = asyncio.create_task(self._validate_and_run(service, batch))
        try:
            await asyncio.wait((work,), timeout=left)
            late = not work.done()
        finally:
            self._work.pop(batch.id)
            work.cancel()
            await asyncio.wait((work,))
        if work.cancelled():
            return "expired" if late and batch.status != "cancelling" else "cancelled"
        work.result()
        if batch.status == "cancelling":
            return "cancelled"
        return None if batch.ended else "completed"

    async def _validate_and_run(self, service: JobService, batch: Batch) -> None:
        job = self.storage.batches.find_job(batch)
        read_file = self.storage.make_reader(batch.owner)
        if batch.status == "validating":
            async with self._check_lock:
                checked = await service.check(job, batch.endpoint, read_file)
            if batch.status != "validating":
                return
            batch.request_counts["total"] = checked.total
            if checked.problems:
                first = checked.problems[0]  # without its message, which may quote the file
                where = f"line {first.line} is not a valid request"
                if first.line is None:
                    where = "the file has no lines" if first.code == "empty_file" else "the file is invalid"
                batch.fail(checked.problems, self.storage.get_time())
                log.info("%s: failed validation: %s (GET /v1/batches/%s says why)", batch.id, where, batch.id)
            else:
                batch.status, batch.in_progress_at = "in_progress", self.storage.get_time()
            await self._save(batch)
        if batch.status == "in_progress":
            async with self._run_lock:
                self._running = batch
                log.info("%s: started; lines: %d", batch.id, batch.request_counts["total"])
                try:
                    batch.set_counts(await service.run(job, batch.set_counts, read_file, batch.stamp))
                finally:
                    self._running = None

    async def _end(self, service: JobService, batch: Batch, status: str) -> None:
        """Publish the files of a batch that was completed, cancelled or expired."""
        if status == "completed":
            if batch.status != "finalizing":
                batch.status, batch.finalizing_at = "finalizing", self.storage.get_time()
                await self._save(batch)
        elif JobPaths(self.storage.batches.find_job(batch)).manifest.exists():  # it was started
            batch.set_counts(await service.repair(self.storage.batches.find_job(batch), batch.stamp))
        await WRITERS.run(publish_files, self.storage, batch, status)
        setattr(batch, f"{status}_at", self.storage.get_time())
        batch.status = status
        log.info("%s: %s: %s", batch.id, status, batch.format_counts())
        await self._save(batch)
        await self._remove_job(batch)

    async def _fail(self, batch: Batch, error: Exception) -> None:
        """End a batch after a bug, which another try would meet again. Its finished lines are published."""
        problem = LineProblem("internal_error", describe_error(error))
        batch.fail([problem], self.storage.get_time())
        try:
            await WRITERS.run(publish_files, self.storage, batch, "failed")
            await self._save(batch)
            await self._remove_job(batch)
        except (JobError, StorageError, OSError) as second:
            log.warning("%s: %s", batch.id, second)

    async def _remove_job(self, batch: Batch) -> None:
        await WRITERS.run(self.storage.batches.remove_job, batch)
        await WRITERS.run(self.storage.measure_batches)

    async def _save(self, batch: Batch) -> None:
        await WRITERS.run(self.storage.batches.save, batch)


def make_batch_queue(config: Config, environ: Mapping[str, str]) -> BatchQueue | None:
    """Make the queue of a server, in its folder for data; None if it has no batches."""
    if not config.apis.batches:
        return None
    folder = claim_data_folder(config.server, environ)
    return BatchQueue(Storage(folder, config.server.files_max_bytes))


BATCH_QUEUE = web.AppKey("batch_queue", BatchQueue)
