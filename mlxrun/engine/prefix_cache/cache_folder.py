"""The files of the disk tier: FOLDER/<fingerprint of the model, hex>/<key, hex>.safetensors.

A file gets its name only when it is complete. Files with names of another form are never touched. Only the
user can open a model's folder, because its files reveal prompts.

`mlxrun cache` lists, verifies and deletes the entries of a folder. Other processes may use it meanwhile. They
are neither disturbed nor waited for, and a file that disappears is skipped.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mlxrun.core.cache_home import expand_home, find_cache_home
from mlxrun.core.errors import ConfigError
from mlxrun.core.step_plan import SnapshotKind
from mlxrun.engine.prefix_cache.entry import CacheEntry, Key
from mlxrun.engine.prefix_cache.entry_file import BadFile, load_entry, peek_entry

SUFFIX = ".safetensors"
STALE_SECONDS = 3600  # no write takes this long

_MODEL = re.compile(r"(?:[0-9a-f]{2}){8,64}")
_ENTRY = re.compile(r"[0-9a-f]{32}\.safetensors")
_TEMP = re.compile(r"[0-9a-f]{32}\.(?P<pid>[0-9]{1,10})\.(?P<token>[0-9a-f]{8})-[0-9]+\.tmp")
# Tells our own temporary files from those of a dead process that had our process id, as in containers.
_PROCESS_TOKEN = secrets.token_hex(4)
_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """The files of one model. Methods raise OSError from the disk, unless they say otherwise."""

    folder: Path
    fingerprint: bytes

    @property
    def path(self) -> Path:
        return self.folder / self.fingerprint.hex()

    def locate_file(self, key: Key) -> Path:
        """Return the path of the entry with this key."""
        return self.path / f"{key.hex()}{SUFFIX}"

    def list_files(self) -> Iterator[Path]:
        """Yield the files of all entries; none if the folder is missing or unreadable."""
        for item in _scan_folder(self.path):
            with suppress(OSError):
                if _ENTRY.fullmatch(item.name) and item.is_file(follow_symlinks=False):
                    yield self.path / item.name

    def write_file(self, key: Key, chunks: Sequence[bytes]) -> int:
        """Write a file atomically and return its size in bytes. FileNotFoundError if the folder was removed
        meanwhile."""
        temp = self.path / f"{key.hex()}.{os.getpid()}.{_PROCESS_TOKEN}-{next(_NUMBERS)}.tmp"
        if not self.path.is_dir():
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            with temp.open("xb") as file:
                file.writelines(chunks)
            temp.replace(self.locate_file(key))
        except OSError:
            with suppress(OSError):
                temp.unlink()
            raise
        return sum(map(len, chunks))

    def remove_leftovers(self) -> None:
        """Remove the temporary files of killed processes. Never raises."""
        for item in _scan_folder(self.path):
            match = _TEMP.fullmatch(item.name)
            if match is not None and _is_leftover(item, int(match["pid"]), match["token"]):
                with suppress(OSError):
                    os.unlink(item.path)

    def remove_if_empty(self) -> None:
        """Remove temporary files of killed processes, then the folder if it is empty. Never raises."""
        self.remove_leftovers()
        with suppress(OSError):
            self.path.rmdir()


def list_models(folder: Path) -> list[ModelFolder]:
    """Return the models that have a folder in `folder`, sorted by fingerprint."""
    names = []
    for item in _scan_folder(folder):
        with suppress(OSError):
            if _MODEL.fullmatch(item.name) and item.is_dir(follow_symlinks=False):
                names.append(item.name)
    return [ModelFolder(folder, bytes.fromhex(name)) for name in sorted(names)]


def list_foreign_files(folder: Path) -> Iterator[Path]:
    """Yield what is in `folder` and its models' folders, but is neither an entry nor a temporary file."""
    models = {model.path.name: model for model in list_models(folder)}
    yield from (folder / item.name for item in _scan_folder(folder) if item.name not in models)
    for model in models.values():
        own = {path.name for path in model.list_files()}
        for item in _scan_folder(model.path):
            if item.name not in own and not _TEMP.fullmatch(item.name):
                yield model.path / item.name


def get_default_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for configs that name none. ConfigError if the home folder is unknown."""
    try:
        return find_cache_home(environ) / "prefixes"
    except RuntimeError as error:
        raise ConfigError("cache.disk_path: the home folder is unknown; give a full path") from error


def resolve_cache_folder(disk_path: str | None) -> Path:
    """Return the folder of `cache.disk_path`; None means the default one."""
    return get_default_folder() if disk_path is None else expand_home(disk_path, "cache.disk_path")


def check_folder(folder: Path) -> None:
    """Create the folder. ConfigError if it cannot be created or written to. A full disk is allowed: existing
    entries can be read, and the disk tier warns when it cannot write."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and folder.is_dir():
            return
        raise ConfigError(
            f"cache.disk_path: {folder} cannot be written to: {error.strerror or error}; "
            "give a folder that can be, or set cache.backend to memory"
        ) from error


def _scan_folder(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as items:
            return list(items)
    except OSError:
        return []


def _is_leftover(item: os.DirEntry[str], pid: int, token: str) -> bool:
    """Whether the process that was writing this temporary file is gone."""
    try:
        if not item.is_file(follow_symlinks=False):
            return False
        if time.time() - item.stat().st_mtime > STALE_SECONDS:
            return True
        if pid == os.getpid():
            return token != _PROCESS_TOKEN
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:  # the process is another user's, or the file has just gone
        return False
    return False


@dataclass(frozen=True, slots=True)
class InspectedEntry:
    """An entry with a readable header. `used`: when it was last used, in seconds since 1970."""

    entry: CacheEntry
    nbytes: int
    used: float


@dataclass(slots=True)
class ModelInspection:
    """The entries of one model, least recently used first. `nbytes` includes unreadable files."""

    folder: ModelFolder
    entries: list[InspectedEntry] = field(default_factory=list)
    unreadable: int = 0
    nbytes: int = 0

    @property
    def tokens(self) -> int:
        """The number of tokens of the deltas, or of the states if there are no deltas."""
        lengths = dict.fromkeys(SnapshotKind, 0)
        for inspected in self.entries:
            lengths[inspected.entry.kind] += len(inspected.entry.ids)
        return lengths[SnapshotKind.DELTA] or lengths[SnapshotKind.STATE]


def inspect_models(folder: Path) -> Iterator[ModelInspection]:
    """Yield every model that has files. Only headers are read, and nothing is changed."""
    for model in list_models(folder):
        found = ModelInspection(model)
        for path, size in list_file_sizes(model):
            found.nbytes += size
            try:
                entry, stat = peek_entry(path, model.fingerprint)
            except (BadFile, OSError):
                found.unreadable += 1
            else:
                found.entries.append(InspectedEntry(entry, size, stat.st_mtime))
        found.entries.sort(key=lambda inspected: inspected.used)
        if found.entries or found.unreadable:
            yield found


def list_file_sizes(model: ModelFolder) -> Iterator[tuple[Path, int]]:
    """Yield the file of every entry and its size in bytes."""
    for path in model.list_files():
        try:
            yield path, path.stat().st_size
        except OSError:  # deleted meanwhile
            continue


def verify_files(folder: Path, delete: bool) -> tuple[int, list[tuple[Path, str]]]:
    """Read all files. Returns the number of good files, and each bad file with the reason. `delete`: remove
    bad files."""
    good = 0
    bad: list[tuple[Path, str]] = []
    for model in list_models(folder):
        for path in sorted(model.list_files()):
            try:
                load_entry(path, model.fingerprint)
                good += 1
            except FileNotFoundError:
                continue
            except BadFile as error:
                bad.append((path, f"{error}{_delete_bad_file(path) if delete else ''}"))
            except OSError as error:
                bad.append((path, f"it cannot be read: {error.strerror or error}"))
    return good, bad


def _delete_bad_file(path: Path) -> str:
    """Delete a bad file and say whether that was possible."""
    _, _, failed = delete_files([(path, 0)])
    return "; not deleted: it or its folder cannot be written" if failed else "; deleted"


def delete_files(files: Sequence[tuple[Path, int]]) -> tuple[int, int, list[str]]:
    """Delete files of known sizes. Returns how many were deleted, their bytes, and a reason for each
    failure."""
    deleted, freed = 0, 0
    failed: list[str] = []
    for path, size in files:
        try:
            path.unlink()
        except FileNotFoundError:
            continue
        except OSError as error:
            failed.append(f"{path}: {error.strerror or error}")
        else:
            deleted, freed = deleted + 1, freed + size
    return deleted, freed, failed
