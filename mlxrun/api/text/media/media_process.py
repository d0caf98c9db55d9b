"""Runs a reader of untrusted files in a process of its own, with limits of processor time and memory.

The libraries that read PDFs and videos may crash on a broken file, and no call of them can be interrupted. A
child ends as soon as nobody waits for it. Its output begins with a head of two little-endian uint32: width
and height, or 0 and the bytes of an error message that follows.
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
    """Start a child that runs one of our modules, write `data` to it, and return its output for the block.

    `seconds`: of processor time. `memory`: bytes. `name`: of the kind of file. MediaError if the child fails;
    Abandoned if nobody waits any more."""
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
    """Return the size in the next head; None at the end of the output. Raises the child's MediaError, and
    EOFError if the head is cut off."""
    head = output.read(_HEAD.size)
    if not head:
        return None
    if len(head) < _HEAD.size:
        raise EOFError
    width, height = _HEAD.unpack(head)
    if not width:
        raise MediaError(read_exactly(output, height).decode())
    return width, height


def read_first_size(output: IO[bytes]) -> Size:
    """Return the size in the head that must come. EOFError if none does; else raises as `read_size`."""
    size = read_size(output)
    if size is None:
        raise EOFError
    return size


def read_exactly(output: IO[bytes], size: int) -> bytes:
    """Return the next `size` bytes. EOFError if there are fewer."""
    data = output.read(size)
    if len(data) < size:
        raise EOFError
    return data


# The child.


def run_child(read: Callable[..., None]) -> None:
    """Run the child with low priority and within its limits. `read` gets the file's bytes, the output and the
    arguments of `start_reader` as texts. If it raises MediaError, the message is written with its head."""
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
