"""A job whose file, output or both are at URLs. It runs on copies in a folder of this machine, the *spool*.

The job file is fetched if it has changed. When the run ends, however it ends, its files are published; the
output comes last, so where it is, all else is. The spool stays, and the same command continues there. On
another machine the command continues from the published files. While a machine publishes, a file beside the
others, its *claim*, keeps other machines from doing so.

Every problem is a ConfigError that says what is lacking, or a JobError.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mlxrun.core.durable_writes import write_atomically
from mlxrun.core.errors import JobError, MlxrunError
from mlxrun.core.limited_json import load_json
from mlxrun.core.text_files import stamp_file
from mlxrun.jobs.records.manifest import hash_file
from mlxrun.jobs.records.run_paths import JobPaths, lock_folder, name_output, wrap_write_errors
from mlxrun.jobs.run.remote_file import RemoteFile, is_url

log = logging.getLogger(__name__)
_STATE = "published.json"
_CLAIM = "publishing-"  # the beginning of names of claims
Say = Callable[[str], None]


@contextmanager
def open_paths(
    job: str, out: str | None, spool: Path, say: Say, *, publish: bool = True
) -> Iterator[JobPaths]:
    """Give the files of a job on this machine while it runs, and publish them at the end. `spool`: the folder
    with the copies of all such jobs; `publish`: False fetches and publishes no output. ConfigError or
    JobError if a URL cannot be read or written."""
    if not is_url(job) and (out is None or not is_url(out)):
        yield JobPaths(Path(job), None if out is None else Path(out))
        return
    remote = RemoteJob(job, out, spool)
    with wrap_write_errors(remote.folder):
        remote.folder.mkdir(parents=True, exist_ok=True)
    with lock_folder(remote.folder):
        paths = remote.fetch(say, with_output=publish)
        if not publish:
            yield paths
            return
        try:
            yield paths
        except BaseException:
            try:
                remote.publish(say)
            except MlxrunError as error:
                log.warning("%s", error)
            raise
        remote.publish(say)


class _OutputChanged(JobError):
    """Somebody else has published an output."""


class RemoteJob:
    """One job at URLs, and its copies in `folder`."""

    def __init__(self, job: str, out: str | None, spool: Path) -> None:
        self._job = RemoteFile(job) if is_url(job) else None
        local_job = Path(job)
        if self._job is not None and out is None:
            out = self._job.find_sibling(name_output(self._job.name)).url
        assert out is not None
        self._out = RemoteFile(out) if is_url(out) else None
        if job == out:
            raise JobError(f"{out}: the output would replace the job file; give another -o")
        named = json.dumps([job if self._job is not None else str(local_job.resolve()), out])
        digest = hashlib.sha256(named.encode()).hexdigest()[:12]
        self.folder = spool / f"{(self._job or self._out or local_job).name[:80]}-{digest}"
        self._local_job = local_job if self._job is None else self.folder / "job" / self._job.name
        self._local_out = Path(out) if self._out is None else self.folder / self._out.name
        self._state = self._read_state()
        self._paths: JobPaths

    def fetch(self, say: Say, *, with_output: bool) -> JobPaths:
        """Copy the job file. Copy the output and the journal too, if this machine has none of them."""
        if self._out is not None and with_output:
            self._out.check_writable()
        if self._job is not None:
            self._fetch_job(self._job, say)
        self._paths = JobPaths(self._local_job, self._local_out)
        if self._out is not None and with_output:
            self._fetch_output(self._out, say)
        return self._paths

    def _fetch_job(self, job: RemoteFile, say: Say) -> None:
        stamp = job.read_stamp()
        if stamp is None:
            raise JobError(f"{job.url}: there is no such file")
        names_version = len(json.loads(stamp)) > 1  # it tells more than the size
        if self._local_job.exists() and names_version and self._state.get("job") == stamp:
            return
        say(f"fetching {job.url}")
        with wrap_write_errors(self._local_job):
            self._local_job.parent.mkdir(exist_ok=True)
            job.download(self._local_job)
        self._save_state(job=stamp)

    def _fetch_output(self, out: RemoteFile, say: Say) -> None:
        """Continue what another machine has published. JobError if this one has other answers."""
        stamp = out.read_stamp()
        if stamp is None or self._is_own(out, stamp):
            return
        if self._paths.journal.exists():
            raise JobError(
                f"{out.url}: it was changed since this machine published it; {self.folder} has other answers "
                "for this job. Delete that folder to continue from what is there now, or give another -o"
            )
        say(f"continuing from {out.url}")
        with wrap_write_errors(self._paths.folder):
            self._paths.folder.mkdir(exist_ok=True)
            for remote, local in self._list_files(out):
                if remote.read_stamp() is not None:
                    remote.download(local)
        self._save_state(out=stamp)

    def _is_own(self, out: RemoteFile, stamp: str) -> bool:
        """Whether the output at the URL is what this machine has fetched or published last. After a
        publication that broke off, its content decides."""
        if stamp == self._state.get("out"):
            return True
        pending = self._state.get("pending")
        if not isinstance(pending, dict) or out.compute_digest() != pending["sha256"]:
            return False
        self._save_state(out=stamp, files=pending["files"], pending=None)
        return True

    def publish(self, say: Say) -> None:
        """Bring the URLs in line with the files here. A JobError says where all answers are."""
        if self._out is None or not self._paths.folder.exists():
            return
        try:
            if not self._list_changed(self._out):
                return
            with self._claim(self._out):
                self._upload(self._out, self._list_changed(self._out))
        except _OutputChanged:
            raise
        except MlxrunError as error:
            raise JobError(
                f"{error}. All answers are in {self.folder}; the same command publishes them, and runs no "
                "finished line again"
            ) from error
        if self._paths.out.exists():
            say(f"published: {self._out.url}")

    def _list_changed(self, out: RemoteFile) -> list[tuple[RemoteFile, Path]]:
        """The files that differ from what this machine has published. JobError if another one has published
        since."""
        stamp = out.read_stamp()
        is_own = stamp is not None and self._is_own(out, stamp)
        if stamp is not None and not is_own:
            raise _OutputChanged(
                f"{out.url}: it was changed while this job ran, and stays as it is now. All answers of this "
                f"job are in {self.folder}"
            )
        known = self._state.get("files", {}) if is_own else {}
        return [pair for pair in self._list_files(out) if stamp_file(pair[1]) != known.get(pair[1].name, ())]

    @contextmanager
    def _claim(self, out: RemoteFile) -> Iterator[None]:
        """Hold the claim of this machine. JobError if there is another one.

        Each machine writes its own before it looks for others, as not all stores create a file only if there
        is none. So of two that publish at once, one or both give up.
        """
        stale = self._state.get("claim")  # of a publication that was killed
        if isinstance(stale, str):
            self._find_claim(out, stale).remove()
        name = f"{_CLAIM}{secrets.token_hex(8)}"
        claim = self._find_claim(out, name)
        self._save_state(claim=name)
        claim.write(socket.gethostname().encode())
        try:
            others = [each for each in claim.list_siblings(_CLAIM) if each != name]
            if others:
                url = self._find_claim(out, others[0]).url
                raise JobError(
                    f"{out.url}: another machine is publishing it. If none is, one was stopped while it did; "
                    f"then delete {url}"
                )
            yield
        finally:
            try:
                claim.remove()
                self._save_state(claim=None)
            except MlxrunError as error:
                log.warning("%s; other machines publish nothing until it is deleted", error)

    def _find_claim(self, out: RemoteFile, name: str) -> RemoteFile:
        return out.find_sibling(f"{self._paths.folder.name}/{name}")

    def _upload(self, out: RemoteFile, changed: Sequence[tuple[RemoteFile, Path]]) -> None:
        stamps = {local.name: stamp_file(local) for _, local in self._list_files(out)}
        self._save_state(pending={"sha256": hash_file(self._paths.out), "files": stamps})
        for remote, local in changed:
            if local.exists():
                remote.upload(local)
            else:
                remote.remove()
        self._save_state(out=out.read_stamp(), files=stamps, pending=None)

    def _list_files(self, out: RemoteFile) -> list[tuple[RemoteFile, Path]]:
        """What is published, the output last. Paths beside it are the same as on this machine."""
        paths = self._paths
        files = (paths.errors, paths.timings, paths.scores, paths.manifest, paths.journal, paths.out)
        return [(out.find_sibling(str(file.relative_to(paths.out.parent))), file) for file in files]

    def _read_state(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            found = load_json((self.folder / _STATE).read_bytes())
            if isinstance(found, dict):
                return found
        return {}

    def _save_state(self, **values: Any) -> None:
        self._state |= values
        with wrap_write_errors(self.folder):
            write_atomically(self.folder / _STATE, json.dumps(self._state).encode())
