"""The file of stored responses: what is written is read, and what is damaged, locked or unknown is said."""

from __future__ import annotations

import json
import os
import random
import sqlite3
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxrun.core.errors import ConfigError
from mlxrun.server.batches.durable_files import StorageError
from mlxrun.server.responses import response_file
from mlxrun.server.responses.response_file import FILE_NAME, Changes, Contents, ResponseFile

ITEMS = {number: {"text": f"secret {number} " * 40} for number in range(1, 40)}
OBJECTS = {f"resp_{at}": {"id": f"resp_{at}", "numbers": [at, at + 1, at + 2]} for at in range(1, 37)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / FILE_NAME


def read(path: Path) -> Contents:
    file = ResponseFile(path)
    try:
        return file.open()
    finally:
        file.close()


def write(path: Path, *changes: Changes) -> None:
    file = ResponseFile(path)
    file.open()
    for each in changes:
        file.write(each)
    file.close()


def run_sql(path: Path, *texts: str) -> None:
    connection = sqlite3.connect(path)
    for text in texts:
        connection.execute(text)
    connection.commit()
    connection.close()


def test_what_is_written_is_read(path: Path) -> None:
    """Text of any kind, numbers of any size; the last changed object last, and nothing that was deleted."""
    odd = {"text": "\ud800 é \x00 😀", "number": 10**30, "float": 0.1, "none": None}
    first = Changes({"a": {"numbers": [1]}, "b": {"numbers": [1, 2]}}, {1: odd, 2: {}})
    assert read(path) == Contents([], {}, False)
    write(path, first, Changes({"a": {"numbers": [2]}, "c": None}, {7: None}))
    assert read(path) == Contents([{"numbers": [1, 2]}, {"numbers": [2]}], {1: odd, 2: {}}, False)
    write(path, Changes({"b": None}, {1: None}))
    assert read(path) == Contents([{"numbers": [2]}], {2: {}}, False)


def test_changes_are_written_together_or_not_at_all(path: Path) -> None:
    write(path, Changes({"a": {"numbers": [1]}}, {1: {"text": "old"}}))
    file = ResponseFile(path)
    before = file.open()
    with pytest.raises(TypeError):
        file.write(Changes({"a": None, "b": {"numbers": [object()]}}, {1: None}))
    file.close()
    assert read(path) == before


def test_nobody_else_may_read_it(path: Path) -> None:
    """Whatever the umask, the file's own permissions before and its folder's are."""
    for mode in (None, 0o666):
        if mode is not None:
            path.chmod(mode)
        file, before = ResponseFile(path), os.umask(0)
        try:
            file.open()
            file.write(Changes({"a": {"numbers": []}}))
        finally:
            os.umask(before)
        found = sorted(path.parent.iterdir())
        assert [each.name for each in found] == [FILE_NAME, f"{FILE_NAME}-wal"]
        assert {each.stat().st_mode & 0o777 for each in found} == {0o600}
        file.close()
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_what_was_deleted_is_on_no_disk(path: Path) -> None:
    file = ResponseFile(path)
    file.open()
    file.write(Changes(dict(OBJECTS), dict(ITEMS)))
    assert any(b"secret 5" in each.read_bytes() for each in path.parent.iterdir())
    file.shrink()
    size = path.stat().st_size
    file.write(Changes(dict.fromkeys(OBJECTS), dict.fromkeys(ITEMS)))
    file.shrink()
    assert not any(b"secret" in each.read_bytes() for each in path.parent.iterdir())
    assert path.stat().st_size <= size / 2
    file.close()


def test_one_process_holds_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_file, "_LOCK_SECONDS", 0.0)
    first, second = ResponseFile(path), ResponseFile(path)
    first.open()
    with pytest.raises(StorageError, match=r"another mlxrun process.*server\.data_path") as caught:
        second.open()
    assert str(path) in str(caught.value)
    first.write(Changes({"a": {"numbers": []}}))
    first.close()
    assert second.open().documents == [{"numbers": []}]
    second.close()


def test_a_file_of_a_newer_mlxrun_is_left_alone(path: Path) -> None:
    write(path, Changes({"a": {"numbers": []}}))
    run_sql(path, "PRAGMA user_version = 2")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"newer mlxrun.*version 2.*reads version 1.*server\.store_days"):
        read(path)
    assert path.read_bytes() == before and [each.name for each in path.parent.iterdir()] == [FILE_NAME]


def test_a_file_of_version_1_is_read(path: Path) -> None:
    """As it was first written; a later version must read or convert it."""
    path.parent.mkdir()
    item, document = b'{"text":"x"}', b'{"id":"a","numbers":[3]}'
    connection = sqlite3.connect(path)
    connection.executescript(
        "CREATE TABLE objects"
        " (place INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, json BLOB NOT NULL,"
        " checksum INTEGER NOT NULL);"
        "CREATE TABLE items (number INTEGER PRIMARY KEY, json BLOB NOT NULL, checksum INTEGER NOT NULL);"
        "PRAGMA user_version = 1;"
    )
    connection.execute("INSERT INTO items VALUES (3, ?, ?)", (item, zlib.crc32(b"3" + item)))
    row = (document, zlib.crc32(b"a" + document))
    connection.execute("INSERT INTO objects VALUES (1, 'a', ?, ?)", row)
    connection.commit()
    connection.close()
    assert read(path) == Contents([{"id": "a", "numbers": [3]}], {3: {"text": "x"}}, False)


def test_a_place_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / FILE_NAME).mkdir()
    for path in (tmp_path / "file" / FILE_NAME, tmp_path / FILE_NAME):
        with pytest.raises(StorageError, match="cannot be used|not a regular file") as caught:
            read(path)
        assert str(path) in str(caught.value)
        assert ("file is not a folder" in str(caught.value)) is (path.parent.name == "file")


# Damage.


@pytest.fixture
def whole(path: Path) -> bytes:
    """A file with all of OBJECTS and ITEMS."""
    write(path, Changes(dict(OBJECTS), dict(ITEMS)))
    return path.read_bytes()


def check_salvaged(path: Path, caplog: pytest.LogCaptureFixture) -> Contents:
    """What is left after damage is right, and the log names the file that has the rest."""
    caplog.clear()
    content = path.read_bytes()
    found = read(path)
    for document in found.documents:
        assert document == OBJECTS[document["id"]]
        assert all(found.items[number] == ITEMS[number] for number in document["numbers"])
    if found.is_salvaged:
        (record,) = caplog.records
        (aside,) = path.parent.glob("*.damaged-*.sqlite")
        said = record.getMessage()
        assert str(path) in said and str(aside) in said and f"{len(found.documents)} responses" in said
        assert len(aside.read_bytes()) >= min(len(content), 1) and read(path) == Contents([], {}, False)
        aside.unlink()
    else:
        assert found == Contents(list(OBJECTS.values()), ITEMS, False), "a silent loss"
    return found


@pytest.mark.parametrize(
    "content", [b"no database", b"x" * 5000, bytes(4096), b"SQLite format 3\0" + b"x" * 90]
)
def test_what_is_no_database_is_set_aside(
    path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    assert check_salvaged(path, caplog).is_salvaged


def test_another_database_is_set_aside(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.parent.mkdir()
    run_sql(path, "CREATE TABLE recipes (name TEXT)")
    assert read(path).is_salvaged
    (aside,) = path.parent.glob("*.damaged-1.sqlite")
    run_sql(aside, "SELECT name FROM recipes")
    assert "no such table" in caplog.text


def test_damaged_files_do_not_replace_each_other(path: Path) -> None:
    for content in (b"a" * 600, b"b" * 600):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        read(path)
    found = {each.name: each.read_bytes()[:1] for each in path.parent.glob("*damaged*")}
    assert found == {"responses.damaged-1.sqlite": b"a", "responses.damaged-2.sqlite": b"b"}


def test_a_missing_item_costs_its_objects_only(
    path: Path, whole: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    run_sql(path, "DELETE FROM items WHERE number = 5")
    found = check_salvaged(path, caplog)
    assert len(found.documents) == len(OBJECTS) - 3 and "items of resp_3 are missing" in caplog.text


def test_a_changed_text_is_seen(path: Path, whole: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """SQLite itself would not see it."""
    path.write_bytes(whole.replace(b"secret 5", b"secret 6"))
    assert len(check_salvaged(path, caplog).documents) == len(OBJECTS) - 3
    assert "5 in items is damaged" in caplog.text


def make_damages(content: bytes, rng: random.Random, number: int) -> Iterator[bytes]:
    """A file that is cut off, or has other bytes or other pages in some places."""
    for _ in range(number):
        at, how = rng.randrange(len(content)), rng.randrange(4)
        page = at // 4096 * 4096
        if how == 0:
            yield content[:at]
        elif how == 1:
            yield content[:page] + bytes(4096) + content[page + 4096 :]
        else:
            size = 1 if how == 2 else rng.randrange(2, 200)
            yield content[:at] + rng.randbytes(size) + content[at + size :]


@pytest.mark.parametrize(
    ("seed", "number"),
    [(0, 150), *(pytest.param(seed, 700, marks=pytest.mark.sweep) for seed in range(1, 4))],
)
def test_damage_of_any_kind(
    path: Path, whole: bytes, seed: int, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    """No start fails, and no response is lost without a word or has another text."""
    salvaged = 0
    for content in make_damages(whole, random.Random(seed), number):
        path.write_bytes(content)
        try:
            found = check_salvaged(path, caplog)
        except ConfigError as error:  # the damage is in the version
            assert "newer mlxrun" in str(error)
            continue
        salvaged += found.is_salvaged and bool(found.documents)
    assert salvaged > number / 10


@pytest.mark.parametrize("name", ["_compute_checksum", "quick_check"])
def test_unseen_damage_would_be_seen(
    path: Path, whole: bytes, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Mutation: texts without checksums, or pages that nobody checks."""
    if name == "_compute_checksum":
        monkeypatch.setattr(response_file, name, lambda key, data: 0)
        run_sql(path, "UPDATE items SET checksum = 0", "UPDATE objects SET checksum = 0")
    else:
        read_rows = ResponseFile._read_rows
        monkeypatch.setattr(
            ResponseFile,
            "_read",
            lambda file, problems: Contents(
                list(read_rows(file, "objects", "id", []).values()),
                read_rows(file, "items", "number", []),
                False,
            ),
        )
    content = path.read_bytes()
    with pytest.raises((AssertionError, KeyError, json.JSONDecodeError, UnicodeDecodeError)):
        for damaged in make_damages(content, random.Random(0), 400):
            path.write_bytes(damaged)
            try:
                check_salvaged(path, caplog)
            except ConfigError:
                continue


def test_errors_of_the_disk_are_no_damage(path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file stays where it is."""

    class Failing:
        def __init__(self, connection: Any) -> None:
            self.connection = connection

        def execute(self, text: str) -> Any:
            if "FROM items" in text:
                error = sqlite3.OperationalError("disk I/O error")
                error.sqlite_errorcode = sqlite3.SQLITE_IOERR
                raise error
            return self.connection.execute(text)

        def close(self) -> None:
            self.connection.close()

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *given, **named: Failing(connect(*given, **named)))
    with pytest.raises(StorageError, match="disk I/O error"):
        read(path)
    monkeypatch.undo()
    assert len(read(path).documents) == len(OBJECTS)
