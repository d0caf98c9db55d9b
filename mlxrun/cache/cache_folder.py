"""Where record files are: FOLDER/<fingerprint of the model, hex>/<key, hex>.safetensors.

A file has its name only when it is complete. Names that are not of this form are never touched. The folder of
a model is open to its user alone: prompts can be read out of what is kept. No thread and no state here.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mlxrun.cache.entry import Key
from mlxrun.errors import ConfigError

SUFFIX = ".safetensors"
STALE_SECONDS = 3600  # no file is under way for so long

_MODEL = re.compile(r"(?:[0-9a-f]{2}){8,64}")
_RECORD = re.compile(r"[0-9a-f]{32}\.safetensors")
_TEMP = re.compile(r"[0-9a-f]{32}\.(?P<pid>[0-9]{1,10})\.(?P<session>[0-9a-f]{8})-[0-9]+\.tmp")
# Tells our own temporary files from those of a dead process that had our number, as in containers.
_SESSION = secrets.token_hex(4)
_NUMBERS = itertools.count()

_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """The files of one model. OSError from the disk, where nothing else is said."""

    folder: Path
    root: bytes

    @property
    def path(self) -> Path:
        return self.folder / self.root.hex()

    def file(self, key: Key) -> Path:
        """Where the record of `key` is."""
        return self.path / f"{key.hex()}{SUFFIX}"

    def files(self) -> Iterator[Path]:
        """All record files; none if the folder is missing or cannot be read."""
        yield from (self.path / entry.name for entry in _entries(self.path) if is_record(entry))

    def put(self, key: Key, pieces: Sequence[bytes]) -> int:
        """Write a file as a whole, and say its size. FileNotFoundError: someone removed it meanwhile."""
        temp = self.path / f"{key.hex()}.{os.getpid()}.{_SESSION}-{next(_NUMBERS)}.tmp"
        if not self.path.is_dir():
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            with temp.open("xb") as file:
                file.writelines(pieces)
            temp.replace(self.file(key))
        except OSError:
            with suppress(OSError):
                temp.unlink()
            raise
        return sum(map(len, pieces))

    def sweep(self) -> None:
        """Remove what killed processes left half written. Never raises."""
        for entry in _entries(self.path):
            match = _TEMP.fullmatch(entry.name)
            if match is not None and _is_left_over(entry, int(match["pid"]), match["session"]):
                with suppress(OSError):
                    os.unlink(entry.path)

    def remove_if_empty(self) -> None:
        """Remove left-over files and then the folder, if nothing else is in it. Never raises."""
        self.sweep()
        with suppress(OSError):
            self.path.rmdir()


def models(folder: Path) -> list[ModelFolder]:
    """The models that have a folder in `folder`, by fingerprint."""
    names = [entry.name for entry in _entries(folder) if _MODEL.fullmatch(entry.name) and _is_folder(entry)]
    return [ModelFolder(folder, bytes.fromhex(name)) for name in sorted(names)]


def is_record(entry: os.DirEntry[str]) -> bool:
    """Whether it has the name of a record and is a file."""
    try:
        return _RECORD.fullmatch(entry.name) is not None and entry.is_file(follow_symlinks=False)
    except OSError:
        return False


def default_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where prefixes are kept if the config does not say."""
    base = environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # a relative one is to be ignored, says the XDG specification
        return Path(base, "mlxrun", "prefixes")
    caches = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    return _expanded(f"{caches}/mlxrun/prefixes")


def cache_folder(disk_path: str | None) -> Path:
    """The folder that `cache.disk_path` means."""
    return default_folder() if disk_path is None else _expanded(disk_path)


def check_folder(folder: Path) -> None:
    """Make the folder; ConfigError if it cannot be made or written. A full disk is no mistake of the config:
    what is there can be read, and saving says so itself."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        if error.errno in _FULL and folder.is_dir():
            return
        raise ConfigError(
            f"cache.disk_path: {folder} cannot be written: {error.strerror or error}; "
            "give a folder that can, or set cache.backend to memory"
        ) from error


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"cache.disk_path: {path}: no home folder is known; give a full path") from error


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:
        return []


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def _is_left_over(entry: os.DirEntry[str], pid: int, session: str) -> bool:
    try:
        if not entry.is_file(follow_symlinks=False):
            return False
        if time.time() - entry.stat().st_mtime > STALE_SECONDS:
            return True
        if pid == os.getpid():
            return session != _SESSION
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:  # it is there, but not ours; or the file has just gone
        return False
    return False
