"""Runs a reader of untrusted files in a process of its own, with limits of processor time and memory.

The libraries that read PDFs and videos may crash on a broken file, and no call of them can be interrupted. A
child ends as soon as nobody waits for it. Its output begins with a head: a width and a height, or 0 and the
length of an error message that follows.
"""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from mlxrun.core.child_memory import limit_own_memory, watch_memory
from mlxrun.core.errors import MediaError
from mlxrun.core.processes import STEP, RunningClock, start_module
from mlxrun.core.workers import end_by

NICENESS = 5
WALL_SECONDS = 600  # in which a child must end, also one that waits; not while this process is suspended
_HEAD = struct.Struct("<II")

Size = tuple[int, int]


@contextlib.contextmanager
def _end_after(seconds: float, end: Callable[[], None]) -> Iterator[None]:
    """Ends a child that waits, which takes no processor time."""
    done, clock = threading.Event(), RunningClock()
    last = clock.read() + seconds

    def watch() -> None:
        while not done.wait(step := min(STEP, seconds)):
            if clock.read(step) >= last:
                end()
                return

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        done.set()


@contextlib.contextmanager
def start_reader(
    module: str, arguments: Sequence[object], data: bytes, *, seconds: int, memory: int, name: str
) -> Iterator[IO[bytes]]:
    """The output of a child that runs a module of ours and has got the file; at the end, it has succeeded.
    `seconds` of processor time, bytes of memory. Raises MediaError about the `name` if it did not
    succeed, and Abandoned if nobody waits any more."""
    pipe = subprocess.PIPE
    with (
        start_module(
            module,
            *(seconds, memory, *arguments),
            environment={"OPENBLAS_NUM_THREADS": "1"},  # each thread of a pool takes address space
            stdin=pipe,
            stdout=pipe,
            stderr=subprocess.DEVNULL,
        ) as process,
        end_by(process.kill),
        _end_after(WALL_SECONDS, process.kill),
        watch_memory(process.pid, memory, process.kill),
    ):
        assert process.stdin is not None and process.stdout is not None
        is_complete = False
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin as source:
                source.write(data)
            yield process.stdout
            is_complete = True
        except EOFError:
            process.kill()
        if process.wait() != 0 or not is_complete:
            raise MediaError(
                f"the {name} cannot be read: its process was ended (it is broken, takes more than "
                f"{seconds} seconds of processor time, or more than {memory / 1e9:g} GB of "
                "memory)"
            )


def read_size(output: IO[bytes]) -> Size | None:
    """The size in the next head; None at the end of the output. Raises the child's MediaError."""
    head = output.read(_HEAD.size)
    if not head:
        return None
    if len(head) < _HEAD.size:
        raise EOFError
    width, height = _HEAD.unpack(head)
    if not width:
        raise MediaError(read_exactly(output, height).decode())
    return width, height


def read_exactly(output: IO[bytes], size: int) -> bytes:
    """The next bytes. Raises EOFError if there are fewer."""
    data = output.read(size)
    if len(data) < size:
        raise EOFError
    return data


# The child.


def run_child(read: Callable[..., None]) -> None:
    """Run the child, nice and within its limits. `read` gets the file, the output and the arguments of
    `start_reader` as texts; its MediaError is written in place of a head."""
    import resource

    seconds, memory = int(sys.argv[1]), int(sys.argv[2])
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    limit_own_memory(resource.RLIMIT_AS, memory)
    target = sys.stdout.buffer
    try:
        read(sys.stdin.buffer.read(), target, *sys.argv[3:])
    except MediaError as error:
        message = str(error).encode()
        target.write(_HEAD.pack(0, len(message)) + message)
    target.flush()


def write_size(target: IO[bytes], size: Size) -> None:
    """Write a head."""
    target.write(_HEAD.pack(*size))
