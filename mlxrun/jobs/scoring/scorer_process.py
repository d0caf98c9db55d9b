"""Calls functions that may run long in child processes, with limits of time and memory.

Schemas, patterns and users' code cannot be interrupted within a process. The first call starts a child, which
later calls use too. A child is killed if it takes too long, or if nobody waits for its result any more. It
ends by itself once this process has ended, however that was: a thread of the child sees at once that the
socket was closed. What a child has started ends with it, also in sessions of its own: on Linux processes are
found by a variable of their environment. Results are passed as JSON.

Limits count the time in which this process runs. If this process does not end the child, an alarm of the
kernel does; the alarm counts all time. If both processes were suspended, the call begins anew with another
child.
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
import struct
import subprocess
import sys
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, TypeVar

from mlxrun.core.child_memory import limit_own_memory, watch_memory
from mlxrun.core.processes import MARK, STEP, RunningClock, end_marked, start_module

START_SECONDS = 120.0  # in which a child must have imported what it needs, on a machine that is busy
MOST_SUSPENSIONS = 10  # of one call
EXIT_SECONDS = 5.0  # in which a child that has closed its socket must end, so that its exit code is known
HEAD = struct.Struct("<dQ")  # seconds that a call may take, and bytes of the request that follows
SIZE = struct.Struct("<Q")  # bytes of the reply that follows
READY = b"+"
NO_REPLY = "its process sent what is no result"  # as code that writes to all open files does
OUT_OF_MEMORY = 77  # exit code
_LACKS_MEMORY = (-signal.SIGKILL, -signal.SIGABRT)  # how a system, or a library, ends what gets no memory

T = TypeVar("T")
EndBy = Callable[[Callable[[], None]], AbstractContextManager[None]]
_end_by: ContextVar[EndBy] = ContextVar("end_by", default=lambda kill: nullcontext())


class ScorerEnded(Exception):
    """A call has ended its child process, or a limit has ended it; the text says which."""


class ScorerNotStarted(ScorerEnded):
    """The child ended, or was ended, before it was ready for a call."""


class _Suspended(Exception):
    """The alarm has ended a child that had not taken its time: it was suspended, with this process."""


@dataclass(frozen=True, slots=True)
class ScorerLimits:
    """The limits of one call: `seconds` that it may take, and bytes of memory of its process."""

    seconds: float
    memory: int


@contextlib.contextmanager
def end_scorers_by(end_by: EndBy) -> Iterator[None]:
    """Calls within the block enter `end_by`, which gets the function that kills their child, and may
    raise."""
    token = _end_by.set(end_by)
    try:
        yield
    finally:
        _end_by.reset(token)


class ScorerPool:
    """Children with the same limits, as many as there are calls at the same time. Idle children end with the
    pool. `prefix`: words of the command that starts them, such as a sandbox; `setup`: a call that each begins
    with, within the time of its start."""

    def __init__(
        self,
        limits: ScorerLimits,
        prefix: Sequence[str] = (),
        setup: tuple[str, *tuple[Any, ...]] | None = None,
    ) -> None:
        self.limits = limits
        self._prefix = prefix
        self._setup = None if setup is None else _dump_call(*setup)
        self._idle: list[_Child] = []
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._idle)

    def call(self, target: str, *arguments: Any) -> Any:
        """Call the function `target`, written as module:function, in a child and return its result.
        ScorerEnded if the process had to be ended; JSON's errors if the arguments cannot be passed."""
        request = _dump_call(target, *arguments)
        for _ in range(MOST_SUSPENSIONS):
            with contextlib.suppress(_Suspended):
                return self._call_child(request)
        raise ScorerEnded(f"it was suspended {MOST_SUSPENSIONS} times")

    def _call_child(self, request: bytes) -> Any:
        with self._lock:
            child = self._idle.pop() if self._idle else None
        child = child or _Child(self.limits, self._prefix, self._setup)
        try:
            with _end_by.get()(child.kill):
                reply = json.loads(child.call(request))
        except ValueError as error:
            child.close()
            raise ScorerEnded(NO_REPLY) from error
        except BaseException:
            child.close()
            raise
        with self._lock:
            self._idle.append(child)
        return reply

    def close(self) -> None:
        """End the idle children now."""
        _close_all(self._idle)


def _dump_call(target: str, *arguments: Any) -> bytes:
    return json.dumps([target, arguments]).encode()


def _close_all(idle: list[_Child]) -> None:
    """End children that have nothing to do: their pool is not used any more, or this process ends."""
    while idle:
        idle.pop().close()


class _Child:
    """One marked process, in a session of its own: Ctrl-C is not for it, and what it starts is killed with
    it."""

    def __init__(self, limits: ScorerLimits, prefix: Sequence[str] = (), setup: bytes | None = None) -> None:
        self._limits = limits
        self._setup = setup
        self._mark = uuid.uuid4().hex
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = start_module(
                "mlxrun.jobs.scoring.scorer_process",
                *(theirs.fileno(), limits.memory),
                prefix=prefix,
                environment={MARK: self._mark},
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._is_ready = False
        self._clock = RunningClock()

    def call(self, request: bytes) -> bytes:
        """The reply to a request, within the limits."""
        with watch_memory(self._process.pid, self._limits.memory, self.kill) as exceeded:
            try:
                return self._exchange(request)
            except ScorerEnded as error:
                if exceeded.is_set():
                    raise ScorerEnded(self._describe_excess()) from error
                raise

    def _exchange(self, request: bytes) -> bytes:
        end, seconds = float("inf"), START_SECONDS
        try:
            if not self._is_ready:
                self._receive(1, self._clock.read() + seconds)
                if self._setup is not None:
                    self._ask(self._setup, seconds, self._clock.read() + seconds)
                self._is_ready = True
            seconds = self._limits.seconds
            end = self._clock.read() + seconds
            return self._ask(request, seconds, end)
        except TimeoutError as error:
            raise self._make_error(f"it took more than {seconds:g} s") from error
        except (OSError, EOFError) as error:
            left = end - self._clock.read(STEP)
            reason = self._describe_end()
            if self._process.returncode == -signal.SIGALRM and left > 0:
                raise _Suspended from error
            raise self._make_error(reason) from error

    def _make_error(self, reason: str) -> ScorerEnded:
        return ScorerEnded(reason) if self._is_ready else ScorerNotStarted(f"at its start {reason}")

    def _ask(self, request: bytes, seconds: float, end: float) -> bytes:
        """The reply to a request that may take so many seconds."""
        self._send(HEAD.pack(seconds, len(request)) + request, end)
        return self._receive(SIZE.unpack(self._receive(SIZE.size, end))[0], end)

    def _send(self, data: bytes, end: float) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._within(end, partial(self._socket.send, rest)) :]

    def _receive(self, size: int, end: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self._within(end, partial(self._socket.recv, min(size - len(data), 1 << 20)))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def _within(self, end: float, wait: Callable[[], T]) -> T:
        """What an operation of the socket returns. TimeoutError if the clock comes to `end` before. EOFError
        if the process has ended, and what it started holds the socket."""
        has_ended = False
        while True:
            step = min(max(end - self._clock.read(), 1e-3), STEP)
            self._socket.settimeout(step)
            try:
                return wait()
            except TimeoutError:
                if has_ended:
                    raise EOFError from None
                if self._clock.read(step) >= end:
                    raise
                has_ended = self._process.poll() is not None  # it may have sent its reply just before

    def _describe_end(self) -> str:
        """Why the process has closed its socket."""
        limits = self._limits
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_SECONDS)
        code = self._process.returncode
        if code == -signal.SIGALRM:
            return f"it took more than {limits.seconds:g} s"
        if code == OUT_OF_MEMORY:
            return self._describe_excess()
        how = f"by {signal.Signals(-code).name}" if code and code < 0 else f"with exit code {code}"
        hint = f" (it may take {limits.memory / 1e9:g} GB of memory)" if code in _LACKS_MEMORY else ""
        return f"its process ended {how}{hint}"

    def _describe_excess(self) -> str:
        return f"it took more than {self._limits.memory / 1e9:g} GB of memory"

    def kill(self) -> None:
        """Kill the process, and what it has started."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the process, and wait until it has ended. What it has started is killed too."""
        self.kill()
        self._process.wait()
        end_marked(self._mark)
        self._socket.close()


# The child.

NICENESS = 5
_GRACE = 1.0  # seconds in which the parent ends a call that takes too long, before the kernel does


def main(channel: socket.socket, memory: int) -> None:
    """Answer requests in the child until the parent has gone. `memory`: bytes."""
    os.nice(NICENESS)
    limit_own_memory(resource.RLIMIT_DATA, memory)
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
        with contextlib.suppress(OSError):  # the parent has gone, and `_read` ends what was started
            channel.sendall(SIZE.pack(len(reply)) + reply)


def _read(source: BinaryIO, requests: queue.SimpleQueue[tuple[float, bytes]]) -> None:
    with contextlib.suppress(OSError):  # reset, if the parent has gone without reading a reply
        while len(head := source.read(HEAD.size)) == HEAD.size:
            seconds, size = HEAD.unpack(head)
            requests.put((seconds, source.read(size)))
    end_marked(os.environ.get(MARK, ""))
    os._exit(0)


def _answer(request: bytes) -> bytes:
    target, arguments = json.loads(request)
    module, _, name = target.partition(":")
    result = getattr(importlib.import_module(module), name)(*arguments)
    return json.dumps(result).encode()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
