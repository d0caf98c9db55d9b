"""Ends a command by SIGTERM as by Ctrl-C, also where it is reading a config or loading a model.

Python raises KeyboardInterrupt wherever the main thread is. In a finaliser it is printed and lost, and the
command would go on as if no signal had come; so it is raised again a moment later.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

DELAY = 0.02  # seconds until the finaliser has ended


def handle_interrupts() -> None:
    """Take SIGTERM as Ctrl-C, for the whole process, unless a command handles it itself. On the main thread
    only."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    before = sys.unraisablehook

    def report(unraisable: Any) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            before(unraisable)
            return
        timer = threading.Timer(DELAY, os.kill, (os.getpid(), signal.SIGTERM))
        timer.daemon = True
        timer.start()

    sys.unraisablehook = report
