"""The one way out of a process that has loaded MLX.

Thread.join returns before the C++ thread_local destructors of MLX's threads have run. They race with the end
of the interpreter, and where they lose, the process aborts (134) whatever its code was. So the process ends
after all that others have registered with atexit, and before the interpreter is taken apart.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys

LOST = 3  # what was said last could not be written: the code of a command that has failed on it


class ProcessExit:
    """Make one before anything is imported that registers with atexit: what came first is called last.

    `code`: what the process is to end with. None: the interpreter ends it, as it does without MLX.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        atexit.register(self._leave)

    def _leave(self) -> None:
        if self.code is None or "mlx.core" not in sys.modules:
            return
        logging.shutdown()  # it may have been imported before
        os._exit(self.code if _flushed() else self.code or LOST)


def _flushed() -> bool:
    """Write what is still in buffers; whether all of it could be."""
    good = True
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except OSError as error:  # the disk is full, or whoever read it is gone
            good = False
            if stream is sys.stdout:
                os.write(2, f"mlxrun: standard output: {error.strerror}\n".encode())
    return good
