"""The servers that run on this machine as this user, for `mlxrun ps` and `mlxrun stop`.

Each server writes a note, and holds a lock on it while it runs. A note that somebody else can lock is of a
server that has ended, however it ended, and is deleted.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from mlxrun.config.settings import Config
from mlxrun.server.batches.durable_files import read_object
from mlxrun.server.data_folder import find_data_folder
from mlxrun.server.welcome import describe_models

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerNote:
    """`pid`: of its process. `model`: the path or the id in its config, or the names of several. `started`:
    seconds since 1970. `certificate`: the path of that of `server.tls`."""

    pid: int
    url: str
    model: str
    started: float
    certificate: str | None = None


def find_notes_folder(environ: Mapping[str, str]) -> Path:
    """Where the notes of all servers are."""
    return find_data_folder(environ) / "servers"


def make_note(config: Config, environ: Mapping[str, str]) -> Callable[[str], AbstractContextManager[None]]:
    """A function that notes the server with this config at its URL."""
    certificate = config.server.tls.get("certificate")
    return partial(note_server, find_notes_folder(environ), describe_models(config), certificate=certificate)


@contextmanager
def note_server(folder: Path, model: str, url: str, certificate: str | None = None) -> Iterator[None]:
    """Within the block, this process is noted as a server. Where no note can be written, the log says so."""
    note, handle = folder / f"{os.getpid()}.json", -1
    try:
        handle = _write_note(note, ServerNote(os.getpid(), url, model, time.time(), certificate))
    except OSError as error:
        log.warning("`mlxrun ps` and `mlxrun stop` do not know this server: %s: %s", note, error.strerror)
    try:
        yield
    finally:
        if handle >= 0:
            with suppress(OSError):
                note.unlink(missing_ok=True)
            os.close(handle)


def _write_note(note: Path, server: ServerNote) -> int:
    """Write the note, and lock it before it has its name. Returns the handle that holds the lock."""
    note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    written = note.with_suffix(".tmp")
    handle = os.open(written, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        os.write(handle, json.dumps(asdict(server)).encode())
        written.replace(note)
    except BaseException:
        os.close(handle)
        raise
    return handle


def list_servers(folder: Path) -> list[ServerNote]:
    """The servers that run, the oldest first."""
    found = [note for path in folder.glob("*.json") if (note := _read_note(path)) is not None]
    return sorted(found, key=lambda note: note.started)


def _read_note(path: Path) -> ServerNote | None:
    """What a note says; None, and the note is deleted, if its server has ended."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return read_object(path, ServerNote)
    finally:
        os.close(handle)
    with suppress(OSError):
        path.unlink(missing_ok=True)
    return None
