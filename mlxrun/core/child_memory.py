"""Limits the memory of a child process: by the kernel where it enforces a limit, else by watching the child.

macOS enforces neither RLIMIT_AS nor RLIMIT_DATA, and refuses some values of them. There the parent asks `ps`
for the child's memory every INTERVAL seconds, so a child may exceed its limit for that long. Where `ps` does
not answer, the child's memory is not limited; the log says so once.
"""

from __future__ import annotations

import functools
import logging
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

log = logging.getLogger(__name__)

INTERVAL = 0.2  # seconds between two readings
_PS_SECONDS = 10.0  # that `ps` may take on a busy machine


def has_kernel_limits() -> bool:
    """Whether the kernel ends a process that takes more than its limit, or refuses it the memory."""
    return sys.platform != "darwin"


def limit_own_memory(kind: int, memory: int) -> None:
    """In the child: set the kernel's limit, such as RLIMIT_AS, to this many bytes. A lower one stays."""
    if has_kernel_limits():
        with suppress(ValueError, OSError):
            resource.setrlimit(kind, (memory, memory))


@contextmanager
def watch_memory(pid: int, memory: int, end: Callable[[], None]) -> Iterator[threading.Event]:
    """In the parent: where the kernel does not limit the child, call `end` once it has more bytes than
    `memory` during the block. Yields an event that is set before that."""
    exceeded, done = threading.Event(), threading.Event()
    if has_kernel_limits():
        yield exceeded
        return

    def watch() -> None:
        while not done.wait(INTERVAL):
            used = read_memory(pid)
            if used is None:
                return
            if used > memory and not done.is_set():
                exceeded.set()
                end()
                return

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield exceeded
    finally:
        done.set()


def read_memory(pid: int) -> int | None:
    """Bytes that a process has in memory. None if it has ended, or if the system does not say."""
    try:
        # Without close_fds, macOS starts the program by posix_spawn: this process, which may hold a model and
        # Metal's threads, is not forked five times a second. The descriptors of Python are not inherited.
        found = subprocess.run(
            ["/bin/ps", "-o", "rss=", "-p", str(pid)],
            close_fds=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PS_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        _warn_once(str(error))
        return None
    with suppress(ValueError):
        return int(found.stdout) * 1024
    return None


@functools.cache
def _warn_once(reason: str) -> None:
    log.warning("the memory of processes that read files and score answers is not limited: %s", reason)
