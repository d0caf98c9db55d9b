"""The batches of a server: what is said of each on disk, and who runs next. Files are looked at as they come;
then one batch runs at a time, the oldest first.

    validating -> failed | in_progress -> finalizing -> completed; or cancelling -> cancelled; or expired

What is unfinished when the server stops, however it stops, goes on at the next start. What a batch did not
run when it was cancelled or expired has no record in its files.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
import traceback
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from mlxrun.errors import Draining, EngineDead, JobError, RequestError, told_of
from mlxrun.server.batches.jobs import OVER, Batch, Checked, JobFiles, Jobs, Problem
from mlxrun.server.batches.storage import Storage, StorageError, link, read_json, write_json

log = logging.getLogger(__name__)
PAUSE = 30.0  # seconds before a batch whose files cannot be written is tried again
_ENDS = {"completed": "completed_at", "expired": "expired_at", "cancelled": "cancelled_at"}


class Conflict(RequestError):
    """The batch is in a state in which this cannot be done."""

    http_status = 409
    code = "invalid_state"


class BatchQueue:
    """All batches of one server. They run once `start` was told who runs them, until `close`."""

    def __init__(self, storage: Storage, pause: float = PAUSE) -> None:
        self.storage = storage
        self._pause = pause
        self._batches: dict[str, Batch] = {}
        self._jobs: Jobs | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}  # one for each batch that is not over
        self._works: dict[str, asyncio.Task[None]] = {}  # what cancelling a batch cuts short
        self._opening = asyncio.Lock()
        self._open = self._closed = False
        self._starting: asyncio.Task[None] | None = None
        self._checking = asyncio.Lock()
        self._turn = asyncio.Lock()  # who waits longest goes first
        self._running: Batch | None = None  # whose turn it is
        self._saving = threading.Lock()

    async def open(self) -> None:
        """Take the folder and read what is there; StorageError if that cannot be. Does nothing twice.
        Whoever asks for a batch calls it: a folder that another process held may be free by then."""
        if self._closed:
            raise Draining("the server is shutting down: try again soon")
        async with self._opening:
            if not self._open:
                await asyncio.to_thread(self._read)
                self._open = True
                self._go_on()

    def start(self, jobs: Jobs) -> None:
        """From now on batches run, those that an earlier server left too."""
        self._jobs = jobs
        self._go_on()
        if not self._open:
            self._starting = asyncio.create_task(self._try_to_open())

    async def close(self) -> None:
        """Stop what runs, keeping what is finished, and let go of the folder."""
        self._closed, self._jobs = True, None
        tasks = [*self._tasks.values(), *([self._starting] if self._starting else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        async with self._opening:
            await asyncio.to_thread(self.storage.close)

    async def _try_to_open(self) -> None:
        try:
            await self.open()
        except StorageError as error:
            log.warning("%s. Files and batches are not served", error)

    def find(self, batch_id: str) -> Batch | None:
        return self._batches.get(batch_id)

    def newest(self) -> list[Batch]:
        """All batches, the newest first."""
        return sorted(self._batches.values(), key=lambda batch: batch.id, reverse=True)

    def summary(self) -> dict[str, Any]:
        """For /v1/status: how far the one that runs is (None: there is none), and how many wait."""
        now, batches = self._running, self._batches.values()
        waiting = sum(each.status in ("validating", "in_progress") for each in batches if each is not now)
        return {"running": None if now is None else now.summary(), "waiting": waiting}

    async def add(self, batch: Batch) -> None:
        """Take a new batch in; its input file may be deleted from here on. Done as a whole, even if whoever
        asked for it goes away."""
        await asyncio.shield(self._add(batch))

    async def _add(self, batch: Batch) -> None:
        await asyncio.to_thread(self._make, batch)
        self._batches[batch.id] = batch
        self._go_on()

    async def cancel(self, batch: Batch) -> None:
        """End a batch early; what is finished is kept. Conflict if it is over. Done as a whole."""
        await asyncio.shield(self._cancel(batch))

    async def _cancel(self, batch: Batch) -> None:
        if batch.status in (*OVER, "finalizing"):
            raise Conflict(f"the batch is {batch.status} and cannot be cancelled any more")
        if batch.status != "cancelling":
            batch.status, batch.cancelling_at = "cancelling", int(self.storage.now())
            await self._save(batch)
        if batch.id in self._works:
            self._works[batch.id].cancel()
        self._go_on()

    # -- one batch ----------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        if self._jobs is None or not self._open:
            return
        for batch in reversed(self.newest()):
            if not batch.over and batch.id not in self._tasks:
                task = asyncio.create_task(self._drive(self._jobs, batch))
                self._tasks[batch.id] = task
                task.add_done_callback(partial(self._forget, batch.id))

    def _forget(self, batch_id: str, _: asyncio.Task[None]) -> None:
        self._tasks.pop(batch_id, None)

    async def _drive(self, jobs: Jobs, batch: Batch) -> None:
        """Bring a batch to its end, whatever is in the way. The border at which errors of one batch end."""
        while not batch.over:
            try:
                await self._once(jobs, batch)
            except EngineDead as error:
                log.warning("%s: %s; it goes on when the server is started again", batch.id, error)
                return
            except (JobError, StorageError, OSError) as error:
                log.warning("%s: %s; tried again in %g s", batch.id, error, self._pause)
                await asyncio.sleep(self._pause)
            except Exception as error:
                where = "".join(traceback.format_tb(error.__traceback__))
                log.error("%s: a bug in mlxrun: %s\n%s", batch.id, type(error).__name__, where)
                await self._give_up(jobs, batch, error)

    async def _once(self, jobs: Jobs, batch: Batch) -> None:
        """One try. Where it was cut short is taken from the batch's status."""
        ended = {"cancelling": "cancelled", "finalizing": "completed"}.get(batch.status)
        if ended is None:
            ended = await self._worked(jobs, batch)
        if ended is not None:
            await self._end(jobs, batch, ended)
        else:
            await self._tidy(batch)

    async def _worked(self, jobs: Jobs, batch: Batch) -> str | None:
        """How the work on a batch ended; None if it was refused."""
        left = batch.expires_at - self.storage.now()
        if left <= 0:
            return "expired"
        work = self._works[batch.id] = asyncio.create_task(self._work(jobs, batch))
        try:
            await asyncio.wait((work,), timeout=left)
            late = not work.done()
        finally:
            self._works.pop(batch.id)
            work.cancel()
            await asyncio.wait((work,))
        if work.cancelled():
            return "expired" if late and batch.status != "cancelling" else "cancelled"
        work.result()
        if batch.status == "cancelling":
            return "cancelled"
        return None if batch.over else "completed"

    async def _work(self, jobs: Jobs, batch: Batch) -> None:
        job = self._job(batch)
        if batch.status == "validating":
            async with self._checking:
                checked = await jobs.check(job, batch.endpoint)
            if batch.status != "validating":
                return
            problems = [_problem(each) for each in checked.problems] or _empty(checked)
            batch.request_counts["total"] = checked.total
            now = int(self.storage.now())
            if problems:
                batch.refuse(problems, now)
                log.info("%s: failed validation; the first problem: %s", batch.id, _brief(problems[0]))
            else:
                batch.status, batch.in_progress_at = "in_progress", now
            await self._save(batch)
        if batch.status == "in_progress":
            async with self._turn:
                self._running = batch
                log.info("%s: begins: %s", batch.id, batch.tally)
                try:
                    batch.count(await jobs.run(job, batch.count))
                finally:
                    self._running = None

    async def _end(self, jobs: Jobs, batch: Batch, status: str) -> None:
        """Hand out what there is, and tidy up."""
        files = jobs.files(self._job(batch))
        if status == "completed":
            if batch.status != "finalizing":
                batch.status, batch.finalizing_at = "finalizing", int(self.storage.now())
                await self._save(batch)
        elif files.manifest.exists():  # it was begun
            batch.count(await jobs.settle(self._job(batch)))
        await asyncio.to_thread(self._hand_out, batch, files)
        setattr(batch, _ENDS[status], int(self.storage.now()))
        batch.status = status
        log.info("%s: %s: %s", batch.id, status, batch.tally)
        await self._save(batch)
        await self._tidy(batch)

    async def _give_up(self, jobs: Jobs, batch: Batch, error: Exception) -> None:
        """A bug: nothing says that another try would do better. What is finished is handed out."""
        problem = {"code": "internal_error", "message": told_of(error), "line": None, "param": None}
        batch.refuse([problem], int(self.storage.now()))
        try:
            await asyncio.to_thread(self._hand_out, batch, jobs.files(self._job(batch)))
            await self._save(batch)
            await self._tidy(batch)
        except (StorageError, OSError) as second:
            log.warning("%s: %s", batch.id, second)

    async def _tidy(self, batch: Batch) -> None:
        """Remove the job of a batch that is over: what stays of it is among the server's files."""
        await asyncio.to_thread(shutil.rmtree, self._job(batch).parent, ignore_errors=True)
        await asyncio.to_thread(self.storage.measure)

    # -- on disk, on worker threads -----------------------------------------------------------------------

    def _job(self, batch: Batch) -> Path:
        return self.storage.batch_folder(batch.id) / "job" / f"{batch.id}.jsonl"

    def _hand_out(self, batch: Batch, files: JobFiles) -> None:
        stem = batch.id.removeprefix("batch_")

        def adopt(path: Path, kind: str) -> str | None:
            name = f"{batch.id}_{kind}.jsonl"
            file = self.storage.adopt(path, f"file-{stem}-{kind}", name, batch.owner)
            return None if file is None else file.id

        batch.output_file_id = adopt(files.output, "output")
        batch.error_file_id = adopt(files.errors, "error")
        if files.manifest.exists():
            link(files.manifest, self.storage.batch_folder(batch.id) / "manifest.json")

    def _make(self, batch: Batch) -> None:
        job = self._job(batch)
        try:
            job.parent.mkdir(mode=0o700, parents=True)
            link(self.storage.content(batch.input_file_id), job)
            write_json(self._document(batch), asdict(batch))
            self.storage.measure()
        except OSError as error:
            shutil.rmtree(job.parent.parent, ignore_errors=True)
            raise StorageError(f"{job.parent}: cannot be written: {error.strerror or error}") from error

    def _document(self, batch: Batch) -> Path:
        return self.storage.batch_folder(batch.id) / "batch.json"

    async def _save(self, batch: Batch) -> None:
        def write() -> None:
            with self._saving:  # what is said last is what stays
                write_json(self._document(batch), asdict(batch))

        await asyncio.to_thread(write)

    def _read(self) -> None:
        self.storage.open()
        self._batches.clear()
        for folder in self.storage.batch_folders():
            document = folder / "batch.json"
            if not document.exists():  # killed before anybody was told of it
                shutil.rmtree(folder, ignore_errors=True)
                continue
            try:
                batch = Batch(**read_json(document))
            except TypeError:
                log.warning("%s: not a batch of this version; it is passed over", document)
                continue
            self._batches[batch.id] = batch
            if batch.over:
                shutil.rmtree(folder / "job", ignore_errors=True)


def _problem(found: Problem) -> dict[str, Any]:
    return {"code": found.code, "message": found.message, "line": found.line, "param": found.param}


def _brief(problem: dict[str, Any]) -> str:
    """Its message may quote the file, which is not for the log."""
    return problem["code"] if problem["line"] is None else f"{problem['code']} in line {problem['line']}"


def _empty(checked: Checked) -> list[dict[str, Any]]:
    if checked.total:
        return []
    return [{"code": "empty_file", "message": "the file has no lines", "line": None, "param": None}]
