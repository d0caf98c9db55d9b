"""The child of scorer_process.py: calls the functions that it is told to, one after the other.

It ends with its parent: a thread waits for requests, and so sees at once that the socket was closed. The
kernel ends a call that takes too long, even one that never lets another thread run.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import resource
import signal
import socket
import sys
import threading
from typing import BinaryIO

from mlxrun.jobs.scoring.scorer_process import HEAD, OUT_OF_MEMORY, READY, SIZE

NICENESS = 5
_GRACE = 1.0  # seconds in which the parent ends a call that takes too long, before the kernel does


def main(channel: socket.socket, memory: int) -> None:
    """Answer requests until the parent has gone."""
    os.nice(NICENESS)
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    requests: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(channel.makefile("rb"), requests), daemon=True).start()
    channel.sendall(READY)
    while True:
        seconds, request = requests.get()
        signal.setitimer(signal.ITIMER_REAL, seconds + _GRACE)
        try:
            reply = _answer(request)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        signal.setitimer(signal.ITIMER_REAL, 0)
        channel.sendall(SIZE.pack(len(reply)) + reply)


def _read(source: BinaryIO, requests: queue.SimpleQueue[tuple[float, bytes]]) -> None:
    with contextlib.suppress(OSError):  # reset, if the parent has gone without reading a reply
        while len(head := source.read(HEAD.size)) == HEAD.size:
            seconds, size = HEAD.unpack(head)
            requests.put((seconds, source.read(size)))
    os._exit(0)


def _answer(request: bytes) -> bytes:
    target, arguments = json.loads(request)
    module, _, name = target.partition(":")
    result = getattr(importlib.import_module(module), name)(*arguments)
    return json.dumps(result).encode()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
