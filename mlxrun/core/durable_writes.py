"""Replaces files atomically, and makes what was written durable: on the disk itself, not in its cache.

On macOS `fsync` only hands the data to the disk, which may write it later and in another order. F_FULLFSYNC
asks the disk to write what it holds. File systems that do not know it, such as those of a network, get
`fsync`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

# What macOS answers where the file system cannot do it; anything else is a failure of the disk.
_UNKNOWN = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOTTY, errno.ENOSYS)


def sync_handle(handle: int) -> None:
    """Make what was written to this file, or renamed in this folder, durable. OSError if the disk fails."""
    command = getattr(fcntl, "F_FULLFSYNC", None)  # of macOS alone
    if command is not None:
        try:
            fcntl.fcntl(handle, command)
            return
        except OSError as error:
            if error.errno not in _UNKNOWN:
                raise
    os.fsync(handle)


def write_atomically(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace the content of `path` by `data`. A reader, or the next start, sees the old content or the new
    one. A symbolic link stays one: the file that it names is replaced. The file keeps its mode."""
    path = Path(os.path.realpath(path))
    temp = path.with_name(path.name + ".tmp")
    try:
        with temp.open("wb") as file:
            file.write(data)
            with suppress(OSError):
                os.chmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            if durable:
                sync_file(file)
        temp.replace(path)
    except OSError:  # a full disk would keep an empty file
        with suppress(OSError):
            temp.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def sync_file(file: BinaryIO) -> None:
    """Make what was written to an open file durable."""
    file.flush()
    sync_handle(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        sync_handle(handle)
    finally:
        os.close(handle)
