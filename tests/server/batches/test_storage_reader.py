"""Files that bodies name: read for the key that owns them, within a size."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxrun.core.errors import BodyTooLarge, NotFound
from mlxrun.server.batches.durable_files import StorageError
from mlxrun.server.batches.storage import Storage, StoredFile
from tests.helpers.batches_server import Clock


@pytest.fixture
def store(tmp_path: Path) -> Storage:
    found = Storage(tmp_path, 10**6, Clock())
    found.open()
    return found


def add_file(store: Storage, owner: str) -> str:
    upload = store.start_upload(10)
    upload.write(b"notes")
    file = StoredFile(
        store.create_id("file_"), "n.txt", 5, 1, "user_data", owner, "text/plain", 1_800_000_060
    )
    store.add(upload, file)
    return file.id


@pytest.mark.parametrize(
    ("key", "owner", "found"),
    [("", "", True), ("ann", "ann", True), ("ann", "", True), ("", "ann", True), ("bob", "ann", False)],
)
def test_who_may_read(store: Storage, key: str, owner: str, found: bool) -> None:
    """The rule of /v1/files: for other keys a file does not exist."""
    name = add_file(store, owner)
    read = store.make_reader(key)
    if found:
        content = read(name, 5)
        assert (content.media_type, content.data) == ("text/plain", b"notes")
    else:
        with pytest.raises(NotFound, match="there is no file"):
            read(name, 5)


def test_what_cannot_be_read(store: Storage) -> None:
    name = add_file(store, "")
    read = store.make_reader("")
    with pytest.raises(BodyTooLarge, match="5 bytes"):
        read(name, 4)
    store.find_content(name).unlink()
    with pytest.raises(StorageError, match="cannot be used"):
        read(name, 5)
    store.now = lambda: 1_800_000_060.0  # type: ignore[method-assign]
    with pytest.raises(NotFound):
        read(name, 5)
