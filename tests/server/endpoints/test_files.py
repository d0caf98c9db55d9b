"""/v1/files: uploads that go to disk as they come, lists, downloads, deletion, and folders after a kill."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from mlxrun.server.batches import storage
from mlxrun.server.batches.storage import Storage
from mlxrun.server.endpoints import files
from tests.helpers.batch_fakes import chats, make_config
from tests.helpers.batches_server import ServerSetup
from tests.helpers.raw_clients import until


@pytest.fixture
def place(tmp_path: Path) -> ServerSetup:
    return ServerSetup(tmp_path / "data", engine=False)


def form(data: bytes = b'{"a": 1}\n', purpose: str = "batch", **more: str) -> aiohttp.FormData:
    found = aiohttp.FormData({"purpose": purpose, **more}, quote_fields=False)
    found.add_field("file", data, filename="jobs \u00e9.jsonl")
    return found


def in_folder(place: ServerSetup) -> list[str]:
    return sorted(path.name for path in (place.root / "files").iterdir())


async def test_a_file_from_end_to_end(place: ServerSetup) -> None:
    """What comes back is what was sent, byte by byte; names are kept; what is deleted is gone."""
    data = b"\xef\xbb\xbf" + b'{"a": "\xc3\xa9"}\r\n' * 5000 + b"no line end"
    async with place.run() as site:
        made = await site.send("POST", "/v1/files", data=form(data))
        assert made == {
            "object": "file",
            "id": made["id"],
            "filename": "jobs \u00e9.jsonl",
            "bytes": len(data),
            "created_at": int(place.clock.now),
            "expires_at": None,
            "purpose": "batch",
            "status": "processed",
        }
        path = f"/v1/files/{made['id']}"
        assert await site.send("GET", path) == made
        async with site.http.get(f"{path}/content") as response:
            assert (response.status, response.content_type) == (200, "application/octet-stream")
            assert await response.read() == data
        deleted = await site.send("DELETE", path)
        assert deleted == {"id": made["id"], "object": "file", "deleted": True}
        for method, gone in (("GET", path), ("GET", f"{path}/content"), ("DELETE", path)):
            assert (await site.send(method, gone))["status_code"] == 404
    assert in_folder(place) == []


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (b"caf\xe9.jsonl", "caf?.jsonl"),
        (b"../../etc/passwd", "../../etc/passwd"),
        (b"", "file"),
        (b"n" * 400, "n" * 255),
    ],
)
async def test_strange_names(place: ServerSetup, given: bytes, kept: str) -> None:
    """A name is a label: whatever it is, it comes back as text, and no path is made of it."""
    body = (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="'
        + given
        + b'"\r\n\r\n{}\r\n--b--\r\n'
    )
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    async with place.run() as site:
        made = await site.send("POST", "/v1/files", data=body, headers=headers)
        assert (made["filename"], made["bytes"]) == (kept, 2)
        assert in_folder(place) == sorted([f"{made['id']}.json", f"{made['id']}.jsonl"])
    async with place.run() as site:
        assert (await site.send("GET", f"/v1/files/{made['id']}"))["filename"] == kept


async def test_purpose_after_the_file(place: ServerSetup) -> None:
    """Fields of a form come in any order."""
    late = aiohttp.FormData()
    late.add_field("file", b"{}\n", filename="x.jsonl")
    late.add_field("purpose", "batch")
    async with place.run() as site:
        assert (await site.send("POST", "/v1/files", data=late))["bytes"] == 3


@pytest.mark.parametrize(
    ("data", "status", "param"),
    [
        (form(purpose="fine-tune"), 400, "purpose"),
        (form(b""), 400, "file"),
        (form(**{"expires_after[anchor]": "created_at"}), 400, "expires_after[seconds]"),
        (form(**{"expires_after[seconds]": "3600"}), 400, "expires_after[anchor]"),
        (form(**{"expires_after[seconds]": "3599"}), 400, "expires_after[seconds]"),
        (form(**{"expires_after[seconds]": "1h"}), 400, "expires_after[seconds]"),
        (form(**{"expires_after[anchor]": "last_used_at"}), 400, "expires_after[anchor]"),
        (form(expires_in_seconds="3600"), 400, "expires_in_seconds"),
        (form(purpos="batch"), 400, "purpos"),
        (aiohttp.FormData({"purpose": "batch", "file": "x"}), None, None),
        (form(purpose="b" * 5000), 400, "purpose"),
        (form(b"x" * 3001), 413, "file"),
        (form(b"x" * 90_000), 413, "file"),
        (b"{}", 400, None),
    ],
)
async def test_refused_uploads(place: ServerSetup, data: Any, status: int | None, param: str | None) -> None:
    """Each with its field; nothing of it stays on disk."""
    place.config = make_config(max_file_bytes=3000)
    async with place.run() as site:
        found = await site.send("POST", "/v1/files", data=data)
        if status is None:  # a form that is no multipart at all
            assert (found["status_code"], "multipart" in found["error"]["message"]) == (400, True)
        else:
            assert (found["status_code"], found["error"]["param"]) == (status, param)
        assert (await site.send("GET", "/v1/files"))["data"] == []
    assert in_folder(place) == []


HEAD = b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n'


@pytest.mark.parametrize(
    "body",
    [
        HEAD % b"file" + b"{}",
        HEAD % b"file" + b"{}\r\n--",
        HEAD % b"file" + b"{}\r\n--b",
        HEAD % b"file" + b"{}\r\n--b\r\n",
        HEAD % b"file" + b'{"a": 1}\n' * 50_000,
        HEAD % b"purpose" + b"bat",
        HEAD % b"purpose" + b"batch\r\n" + HEAD % b"file",
        b"--b\r\nContent-Disp",
        b"--b\r\n",
        b"--b",
        b"-",
        b"",
    ],
)
async def test_forms_that_end_early(place: ServerSetup, body: bytes) -> None:
    """Wherever they do."""
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    async with place.run() as site, asyncio.timeout(60):
        found = await site.send("POST", "/v1/files", data=body, headers=headers)
        assert found["status_code"] == 400, found
        assert "the form ended early" in found["error"]["message"]
    assert in_folder(place) == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no boundary in sight",
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n',
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n{}\r\n--b--\r\n',
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n{}',
        b"--b\r\nContent-Disposition: form-data\r\n\r\n{}\r\n--b--\r\n",
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n',
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n'
        b"Content-Transfer-Encoding: base64\r\n\r\ne30=\r\n--b--\r\n",
        b"--b\r\nContent-Type: multipart/mixed; boundary=c\r\n\r\n--c\r\n\r\nx\r\n--c--\r\n--b--\r\n",
        b"--b\r\nno header\r\n\r\n{}\r\n--b--\r\n",
        b"\x00\xff" * 5000,
    ],
)
async def test_invalid_forms(place: ServerSetup, body: bytes) -> None:
    """B-side of "never a 500, never a hang": a broken form is a 400 and leaves nothing."""
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    async with place.run() as site, asyncio.timeout(60):
        found = await site.send("POST", "/v1/files", data=body, headers=headers)
        assert found["status_code"] == 400
        headers = {"Content-Type": "multipart/form-data"}
        assert (await site.send("POST", "/v1/files", data=body, headers=headers))["status_code"] == 400
    assert in_folder(place) == []


async def test_pages_and_filters(place: ServerSetup) -> None:
    async with place.run() as site:
        made = []
        for i in range(5):
            place.clock.now += 1
            made.append(await site.upload(chats(1), f"{i}.jsonl"))
        newest = (await site.send("GET", "/v1/files"))["data"]
        assert [file["id"] for file in newest] == made[::-1]
        query = {"order": "asc", "limit": "2", "after": made[1]}
        found = await site.send("GET", "/v1/files", params=query)
        assert ([file["filename"] for file in found["data"]], found["has_more"]) == (
            ["2.jsonl", "3.jsonl"],
            True,
        )
        assert (await site.send("GET", "/v1/files", params={"purpose": "batch_output"}))["data"] == []
        for wrong in (
            {"order": "up"},
            {"limit": "10001"},
            {"limit": "000000001999"},
            {"limit": "-1"},
            {"purpos": "x"},
        ):
            refused = await site.send("GET", "/v1/files", params=wrong)
            assert (refused["status_code"], refused["error"]["param"]) == (400, next(iter(wrong)))


async def test_an_interrupted_upload(place: ServerSetup) -> None:
    """The client is gone in the middle; nothing is listed, nothing is left."""

    async def half() -> AsyncIterator[bytes]:
        yield b"x" * 3_000_000
        await until(lambda: in_folder(place))
        raise ConnectionError("pulled the plug")

    async with place.run() as site:
        assert (await site.send("GET", "/v1/files"))["data"] == []
        broken = aiohttp.FormData({"purpose": "batch"})
        broken.add_field("file", half(), filename="x.jsonl")
        with pytest.raises((aiohttp.ClientError, ConnectionError)):
            await site.http.post("/v1/files", data=broken)
        async with asyncio.timeout(60):
            while in_folder(place):
                await asyncio.sleep(0.01)
        assert (await site.send("GET", "/v1/files"))["data"] == []


@pytest.mark.slow
async def test_a_million_lines_are_not_held_in_memory(
    place: ServerSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """48 MB of lines come and go through a few blocks of memory; counted in bytes."""
    line = json.dumps({"custom_id": "0000000", "body": {"a": 1}}).encode() + b"\n"
    block, count = line * 10_000, 100
    writes: list[int] = []
    write = storage.Upload.write

    def counted(self: storage.Upload, data: bytes) -> None:
        writes.append(len(data))
        write(self, data)

    async def lines() -> AsyncIterator[bytes]:
        for _ in range(count):
            yield block

    monkeypatch.setattr(storage.Upload, "write", counted)
    million = aiohttp.FormData({"purpose": "batch"})
    million.add_field("file", lines(), filename="million.jsonl")
    async with place.run() as site:
        tracemalloc.start()
        try:
            made = await site.send("POST", "/v1/files", data=million)
            read = 0
            async with site.http.get(f"/v1/files/{made['id']}/content") as response:
                async for data in response.content.iter_chunked(1 << 16):
                    read += len(data)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert made["bytes"] == sum(writes) == read == len(block) * count
    assert max(writes) < 2 * files.BLOCK_BYTES
    assert peak < 12_000_000 < made["bytes"] / 3


async def test_while_it_shuts_down(place: ServerSetup) -> None:
    async with place.run() as site:
        await site.queue.close()
        found = await site.send("GET", "/v1/batches")
        assert (found["status_code"], found["error"]["code"]) == (503, "shutting_down")


async def test_a_data_path_that_cannot_be_used(place: ServerSetup) -> None:
    place.root.write_text("a file where the folder should be")
    async with place.run() as site:
        found = await site.send("POST", "/v1/files", data=form())
        assert (found["status_code"], found["error"]["code"]) == (503, "storage_unavailable")


async def test_a_full_disk(place: ServerSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A 503 that names the folder; half a file does not stay."""

    class Full:
        def __init__(self, file: Any) -> None:
            self._file = file

        def write(self, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

    start_upload = Storage.start_upload

    def full(self: Storage, max_bytes: int) -> storage.Upload:
        found = start_upload(self, max_bytes)
        found._file = Full(found._file)  # type: ignore[assignment]
        return found

    async with place.run() as site:
        with monkeypatch.context() as patch:
            patch.setattr(Storage, "start_upload", full)
            found = await site.send("POST", "/v1/files", data=form())
        assert (found["status_code"], "No space left" in found["error"]["message"]) == (503, True)
        assert in_folder(place) == []
        assert (await site.send("POST", "/v1/files", data=form()))["bytes"] == 9


async def test_the_event_loop_is_not_blocked_by_the_disk(place: ServerSetup) -> None:
    """While a file is written, others are answered: the disk is on a worker thread."""
    blocked = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(self: storage.Upload) -> None:
        loop.call_soon_threadsafe(blocked.set)
        asyncio.run_coroutine_threadsafe(answered.wait(), loop).result(10)

    answered = asyncio.Event()
    async with place.run() as site:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(storage.Upload, "finish", slow)
            upload = asyncio.create_task(site.send("POST", "/v1/files", data=form()))
            await blocked.wait()
            assert (await site.send("GET", "/v1/files"))["data"] == []
            answered.set()
            await upload


async def test_switched_off(place: ServerSetup) -> None:
    """Each surface can be switched off, and is then not found."""
    place.config = replace(place.config, apis=replace(place.config.apis, batches=False))
    async with place.run() as site:
        site_paths = ("/v1/files", "/v1/batches", "/v1/files/x/content")
        assert [(await site.send("GET", path))["status_code"] for path in site_paths] == [404] * 3


FIELD = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n{"a": 1}\n\r\n'


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"p\n" * 500_000 + FIELD + FILE + b"--b--\r\n", 413),
        (FIELD + FILE + b"--b--\r\n" + b"p\n" * 500_000, 413),
        (b"p\r\n" + FIELD + FILE + b"--b--\r\n" + b"e\r\n" * 3, None),
        (FILE.replace(b"{", b" " * 200_000 + b"{") + FIELD + b"--b--\r\n", None),
    ],
    ids=["before", "after", "little", "file"],
)
async def test_what_is_beside_the_file_is_limited(
    place: ServerSetup, body: bytes, status: int | None
) -> None:
    """The bytes before and after a form are skipped, but not without end."""
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    async with place.run() as site, asyncio.timeout(60):
        found = await site.send("POST", "/v1/files", data=body, headers=headers)
        assert found.get("status_code") == status, found
        if status:
            assert "the form has more than 65536 bytes beside its file" in found["error"]["message"]


async def test_names_of_fields_are_shown_visibly(place: ServerSetup) -> None:
    body = FIELD.replace(b"purpose", b"a\xe2\x80\xaeb") + b"--b--\r\n"
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    async with place.run() as site, asyncio.timeout(60):
        found = await site.send("POST", "/v1/files", data=body, headers=headers)
    assert found["status_code"] == 400 and "a\\u202eb: " in found["error"]["message"]
