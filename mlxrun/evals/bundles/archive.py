"""The .tar.gz file of a bundle. Equal files make equal bytes, and unpacking is safe whoever wrote it.

Everything is below one folder, with the digests of all files in SHA256SUMS (`sha256sum -c` reads it). Only
regular files inside the folder are unpacked, and no more bytes than the limits allow. Links, devices, and
paths that lead out, are refused.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from mlxrun.core.errors import JobError
from mlxrun.core.field_errors import quote
from mlxrun.jobs.records.run_paths import replace_file, wrap_write_errors

SUMS = "SHA256SUMS"
MOST_FILES = 50_000
MOST_BYTES = 1 << 30  # of all files; of a large archive so many times its own bytes
_MOST_RATIO = 100
_STEP = 1 << 16  # bytes that are read at a time
_LONGEST_HEADER = 1 << 20
_LEVEL = 6  # of compression


def write_archive(path: Path, name: str, files: Mapping[str, Path | bytes]) -> None:
    """Write files below the folder `name` of an archive, which is replaced at once. `files`: paths, or bytes,
    by their names in the archive. JobError if it cannot be written."""
    temp = path.with_name(path.name + ".tmp")
    for each in [each for each in (name, *files) if not each.isprintable()]:
        raise JobError(f"{path}: cannot be written: it would have the name {each!r}")
    sums = "".join(f"{_hash(files[each])}  {each}\n" for each in sorted(files))
    with wrap_write_errors(path, begun=False):
        try:
            with temp.open("wb") as raw:
                _write_members(raw, name, {**files, SUMS: sums.encode()})
                replace_file(raw, temp, path)
        finally:
            temp.unlink(missing_ok=True)


def _write_members(raw: BinaryIO, name: str, files: Mapping[str, Path | bytes]) -> None:
    stream = gzip.GzipFile("", "wb", _LEVEL, raw, mtime=0)
    with stream, tarfile.open(fileobj=stream, mode="w") as tar:
        for each in sorted(files):
            _add(tar, f"{name}/{each}", files[each])


def _hash(content: Path | bytes) -> str:
    with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _add(tar: tarfile.TarFile, name: str, content: Path | bytes) -> None:
    """Add a file without what differs between machines: owner, mode and time."""
    member = tarfile.TarInfo(name)
    member.size = len(content) if isinstance(content, bytes) else content.stat().st_size
    with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as file:
        tar.addfile(member, file)


class LimitedStream(gzip.GzipFile):
    """The unpacked bytes of an archive, no more than `limit`, and read in small parts."""

    def __init__(self, raw: BinaryIO, limit: int) -> None:
        super().__init__(fileobj=raw, mode="rb")
        self.limit = limit

    def read(self, size: int | None = -1) -> bytes:
        """Read `size` bytes. JobError beyond a limit."""
        if size is None or not 0 <= size <= _LONGEST_HEADER:
            raise JobError("has a header that is too long")
        data = super().read(size)
        if self.tell() > self.limit:
            raise JobError(f"unpacks to more than {self.limit:,} bytes")
        return data


def unpack_archive(path: Path, folder: Path) -> None:
    """Unpack an archive into an empty folder, and compare all digests. JobError if it is none that
    `write_archive` could have written, or if a file was changed."""
    try:
        with path.open("rb") as raw:
            limit = max(MOST_BYTES, _MOST_RATIO * path.stat().st_size)
            with LimitedStream(raw, limit) as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
                _check_sums(folder, _unpack(tar, folder, limit))
    except JobError as error:
        raise JobError(f"{path}: {error}") from error
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise JobError(f"{path}: is damaged, or no bundle: {error}") from error
    except OSError as error:
        raise JobError(f"{path}: cannot be unpacked: {error.strerror or error}") from error


def _unpack(tar: tarfile.TarFile, folder: Path, limit: int) -> dict[str, str]:
    """Write the files of an archive, without their common folder. Returns their digests by name."""
    found: dict[str, str] = {}
    tops: set[str] = set()
    for count, member in enumerate(tar):
        if count >= MOST_FILES:
            raise JobError(f"has more than {MOST_FILES:,} files")
        if member.isdir():
            continue
        top, name = _check_member(member, limit)
        tops.add(top)
        if len(tops) > 1:
            raise JobError("has more than one folder")
        if name in found:
            raise JobError(f"has a member twice: {quote(member.name)}")
        try:
            found[name] = _write_member(tar, member, folder / name)
        except gzip.BadGzipFile:
            raise
        except OSError as error:
            text = f"its member {quote(member.name)} cannot be unpacked: {error.strerror or error}"
            raise JobError(text) from error
    return found


def _write_member(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> str:
    """Write a member to a new file. Returns its digest."""
    content = tar.extractfile(member)
    assert content is not None, "it is a regular file"
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with target.open("xb") as file:
        while data := content.read(_STEP):
            digest.update(data)
            file.write(data)
    return digest.hexdigest()


def _check_member(member: tarfile.TarInfo, limit: int) -> tuple[str, str]:
    """The folder and the name of a member that may be unpacked. JobError for any other."""
    path = PurePosixPath(member.name)
    if not member.isreg() or member.issparse():
        raise JobError(f"has a member that is no regular file: {member.name!r}")
    if path.is_absolute() or ".." in path.parts or len(path.parts) < 2 or not member.name.isprintable():
        raise JobError(f"has a member with a path that is not allowed: {member.name!r}")
    if member.size > limit:
        raise JobError(f"unpacks to more than {limit:,} bytes")
    return path.parts[0], str(PurePosixPath(*path.parts[1:]))


def _check_sums(folder: Path, found: Mapping[str, str]) -> None:
    if SUMS not in found:
        raise JobError(f"is no bundle: it has no {SUMS}")
    if (folder / SUMS).stat().st_size > MOST_BYTES >> 5:
        raise JobError(f"has a {SUMS} that is too long")
    wanted = read_sums(folder)
    for name in sorted((wanted.keys() | found.keys()) - {SUMS}):
        if name not in found:
            raise JobError(f"{name} is missing")
        if wanted.get(name) != found[name]:
            raise JobError(f"{name} was changed: it does not have the digest that {SUMS} has of it")


def read_sums(folder: Path) -> dict[str, str]:
    """Read the digests in an unpacked folder by name. JobError if a line is none."""
    found = {}
    lines = (folder / SUMS).read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        digest, _, name = line.partition("  ")
        if not (digest and name):
            raise JobError(
                f"line {number} of {SUMS} is damaged: it is not a digest and a name: {quote(line)}"
            )
        found[name] = digest
    return found
