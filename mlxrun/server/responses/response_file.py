"""Keeps stored responses and conversations in one SQLite file, so that they outlive the process.

    objects   a response or a conversation: a JSON document that names its items by their numbers
    items     an item, as JSON: a row of its own, as objects share it

Each row has a checksum, and `user_version` is the version of this format. One process at a time holds the
file. A damaged file is set aside, and what could be read of it goes into a new one.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sqlite3
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from mlxrun.core.errors import ConfigError
from mlxrun.server.batches.durable_files import StorageError, convert_errors
from mlxrun.server.http.json_bodies import encode_json, encode_utf8

log = logging.getLogger(__name__)

Json = dict[str, Any]
FILE_NAME = "responses.sqlite"
_VERSION = 1
_LOCK_SECONDS = 5.0  # to wait for a process that is ending
_SCHEMA = f"""
PRAGMA auto_vacuum = INCREMENTAL;
BEGIN;
CREATE TABLE objects
    (place INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, json BLOB NOT NULL, checksum INTEGER NOT NULL);
CREATE TABLE items (number INTEGER PRIMARY KEY, json BLOB NOT NULL, checksum INTEGER NOT NULL);
PRAGMA user_version = {_VERSION};
COMMIT;
"""
# A commit survives a kill of the process; `synchronous = FULL` would also survive a power failure, at the
# cost of a sync each. What is deleted is overwritten.
_PRAGMAS = (
    *("journal_mode = WAL", "synchronous = NORMAL", "secure_delete = ON"),
    "checkpoint_fullfsync = ON",  # on macOS, where a plain sync leaves data in the disk's cache
)
# Codes of a file with wrong content; SQLITE_ERROR: a table is missing.
_DAMAGES = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
_ERRORS = (sqlite3.Error, UnicodeDecodeError)  # the second: of a message that cites a damaged schema


@dataclass
class Changes:
    """What is to be written: documents of objects by id, the last changed one last, and items by number. None
    deletes one."""

    objects: dict[str, Json | None] = field(default_factory=dict)
    items: dict[int, Json | None] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.objects or self.items)

    def __or__(self, newer: Self) -> Changes:
        older = {name: each for name, each in self.objects.items() if name not in newer.objects}
        return Changes(older | newer.objects, self.items | newer.items)


@dataclass
class Contents:
    """What a file has: documents, the last changed one last, and all their items by number. `is_salvaged`:
    the file was damaged, and a new one has nothing of it yet."""

    documents: list[Json]
    items: dict[int, Json]
    is_salvaged: bool


class ResponseFile:
    """The file at `path`, which `open` creates. Every method blocks, and belongs to the same thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._connection: sqlite3.Connection | None = None

    def open(self) -> Contents:
        """Lock and read the file. StorageError if it cannot be used; ConfigError if it is of a newer
        mlxrun."""
        problems: list[str] = []
        try:
            with convert_errors(self.path):
                self._connect(problems)
                contents = self._read(problems)
                if problems:
                    self._set_aside(problems, len(contents.documents))
                    self._connect([])
        except sqlite3.Error as error:
            self.close()
            raise StorageError(f"{self.path}: cannot be used: {_explain(error)}") from error
        except BaseException:
            self.close()
            raise
        return contents

    def write(self, changes: Changes) -> None:
        """Write all changes or none. sqlite3.Error or OSError if the disk fails."""
        assert self._connection is not None
        with self._connection as connection:
            for table, key, rows in (("items", "number", changes.items), ("objects", "id", changes.objects)):
                connection.executemany(f"DELETE FROM {table} WHERE {key} = ?", ((each,) for each in rows))
                insert = f"INSERT INTO {table} ({key}, json, checksum) VALUES (?, ?, ?)"
                connection.executemany(insert, _encode_rows(rows))

    def shrink(self) -> None:
        """Remove what was deleted from the disk too. sqlite3.Error if the disk fails."""
        assert self._connection is not None
        # A script, as `execute` would end after one page.
        self._connection.executescript("PRAGMA incremental_vacuum; PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Close and unlock the file."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self, problems: list[str]) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.path.exists() and not self.path.is_file():
            raise StorageError(f"{self.path}: is not a regular file")
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        self.path.chmod(0o600)  # SQLite's other files get the same permissions
        self._connection = sqlite3.connect(self.path, timeout=_LOCK_SECONDS, check_same_thread=False)
        execute = self._connection.execute
        try:
            execute("PRAGMA locking_mode = EXCLUSIVE").fetchall()
            version = execute("PRAGMA user_version").fetchone()[0]
            if version > _VERSION:
                raise ConfigError(
                    f"{self.path}: a newer mlxrun has written it (version {version} of the file; this one "
                    f"reads version {_VERSION}): use that, move the file away, or set server.store_days: 0"
                )
            if not version and not execute("SELECT 1 FROM sqlite_master").fetchone():
                self._connection.executescript(_SCHEMA)
            for pragma in _PRAGMAS:
                execute(f"PRAGMA {pragma}").fetchall()
        except _ERRORS as error:
            _note_damage(error, problems)

    def _read(self, problems: list[str]) -> Contents:
        items = self._read_rows("items", "number", problems)
        documents = []
        for name, document in self._read_rows("objects", "id", problems).items():
            if all(number in items for number in document["numbers"]):
                documents.append(document)
            else:
                problems.append(f"items of {name} are missing")
        try:
            assert self._connection is not None
            found = [text for (text,) in self._connection.execute("PRAGMA quick_check(1)")]
            problems += [text for text in found if text != "ok"]
        except _ERRORS as error:
            _note_damage(error, problems)
        return Contents(documents, items, bool(problems))

    def _read_rows(self, table: str, key: str, problems: list[str]) -> dict[Any, Json]:
        """The rows of a table that are whole, in their order."""
        assert self._connection is not None
        rows = {}
        try:
            query = f"SELECT {key}, json, checksum FROM {table} ORDER BY rowid"
            for name, data, checksum in self._connection.execute(query):
                if isinstance(data, bytes) and _compute_checksum(name, data) == checksum:
                    rows[name] = json.loads(data)
                else:
                    problems.append(f"{name} in {table} is damaged")
        except _ERRORS as error:
            _note_damage(error, problems)
        return rows

    def _set_aside(self, problems: list[str], kept: int) -> None:
        self.close()
        names = (self.path.with_suffix(f".damaged-{number}.sqlite") for number in itertools.count(1))
        aside = next(path for path in names if not path.exists())
        for end in ("-wal", ""):  # the one that may be needed to read the other goes first
            with suppress(FileNotFoundError):
                Path(f"{self.path}{end}").rename(f"{aside}{end}")
        log.warning(
            "%s: is damaged (%s); it was moved to %s, and %d responses and conversations of it are kept",
            *(self.path, problems[0], aside, kept),
        )


def _encode_rows(rows: Mapping[Any, Json | None]) -> Iterable[tuple[Any, bytes, int]]:
    for key, value in rows.items():
        if value is not None:
            data = encode_utf8(encode_json(value))
            yield key, data, _compute_checksum(key, data)


def _compute_checksum(key: object, data: bytes) -> int:
    return zlib.crc32(data, zlib.crc32(str(key).encode()))


def _note_damage(error: Exception, problems: list[str]) -> None:
    """Add an error to the problems if the content of the file is to blame; else raise it."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)  # Python's own: a text is not UTF-8
    if code & 0xFF not in _DAMAGES:
        raise error
    problems.append(str(error))


def _explain(error: sqlite3.Error) -> str:
    if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY:
        return "another mlxrun process has it open; give one of them another server.data_path"
    return str(error)
