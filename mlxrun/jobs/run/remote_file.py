"""A file at one of fsspec's URLs (extra: `remote`), such as s3://bucket/a.jsonl or hf://datasets/org/name/a.jsonl.

A file is written whole or not at all. Object stores show an object once it is complete; elsewhere a file gets
its name at the end. Every problem is a ConfigError that says what is lacking, or a JobError.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlxrun.core.errors import ConfigError, JobError, MlxrunError

log = logging.getLogger(__name__)
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

    def list_siblings(self, prefix: str) -> list[str]:
        """List the names in the same folder that begin with `prefix`. JobError if it cannot be read."""
        with self._wrap_errors("read"):
            self._fs.invalidate_cache()
            paths = self._fs.ls(self._path.rpartition("/")[0], detail=False)
        names = (str(path).rstrip("/").rpartition("/")[2] for path in paths)
        return [name for name in names if name.startswith(prefix)]

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

    def write(self, content: bytes) -> None:
        """Replace the file by these few bytes. JobError if it cannot be written."""
        with self._wrap_errors("written"):
            self._pipe(self._path, content)

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
            self._pipe(path, b"")
            self._fs.rm_file(path)

    def _pipe(self, path: str, content: bytes) -> None:
        if not self._protocols & _WHOLE:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._fs.pipe_file(path, content)

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
