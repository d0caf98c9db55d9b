"""Makes what was written to a file durable: on the disk itself, not in its cache.

On macOS `fsync` only hands the data to the disk, which may write it later and in another order. F_FULLFSYNC
asks the disk to write what it holds. File systems that do not know it, such as those of a network, get
`fsync`.
"""

from __future__ import annotations

import errno
import fcntl
import os

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
