"""What `mlxrun cache` does with a folder: it lists, verifies and deletes the entries on disk.

Other processes may use the folder meanwhile. They are neither disturbed nor waited for, and a file that
disappears is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mlxrun.core.step_plan import SnapshotKind
from mlxrun.engine.prefix_cache.cache_folder import ModelFolder, list_foreign_files, list_models
from mlxrun.engine.prefix_cache.entry import CacheEntry
from mlxrun.engine.prefix_cache.entry_file import BadFile, load_entry, peek_entry


@dataclass(frozen=True, slots=True)
class InspectedEntry:
    """An entry whose header could be read; `used`: seconds since 1970."""

    entry: CacheEntry
    nbytes: int
    used: float


@dataclass(slots=True)
class ModelInspection:
    """The entries of one model, least recently used first; `nbytes` includes unreadable files."""

    folder: ModelFolder
    entries: list[InspectedEntry] = field(default_factory=list)
    unreadable: int = 0
    nbytes: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of the deltas; if there are none, of the states, each of which counts what it adds."""
        lengths = dict.fromkeys(SnapshotKind, 0)
        for inspected in self.entries:
            lengths[inspected.entry.kind] += len(inspected.entry.ids)
        return lengths[SnapshotKind.DELTA] or lengths[SnapshotKind.STATE]


def inspect_models(folder: Path) -> Iterator[ModelInspection]:
    """Yield every model that has files. Reads headers only and changes nothing."""
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
    """Read all files: how many are good, and which are bad and why. `delete` removes the bad ones."""
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


def count_foreign_files(folder: Path) -> int:
    """The number of files and folders in `folder`, and in the folders of models, that are no entries."""
    return sum(1 for _ in list_foreign_files(folder))


def _delete_bad_file(path: Path) -> str:
    """Delete a bad file and say whether that was possible."""
    _, _, failed = delete_files([(path, 0)])
    return "; not deleted: it or its folder cannot be written" if failed else "; deleted"


def delete_files(files: Sequence[tuple[Path, int]]) -> tuple[int, int, list[str]]:
    """Delete files of known sizes: how many, how many bytes, and which could not be deleted and why."""
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
