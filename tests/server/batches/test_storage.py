"""The server's folder: what is there after a kill, who may use it, and files that expire."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlxrun.server.batches.durable_files import StorageError
from mlxrun.server.batches.storage import QuotaExceeded, Storage, StoredFile
from tests.helpers.batch_fakes import chats
from tests.helpers.batches_server import Clock, ServerSetup
from tests.helpers.plain_user import obey_permissions
from tests.server.endpoints.test_files import in_folder


@pytest.fixture
def place(tmp_path: Path) -> ServerSetup:
    return ServerSetup(tmp_path / "data", engine=False)


async def test_after_a_kill(place: ServerSetup) -> None:
    """Whole files are there again; halves of all kinds are swept, and what is not ours is left alone."""
    async with place.run() as site:
        kept, torn, lost = [await site.upload(chats(2), name) for name in ("a", "b", "c")]
    folder = place.root / "files"
    (folder / f"{torn}.jsonl").write_bytes(b"shorter")
    (folder / f"{lost}.json").unlink()
    (folder / "0123.part").write_bytes(b"half an upload")
    (folder / f"{kept}.json.tmp").write_bytes(b"{")
    (folder / "file-strange.json").write_text('{"id": "file-strange"}')
    (folder / "notes.txt").write_text("mine")
    async with place.run() as site:
        assert [file["id"] for file in (await site.send("GET", "/v1/files"))["data"]] == [kept]
        assert len(await site.records(kept)) == 2
    left = {
        f"{kept}.json",
        f"{kept}.jsonl",
        f"{torn}.json",
        f"{torn}.jsonl",
        "file-strange.json",
        "notes.txt",
    }
    assert set(in_folder(place)) == left


async def test_a_file_that_cannot_be_deleted_stays(place: ServerSetup) -> None:
    """The answer says why; with the permission it can be used, and deleted."""
    async with place.run() as site:
        file, folder = await site.upload(chats(1)), place.root / "files"
        folder.chmod(0o500)
        try:
            with obey_permissions(), pytest.raises(StorageError, match="files: cannot be used: Permission"):
                site.queue.storage.delete(file)
        finally:
            folder.chmod(0o700)
        assert [each["id"] for each in (await site.send("GET", "/v1/files"))["data"]] == [file]
        assert len(await site.records(file)) == 1
        assert (await site.send("DELETE", f"/v1/files/{file}"))["deleted"] is True
        assert in_folder(place) == []


async def test_two_servers_in_one_folder(place: ServerSetup) -> None:
    """The second serves no files while the first does, says why, and takes over when it can."""
    async with place.run() as first:
        file = await first.upload(chats(1))
        async with place.run() as second:
            found = await second.send("GET", "/v1/files")
            assert (found["status_code"], "server.data_path" in found["error"]["message"]) == (503, True)
            await first.queue.close()
            assert [each["id"] for each in (await second.send("GET", "/v1/files"))["data"]] == [file]


def test_the_folder_is_private(tmp_path: Path) -> None:
    """Uploads hold people's prompts."""
    store = Storage(tmp_path / "data", 10**9)
    store.open()
    store.open()
    assert {path.stat().st_mode & 0o077 for path in (store.root, *store.root.iterdir()) if path.is_dir()} == {
        0
    }
    with pytest.raises(StorageError, match="another mlxrun"):
        Storage(tmp_path / "data", 10**9).open()
    store.close()
    Storage(tmp_path / "data", 10**9).open()


def add_file(store: Storage, seconds: int | None = None, size: int = 3) -> StoredFile:
    """A file of the storage that expires so many seconds from now."""
    upload = store.start_upload(10**6)
    upload.receive(size)
    upload.write(b"x" * size)
    now = store.get_time()
    file = StoredFile(
        store.create_id("file-"),
        "a",
        size,
        now,
        "batch",
        expires_at=None if seconds is None else now + seconds,
    )
    store.add(upload, file)
    return file


def test_expired_files_do_not_exist(tmp_path: Path) -> None:
    """To the second; on disk they go with the next removal, and then no longer count."""
    clock = Clock()
    store = Storage(tmp_path, 10_000, clock)
    store.open()
    short, long, ever = add_file(store, 60), add_file(store, 61), add_file(store)
    with pytest.raises(QuotaExceeded):
        store.check_quota(1, "file")
    clock.now += 59
    assert store.find(short.id) == short and len(store.list_files()) == 3
    clock.now += 1
    assert store.find(short.id) is None and store.list_files() == [ever, long]
    assert store.find_content(short.id).exists()
    store.remove_expired()
    assert not store.find_content(short.id).exists()
    store.check_quota(1, "file")
    clock.now += 1
    assert store.list_files() == [ever]
    store.close()


def test_expired_files_are_removed_at_the_start(tmp_path: Path) -> None:
    clock = Clock()
    store = Storage(tmp_path, 10**6, clock)
    store.open()
    short, ever = add_file(store, 60), add_file(store)
    store.close()
    clock.now += 60
    again = Storage(tmp_path, 10**6, clock)
    again.open()
    assert again.list_files() == [ever]
    assert sorted(path.stem for path in (tmp_path / "files").iterdir()) == [ever.id, ever.id]
    again.close()
    assert short.id not in {path.stem for path in (tmp_path / "files").iterdir()}


def test_files_are_listed_by_age(tmp_path: Path) -> None:
    """Whatever the prefixes of their ids, and within one microsecond too."""
    store = Storage(tmp_path, 10**6, Clock())
    store.open()
    files = []
    for prefix in ("file_", "file-", "file_", "file-"):
        upload = store.start_upload(10)
        files.insert(0, StoredFile(store.create_id(prefix), "a", 0, 0, "batch"))
        store.add(upload, files[0])
    assert store.list_files() == files
    store.close()


def test_files_of_an_earlier_version(tmp_path: Path) -> None:
    """Descriptions without the newer fields are read; they do not expire."""
    store = Storage(tmp_path, 10**6, Clock())
    store.open()
    file = add_file(store)
    path = tmp_path / "files" / f"{file.id}.json"
    found = json.loads(path.read_bytes())
    for name in ("media_type", "expires_at"):
        del found[name]
    path.write_text(json.dumps(found))
    store.close()
    store.open()
    assert store.find(file.id) == file
    store.close()
