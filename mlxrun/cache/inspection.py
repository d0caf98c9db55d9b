"""What `mlxrun cache` asks of a folder: what is kept there, whether it is sound, and its deletion.

Processes that use the folder meanwhile are neither disturbed nor waited for: a file that goes is passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mlxrun.cache.cache_folder import ModelFolder, models
from mlxrun.cache.entry import CacheEntry
from mlxrun.cache.entry_file import BadFile, load, peek
from mlxrun.scheduler.step_plan import SnapshotKind


@dataclass(frozen=True, slots=True)
class InspectedEntry:
    """A record whose header could be read; `used`: seconds since 1970."""

    record: CacheEntry
    nbytes: int
    used: float


@dataclass(slots=True)
class ModelInspection:
    """What one model's folder holds; `seen` least recently used first, `nbytes` of unreadable files too."""

    model: ModelFolder
    seen: list[InspectedEntry] = field(default_factory=list)
    unreadable: int = 0
    nbytes: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of the deltas, or of the states if there are none: of these each counts what it adds."""
        lengths = dict.fromkeys(SnapshotKind, 0)
        for seen in self.seen:
            lengths[seen.record.part] += len(seen.record.ids)
        return lengths[SnapshotKind.DELTA] or lengths[SnapshotKind.STATE]


def survey(folder: Path) -> Iterator[ModelInspection]:
    """Every model of which something is kept. Reads headers only and changes nothing."""
    for model in models(folder):
        found = ModelInspection(model)
        for path, size in sized(model):
            found.nbytes += size
            try:
                record, stat = peek(path, model.root)
            except (BadFile, OSError):
                found.unreadable += 1
            else:
                found.seen.append(InspectedEntry(record, size, stat.st_mtime))
        found.seen.sort(key=lambda seen: seen.used)
        if found.seen or found.unreadable:
            yield found


def sized(model: ModelFolder) -> Iterator[tuple[Path, int]]:
    """Every record file and its bytes."""
    for path in model.files():
        try:
            yield path, path.stat().st_size
        except OSError:  # deleted meanwhile
            continue


def verify(folder: Path, delete: bool) -> tuple[int, list[tuple[Path, str]]]:
    """Reads everything: how many files are good, and which are bad and why. `delete` removes the bad ones."""
    good = 0
    bad: list[tuple[Path, str]] = []
    for model in models(folder):
        for path in sorted(model.files()):
            try:
                load(path, model.root)
                good += 1
            except FileNotFoundError:
                continue
            except BadFile as error:
                bad.append((path, f"{error}{_deleted(path) if delete else ''}"))
            except OSError as error:
                bad.append((path, f"it cannot be read: {error.strerror or error}"))
    return good, bad


def _deleted(path: Path) -> str:
    """What became of a bad file."""
    _, _, stuck = remove([(path, 0)])
    return "; not deleted: it or its folder cannot be written" if stuck else "; deleted"


def remove(files: Sequence[tuple[Path, int]]) -> tuple[int, int, list[str]]:
    """Delete files: how many, how many bytes, and what could not be deleted and why."""
    deleted, freed = 0, 0
    stuck: list[str] = []
    for path, size in files:
        try:
            path.unlink()
        except FileNotFoundError:
            continue
        except OSError as error:
            stuck.append(f"{path}: {error.strerror or error}")
        else:
            deleted, freed = deleted + 1, freed + size
    return deleted, freed, stuck
