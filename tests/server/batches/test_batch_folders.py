"""The folders of batches: their bytes, and what an earlier version or a kill left there."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from mlxrun.server.batches.batch import MIN_COUNTED_BYTES, Batch, BatchFolders
from mlxrun.server.batches.durable_files import StorageError
from tests.helpers.batch_fakes import chats
from tests.helpers.batches_server import ServerSetup
from tests.server.endpoints.test_files import form
from tests.server.endpoints.test_files_quota import QUOTA, put, refused, used


@pytest.fixture
def place(tmp_path: Path) -> ServerSetup:
    found = ServerSetup(tmp_path / "data", engine=False)
    found.config = replace(found.config, server=replace(found.config.server, files_max_bytes=QUOTA))
    return found


async def test_small_files_and_batches_count_as_a_page(place: ServerSetup) -> None:
    """Else there could be any number of files, and of batches of one file."""
    async with place.run() as site:
        file = await site.upload(chats(1))
        assert await used(site) == MIN_COUNTED_BYTES
        for i in range(3):
            assert (await site.create(file))["id"]
            assert await used(site) == (2 + i) * MIN_COUNTED_BYTES
        found = await site.create(file)
        assert (found["status_code"], found["error"]["param"]) == (413, "input_file_id")
        assert found["error"]["code"] == "storage_full"
        assert refused(await put(site, form(b"x")))
        assert len((await site.send("GET", "/v1/batches"))["data"]) == 3
    async with place.run() as site:
        await site.send("GET", "/v1/files")
        assert await used(site) == 4 * MIN_COUNTED_BYTES


async def test_a_batch_that_failed_leaves_nothing(place: ServerSetup) -> None:
    """Its input is gone with the file: else room that nobody can give back, until the next start."""
    place.engine = True
    async with place.run() as site:
        file = await site.upload([*chats(20), "no line"])
        assert refused(await put(site, form(b"x" * QUOTA)))
        made = await site.wait_until_ended((await site.create(file))["id"])
        assert made["status"] == "failed"
        await site.send("DELETE", f"/v1/files/{file}")
        async with asyncio.timeout(60):
            while (place.root / "batches" / made["id"] / "job").exists():
                await asyncio.sleep(0.005)
        left = QUOTA - MIN_COUNTED_BYTES  # what is said of it stays
        assert refused(await put(site, form(b"x" * (left + 1))))
        assert (await put(site, form(b"x" * left)))["bytes"] == left


async def test_the_bytes_of_a_batch_are_known_after_a_restart(place: ServerSetup) -> None:
    """/v1/status counts it before anybody uploads, and once when it has become a file."""
    async with place.run() as site:
        file = await site.upload(chats(60))
        size = (await site.send("GET", f"/v1/files/{file}"))["bytes"]
        assert size > MIN_COUNTED_BYTES
        made = await site.create(file)
        await site.send("DELETE", f"/v1/files/{file}")
    place.engine = False
    async with place.run() as site:
        await site.send("GET", "/v1/files")
        assert await used(site) == size
    place.engine = True
    async with place.run() as site:
        done = await site.wait_until_ended(made["id"])
        assert done["status"] == "completed"
        answers = (await site.send("GET", f"/v1/files/{done['output_file_id']}"))["bytes"]
        async with asyncio.timeout(60):
            while await used(site) != max(MIN_COUNTED_BYTES, answers) + MIN_COUNTED_BYTES:
                await asyncio.sleep(0.005)


async def test_a_deleted_file_counts_while_its_batch_has_it(place: ServerSetup) -> None:
    """Else a client could fill the disk: upload, make a batch, delete, upload."""
    async with place.run() as site:
        file = await site.upload(chats(45))
        size = (await site.send("GET", f"/v1/files/{file}"))["bytes"]
        assert MIN_COUNTED_BYTES < size < QUOTA - 2 * MIN_COUNTED_BYTES
        batch = await site.create(file)
        assert await used(site) == size + MIN_COUNTED_BYTES  # one file under two names
        await site.send("DELETE", f"/v1/files/{file}")
        assert refused(await put(site, form(b"x" * (QUOTA - size + 1))))
        assert (await put(site, form(b"x" * (QUOTA - size - 500))))["bytes"]
        assert batch["status"] == "validating"


def make_batch(name: str = "batch_1") -> Batch:
    return Batch(name, "/v1/chat/completions", "file-1", "24h", 1, 2)


def test_a_batch_from_creation_to_deletion(tmp_path: Path) -> None:
    """What is loaded is what was saved; its job, and its folder, are gone once they are removed."""
    content = tmp_path / "input.jsonl"
    content.write_bytes(b"lines")
    folders, batch = BatchFolders(tmp_path / "batches"), make_batch()
    folders.create(batch, content)
    content.unlink()
    assert folders.find_job(batch).read_bytes() == b"lines"
    batch.status, batch.metadata = "completed", {"a": "\u0159"}
    folders.save(batch)
    assert folders.load() == {batch.id: batch}
    assert not folders.find_job(batch).exists(), "jobs of ended batches are removed at the start"
    folders.delete(batch)
    folders.delete(batch)
    assert folders.load() == {} and not list((tmp_path / "batches").iterdir())


def test_a_batch_that_cannot_be_created(tmp_path: Path) -> None:
    """Nothing is left of it."""
    folders = BatchFolders(tmp_path / "batches")
    with pytest.raises(StorageError, match="cannot be written"):
        folders.create(make_batch(), tmp_path / "missing")
    assert not list((tmp_path / "batches").iterdir())


def test_batches_of_other_versions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those of an older one are read; those of a newer one are skipped, with a line in the log, and kept."""
    folders = BatchFolders(tmp_path)
    for name in ("batch_old", "batch_new"):
        content = tmp_path.parent / "input"
        content.write_bytes(b"")
        folders.create(make_batch(name), content)
    old, new = (tmp_path / name / "batch.json" for name in ("batch_old", "batch_new"))
    found = json.loads(old.read_bytes())
    for name in ("is_message_batch", "output_expires_after"):
        del found[name]
    old.write_text(json.dumps(found))
    new.write_text(json.dumps({**json.loads(new.read_bytes()), "of_the_future": 1}))
    assert list(folders.load()) == ["batch_old"]
    assert "not a batch of this version" in caplog.text and new.exists()
