"""status.json: the progress of a job, which other programs may read while it runs.

A thread replaces it every WRITE_EVERY seconds from the start of a run to its end, however busy the event loop
is.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path
from types import TracebackType

from mlxrun.core.durable_writes import write_atomically
from mlxrun.jobs.run.progress import ProgressMeter, format_now

log = logging.getLogger(__name__)
WRITE_EVERY = 0.25  # seconds; the tokens of a killed run after its last status.json are not counted


class StatusFile:
    """Writes the file while its `with` block runs. Write errors are logged once and ignored."""

    def __init__(self, path: Path, meter: ProgressMeter, run: int = 1) -> None:
        self._path = path
        self._meter = meter
        self._head = {"pid": os.getpid(), "run": run, "started": format_now("milliseconds")}
        self._state = "starting"
        self._failed = False
        self._writing = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mlxrun-status", daemon=True)

    def __enter__(self) -> StatusFile:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the last state: `done`, or the state that the block set before it raised, else `failed`."""
        self._closed.set()
        self._thread.join()
        if error is None:
            self.set_state("done")
        elif self._state in ("starting", "loading", "running"):
            self.set_state("failed")

    def set_state(self, state: str) -> None:
        """Change the state, and write it at once."""
        self._state = state
        self._write()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._write()
            self._closed.wait(WRITE_EVERY)

    def _write(self) -> None:
        with self._writing:
            status = {"state": self._state, **self._head, "updated": format_now("milliseconds")}
            status |= self._meter.build_status()
            try:
                write_atomically(self._path, json.dumps(status).encode() + b"\n", durable=False)
                self._failed = False
            except OSError as error:
                if not self._failed:
                    log.warning("%s: cannot be written: %s", self._path, error.strerror)
                self._failed = True
