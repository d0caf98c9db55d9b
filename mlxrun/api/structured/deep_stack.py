"""Calls a function on a thread with a deep stack, for libraries that recurse along their input.

A native stack that overflows ends the process, with everybody's requests: no exception can be caught.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

# llguidance takes 3 to 16 kB for each rule or `$ref` that leads to another, and the longest grammar that is
# compiled has some 60,000. It is address space; memory is used as far as the calls go.
STACK_BYTES = 512 << 20

T = TypeVar("T")
_stack_size_lock = threading.Lock()  # the size is a setting of the process


def call_on_deep_stack(function: Callable[[], T]) -> T:
    """Return or raise what the function does, on a thread of its own. Blocks until it has ended."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=run, name="deep stack")
    with _stack_size_lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return result.result()
