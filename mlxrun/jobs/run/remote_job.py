"""A job whose file, output or both are at URLs. It runs on copies in a folder of this machine, the *spool*.

The job file is fetched if it has changed. When the run ends, however it ends, its files are published; the
output comes last, so where it is, all else is. The spool stays, and the same command continues there. On
another machine the command continues from the published files.

URLs are those of fsspec (extra: `remote`), such as s3://bucket/a.jsonl or hf://datasets/org/name/a.jsonl. A
file is written whole or not at all. Object stores show an object once it is complete; elsewhere a file gets
its name at the end. Every problem is a ConfigError that says what is lacking, or a JobError.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mlxrun.core.durable_writes import write_atomically
from mlxrun.core.errors import ConfigError, JobError, MlxrunError
from mlxrun.core.limited_json import load_json
from mlxrun.jobs.records.manifest import hash_file
from mlxrun.jobs.records.run_paths import JobPaths, lock_folder, wrap_write_errors

log = logging.getLogger(__name__)
_STATE = "published.json"
Say = Callable[[str], None]
INSTALL = "pip install 'mlxrun[remote]'"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(://|::)")
_READ_ONLY = {"http", "https", "github", "data"}
# Protocols whose writes are seen whole. A rename there would be a copy.
_WHOLE = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "hf", "r2"}
# What tells one content of a file from another one, in the names of the file systems.
_VERSIONS = [
    *("ETag", "etag", "mtime", "LastModified", "last_modified", "created", "updated", "modified"),
    *("generation", "md5Hash", "blob_id", "sha256", "version_id", "VersionId"),
]


def is_url(text: str) -> bool:
    """Whether a path is one of fsspec's URLs, not a file of this machine."""
    return _URL.match(text) is not None


class RemoteFile:
    """The file at one URL. ConfigError if no installed package can reach such URLs."""

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            fsspec = importlib.import_module("fsspec.core")
        except ImportError as error:
            raise ConfigError(f"{url}: URLs need fsspec, which is not installed: {INSTALL}") from error
        try:
            self._fs, self._path = fsspec.url_to_fs(url)
        except ImportError as error:  # its text names the package
            raise ConfigError(
                f"{url}: beside mlxrun[remote], a package for such URLs is needed: {error}"
            ) from error
        except ValueError as error:
            raise ConfigError(f"{url}: {error}") from error
        except Exception as error:
            raise ConfigError(f"{url}: {_describe(error)}") from error
        protocol = self._fs.protocol
        self._protocols = {protocol} if isinstance(protocol, str) else set(protocol)
        if not self._path.rpartition("/")[2]:
            raise ConfigError(f"{url}: it names no file")

    @property
    def name(self) -> str:
        """The last part of the path."""
        return str(self._path.rpartition("/")[2])

    def find_sibling(self, name: str) -> RemoteFile:
        """Return the file of this name (it may have folders) in the same folder."""
        return RemoteFile(self.url.rpartition("/")[0] + "/" + name)

    def read_stamp(self) -> str | None:
        """Read a text that changes with the content, as far as the file system tells. None if there is no
        file. JobError if the file cannot be read."""
        with self._wrap_errors("read"):
            self._fs.invalidate_cache()
            try:
                info = self._fs.info(self._path)
            except FileNotFoundError:
                return None
        if info.get("type") == "directory":
            raise JobError(f"{self.url}: it is a folder")
        found = {name: str(info[name]) for name in _VERSIONS if info.get(name) is not None}
        return json.dumps({"size": info.get("size"), **found}, sort_keys=True)

    def download(self, local: Path) -> None:
        """Copy the file to `local`, which is replaced once all bytes have come. JobError if there is no
        file."""
        temp = local.with_name(local.name + ".tmp")
        with self._wrap_errors("read"):
            self._fs.get_file(self._path, str(temp))
        temp.replace(local)

    def compute_digest(self) -> str:
        """Compute the SHA-256 of the content, in hex. JobError if it cannot be read."""
        with self._wrap_errors("read"), self._fs.open(self._path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def upload(self, local: Path) -> None:
        """Replace the file by a file of this machine. JobError if not all bytes arrive."""
        temp = self._path if self._protocols & _WHOLE else self._path + ".tmp"
        with self._wrap_errors("written"):
            if temp != self._path:
                self._fs.makedirs(self._path.rpartition("/")[0], exist_ok=True)
            self._fs.put_file(str(local), temp)
            if temp != self._path:
                self._fs.mv(temp, self._path)
            self._fs.invalidate_cache()
            size = self._fs.info(self._path).get("size")
        if size != local.stat().st_size:
            raise JobError(f"{self.url}: {size} bytes arrived of {local.stat().st_size}")

    def remove(self) -> None:
        """Delete the file, if it is there."""
        with self._wrap_errors("written"):
            if self._fs.exists(self._path):
                self._fs.rm_file(self._path)

    def check_writable(self) -> None:
        """Write and delete an empty file beside this one. ConfigError or JobError if nothing can be written
        there."""
        if self._protocols & _READ_ONLY:
            raise ConfigError(f"{self.url}: nothing can be written to such URLs; give another -o")
        if "memory" in self._protocols:
            log.warning("%s: it is in the memory of this process, and lost when the command ends", self.url)
        if "hf" in self._protocols:
            return  # each write is a commit there
        path = self._path + ".check"
        with self._wrap_errors("written"):
            if not self._protocols & _WHOLE:
                self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(path, b"")
            self._fs.rm_file(path)

    @contextmanager
    def _wrap_errors(self, done: str) -> Iterator[None]:
        """Turn what a file system raises, each its own kind, into a JobError."""
        try:
            yield
        except MlxrunError:
            raise
        except FileNotFoundError as error:
            if done == "written":  # where neither a folder nor a file can be made, such as below /proc
                raise JobError(f"{self.url}: it cannot be written: nothing can be created there") from error
            raise JobError(f"{self.url}: there is no such file or folder") from error
        except Exception as error:
            raise JobError(f"{self.url}: it cannot be {done}: {_describe(error)}") from error


def _describe(error: Any) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


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
            out = self._job.find_sibling(self._job.name.removesuffix(".jsonl") + ".out.jsonl").url
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
            files = self._list_files(self._out)
            stamps = {local.name: _stamp_file(local) for _, local in files}
            stamp = self._out.read_stamp()
            is_own = stamp is not None and self._is_own(self._out, stamp)
            if stamp is not None and not is_own:
                raise _OutputChanged(
                    f"{self._out.url}: it was changed while this job ran, and stays as it is now. All "
                    f"answers of this job are in {self.folder}"
                )
            known = self._state.get("files", {}) if is_own else {}
            changed = [pair for pair in files if stamps[pair[1].name] != known.get(pair[1].name, ())]
            if not changed:
                return
            self._save_state(pending={"sha256": hash_file(self._paths.out), "files": stamps})
            for remote, local in changed:
                if local.exists():
                    remote.upload(local)
                else:
                    remote.remove()
            self._save_state(out=self._out.read_stamp(), files=stamps, pending=None)
        except _OutputChanged:
            raise
        except MlxrunError as error:
            raise JobError(
                f"{error}. All answers are in {self.folder}; the same command publishes them, and runs no "
                "finished line again"
            ) from error
        if self._paths.out.exists():
            say(f"published: {self._out.url}")

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


def _stamp_file(path: Path) -> list[int] | None:
    try:
        info = path.stat()
    except OSError:
        return None
    return [info.st_size, info.st_mtime_ns]
