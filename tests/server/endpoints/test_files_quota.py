"""server.files_max_bytes: what counts, what is refused, and what is left of it on disk."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from mlxrun.server.batches import storage
from mlxrun.server.batches.batch import MIN_COUNTED_BYTES
from mlxrun.server.endpoints import files
from tests.helpers.batch_fakes import chats, make_config
from tests.helpers.batches_server import RunningServer, ServerSetup
from tests.server.endpoints.test_files import form, in_folder

QUOTA = 20_000


@pytest.fixture
def place(tmp_path: Path) -> ServerSetup:
    found = ServerSetup(tmp_path / "data", engine=False)
    found.config = replace(found.config, server=replace(found.config.server, files_max_bytes=QUOTA))
    return found


async def put(site: RunningServer, data: Any) -> Any:
    return await site.send("POST", "/v1/files", data=data)


def refused(found: Any) -> bool:
    """Whether it is the refusal that names the setting."""
    if found.get("status_code") != 413:
        return False
    error = found["error"]
    assert (error["code"], error["param"]) == ("storage_full", "file")
    assert "server.files_max_bytes" in error["message"] and str(QUOTA) in error["message"]
    return True


async def used(site: RunningServer) -> int:
    found = await site.send("GET", "/v1/status")
    return int(found["files"]["bytes"])


async def test_exactly_as_much_as_fits(place: ServerSetup) -> None:
    """To the byte; room comes back with a deletion, and holds over a restart."""
    async with place.run() as site:
        first = await put(site, form(b"x" * 12_000))
        assert refused(await put(site, form(b"x" * 8001)))
        assert await used(site) == 12_000
        assert (await put(site, form(b"x" * 8000)))["bytes"] == 8000
        assert refused(await put(site, form(b"x")))
        assert len(in_folder(place)) == 4  # nothing is left of what was refused
    async with place.run() as site:
        assert refused(await put(site, form(b"x")))
        await site.send("DELETE", f"/v1/files/{first['id']}")
        assert (await put(site, form(b"x" * 12_000)))["bytes"] == 12_000
        assert (await site.send("GET", "/v1/status"))["files"] == {
            "count": 2,
            "bytes": 20_000,
            "max_bytes": QUOTA,
        }


async def test_the_default_quota(tmp_path: Path) -> None:
    """The twin: as the default is, all of it is taken."""
    async with ServerSetup(tmp_path / "data", engine=False).run() as site:
        for _ in range(3):
            assert (await put(site, form(b"x" * 6000)))["bytes"] == 6000
        assert await used(site) == 18_000


async def test_an_upload_with_a_length_is_refused_before_it_arrives(
    place: ServerSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(self: storage.Upload, data: bytes) -> None:
        raise AssertionError("something of it was written")

    monkeypatch.setattr(storage.Upload, "write", write)
    async with place.run() as site:
        assert refused(await put(site, form(b"x" * 90_000)))
    assert in_folder(place) == []


async def test_unfinished_uploads_count(place: ServerSetup) -> None:
    """Two at once cannot have the same room, and one that breaks off gives its room back."""
    place.config = replace(place.config, server=replace(place.config.server, files_max_bytes=1_000_000))
    gate = asyncio.Event()

    async def slow(end: bool) -> AsyncIterator[bytes]:
        yield b"x" * 700_000
        await gate.wait()
        if not end:
            raise ConnectionError("pulled the plug")
        yield b"x" * 100_000

    async with place.run() as site, asyncio.timeout(60):
        for end in (False, True):
            gate.clear()
            coming = aiohttp.FormData({"purpose": "batch"})
            coming.add_field("file", slow(end), filename="x.jsonl")
            task = asyncio.create_task(put(site, coming))
            while await used(site) < 500_000:  # what has come is read in pieces
                await asyncio.sleep(0.005)
            assert (await put(site, form(b"x" * 510_000)))["status_code"] == 413
            small = await put(site, form(b"x" * 200_000))
            assert small["bytes"] == 200_000
            await site.send("DELETE", f"/v1/files/{small['id']}")
            gate.set()
            if end:
                assert (await task)["bytes"] == 800_000
            else:
                with pytest.raises((aiohttp.ClientError, ConnectionError)):
                    await task
                while in_folder(place):
                    await asyncio.sleep(0.005)
            assert await used(site) == (800_000 if end else 0)


async def test_an_upload_without_a_length_is_refused_as_it_grows(place: ServerSetup) -> None:
    """Its length was not said: it counts as it comes."""

    async def grows() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 1000

    async with place.run() as site:
        data = aiohttp.FormData({"purpose": "batch"})
        data.add_field("file", grows(), filename="x.jsonl")
        with suppress(aiohttp.ClientError):  # it may still be sending when the connection is closed
            assert refused(await put(site, data))
        async with asyncio.timeout(60):
            while in_folder(place):
                await asyncio.sleep(0.005)
        assert await used(site) == 0


async def test_answers_count_but_are_never_refused(place: ServerSetup) -> None:
    """Work that was done is handed out, whatever the quota says."""
    place.engine = True
    place.config = replace(make_config(), server=replace(place.config.server, files_max_bytes=1_000_000))
    async with place.run() as site:
        file = await site.upload(chats(60))
    size = (place.root / "files" / f"{file}.jsonl").stat().st_size
    place.config = replace(
        place.config, server=replace(place.config.server, files_max_bytes=size + 1 + MIN_COUNTED_BYTES)
    )
    async with place.run() as site:
        batch = await site.wait_until_ended((await site.create(file))["id"])
        assert batch["status"] == "completed"
        assert len(await site.records(batch["output_file_id"])) == 60
        found = (await site.send("GET", "/v1/status"))["files"]
        assert found["count"] == 2 and found["bytes"] > size + 1 + MIN_COUNTED_BYTES
        assert (await put(site, form(b"x")))["status_code"] == 413


async def test_a_client_that_disconnects_before_its_upload_is_created(
    place: ServerSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a thread begins for it is removed all the same, its handle too."""
    gate, begun, leaving = threading.Event(), threading.Event(), asyncio.Event()
    begin, drop = storage.Storage.start_upload, files.discard
    drops: list[asyncio.Task[None]] = []

    def late(self: storage.Storage, max_bytes: int) -> storage.Upload:
        begun.set()
        assert gate.wait(60)
        return begin(self, max_bytes)

    async def seen(*given: Any) -> None:
        drops.append(asyncio.current_task())  # type: ignore[arg-type]
        leaving.set()
        await drop(*given)

    monkeypatch.setattr(storage.Storage, "start_upload", late)
    monkeypatch.setattr(files, "discard", seen)
    async with place.run() as site, asyncio.timeout(60):
        task = asyncio.create_task(put(site, form(b"x" * 100)))
        assert await asyncio.to_thread(begun.wait, 30)
        task.cancel()
        await leaving.wait()  # the handler has been cancelled, and nothing is begun yet
        assert in_folder(place) == []
        gate.set()
        await drops[0]
        assert in_folder(place) == [] and not site.queue.storage._uploads
