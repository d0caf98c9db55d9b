"""Ends a process that has loaded MLX with its exit code.

Thread.join returns before the C++ thread_local destructors of MLX's threads have run. They race with the
interpreter's shutdown, and if they lose, the process aborts (134) whatever its exit code was. So the process
ends after all functions that are registered with atexit, and before the interpreter shuts down.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys

OUTPUT_LOST = 3  # exit code if the command succeeded, but the last output could not be written


class ProcessExit:
    """Create it before any import that registers with atexit, as the first function is called last.

    `code`: the exit code of the process. None: the interpreter ends the process, as without MLX.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        atexit.register(self._exit)

    def _exit(self) -> None:
        if self.code is None or "mlx.core" not in sys.modules:
            return
        logging.shutdown()  # logging may have registered before this object did
        os._exit(self.code if _flush_streams() else self.code or OUTPUT_LOST)


def _flush_streams() -> bool:
    """Flush standard output and standard error; return whether that worked."""
    good = True
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except OSError as error:  # the disk is full, or the reader has closed the pipe
            good = False
            if stream is sys.stdout:
                os.write(2, f"mlxrun: standard output: {error.strerror}\n".encode())
    return good
