"""SIGINT and SIGTERM: the first ends a command in order, wherever it is; the second ends the process at once.

Python raises KeyboardInterrupt wherever the main thread is. In a finaliser it is printed and lost, so it is
raised again a moment later.

A main thread that waits inside a library runs no Python, and takes no notice of a signal. So the system
itself ends the process by the second one: when a signal is delivered, its action becomes the default one. For
a moment after the first, others are ignored, as shells and `timeout` send two at once.

`input` takes notice of a signal only if it comes while it waits for a key. `wake_main_thread` is for that.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

DELAY = 0.02  # seconds until the finaliser has ended
SETTLE = 0.5  # seconds in which further signals are the same one
TEARDOWN = 10.0  # seconds in which a command that has ended may close its files and threads
NUMBERS = (signal.SIGINT, signal.SIGTERM)
WAKE = signal.SIGURG  # which ends a wait, and which nobody needs
WAKE_AFTER = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # seconds, one after the other, as a busy machine is slow
_IS_LINUX = sys.platform.startswith("linux")
_RESET = -0x80000000 if _IS_LINUX else 0x4  # SA_RESETHAND
_MASK_BYTES = 128 if _IS_LINUX else 4


class _Action(ctypes.Structure):
    """struct sigaction of Linux and macOS."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_byte * _MASK_BYTES),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


class _Settling:
    """The time after the first signal. `timer` ends it."""

    timer: threading.Timer | None = None


def handle_interrupts() -> None:
    """Treat SIGTERM like Ctrl-C for the whole process, unless a command handles it itself. Call this on the
    main thread only."""
    _take_signals()
    before = sys.unraisablehook

    def report(unraisable: Any) -> None:
        if _is_ignored_signal(unraisable.exc_value):
            return
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            before(unraisable)
            return
        if _Settling.timer is not None:
            _Settling.timer.cancel()
        _take_signals()
        timer = threading.Timer(DELAY, os.kill, (os.getpid(), signal.SIGTERM))
        timer.daemon = True
        timer.start()

    sys.unraisablehook = report


def _is_ignored_signal(error: object) -> bool:
    """Whether Python reports a signal that came with the first one, and is ignored since: it would print a
    stack."""
    return isinstance(error, OSError) and "ignored due to race condition" in str(error)


def _take_signals() -> None:
    for number in NUMBERS:
        signal.signal(number, _interrupt)
        reset_when_delivered(number)


def _interrupt(number: int, frame: Any) -> None:
    expect_last_signal()
    raise KeyboardInterrupt


def expect_last_signal(seconds: float | None = None) -> None:
    """Let the next signal after so many seconds end the process (None: SETTLE), and ignore those before: the
    first one was taken. Call this on the main thread only."""
    if _Settling.timer is not None:
        _Settling.timer.cancel()
        _Settling.timer.join()
    for number in NUMBERS:
        signal.signal(number, signal.SIG_IGN)
    timer = threading.Timer(SETTLE if seconds is None else seconds, _use_default_actions)
    timer.daemon = True
    try:
        timer.start()
        _Settling.timer = timer
    except RuntimeError:  # there is no memory for a thread
        _use_default_actions()


def _use_default_actions() -> None:
    """On any thread, which `signal.signal` is not for."""
    library = ctypes.CDLL(None)
    library.signal.argtypes, library.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    for number in NUMBERS:
        library.signal(number, None)


def reset_when_delivered(number: int) -> None:
    """Keep the handler of this signal for one delivery. Systems that cannot do so keep it for all."""
    with suppress(AttributeError, OSError):
        library, action = ctypes.CDLL(None), _Action()
        if library.sigaction(number, None, ctypes.byref(action)) == 0:
            action.flags |= _RESET
            library.sigaction(number, ctypes.byref(action), None)


@contextmanager
def wake_main_thread() -> Iterator[None]:
    """Have no signal of the block wait until a key is pressed. Call this on the main thread only.

    `input` looks whether there was a signal, and then waits for a key. A signal in between is seen once a
    line ends. So a thread ends the wait a moment after each signal, several times, by a signal that does
    nothing else."""
    main, (reader, writer) = threading.get_ident(), socket.socketpair()
    writer.setblocking(False)

    def wake() -> None:
        with reader:
            while number := reader.recv(1):
                for seconds in WAKE_AFTER if number[0] != WAKE else ():
                    time.sleep(seconds)
                    signal.pthread_kill(main, WAKE)

    handler = signal.signal(WAKE, lambda number, frame: None)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=wake, name="mlxrun-wake", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writer.close()
        signal.signal(WAKE, handler)
