"""/v1/files in both shapes, by the headers of a request; and when files expire."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.helpers.batch_fakes import chats
from tests.helpers.batches_server import RunningServer, ServerSetup

ANTHROPIC = {"anthropic-version": "2023-06-01"}


@pytest.fixture
def place(tmp_path: Path) -> ServerSetup:
    return ServerSetup(tmp_path / "data")


async def put(site: RunningServer, **fields: str) -> Any:
    """A file that is sent in Anthropic's way."""
    form = aiohttp.FormData(fields)
    form.add_field("file", b"notes", filename="n.txt", content_type="text/plain")
    return await site.send("POST", "/v1/files", data=form, headers=ANTHROPIC)


async def test_one_file_in_two_shapes(place: ServerSetup) -> None:
    async with place.run() as site:
        made = await put(site, expires_in_seconds="7200")
        assert made == {
            "id": made["id"],
            "type": "file",
            "filename": "n.txt",
            "mime_type": "text/plain",
            "size_bytes": 5,
            "created_at": "2027-01-15T08:00:00Z",
            "expires_at": "2027-01-15T10:00:00Z",
            "downloadable": True,
        }
        assert made["id"].startswith("file_")
        path = f"/v1/files/{made['id']}"
        assert await site.send("GET", path, headers=ANTHROPIC) == made
        assert await site.send("GET", path) == {
            "object": "file",
            "id": made["id"],
            "filename": "n.txt",
            "bytes": 5,
            "created_at": 1_800_000_000,
            "expires_at": 1_800_007_200,
            "purpose": "user_data",
            "status": "processed",
        }
        beta = {"anthropic-beta": "files-api-2025-04-14"}
        page = await site.send("GET", "/v1/files", headers=beta)
        assert page == {
            "data": [made],
            "first_id": made["id"],
            "last_id": made["id"],
            "has_more": False,
            "next_page": None,
        }
        deleted = await site.send("DELETE", path, headers=ANTHROPIC)
        assert deleted == {"id": made["id"], "type": "file_deleted"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"purpose": "batch"}, "purpose: unknown parameter"),
        ({"expires_in_seconds": "3599"}, "expires_in_seconds: '3599' is not a number of seconds from 3600"),
        ({"expires_in_seconds": "7776001"}, "expires_in_seconds: "),
        ({"expires_in_seconds": "1e4"}, "expires_in_seconds: "),
    ],
)
async def test_refused_forms(place: ServerSetup, fields: dict[str, str], message: str) -> None:
    """In Anthropic's shape; nothing is stored."""
    async with place.run() as site:
        found = await put(site, **fields)
        assert (found["status_code"], found["type"]) == (400, "error")
        assert found["error"]["type"] == "invalid_request_error"
        assert found["error"]["message"].startswith(message)
        assert (await site.send("GET", "/v1/files"))["data"] == []
    assert not list((place.root / "files").iterdir())


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"ids": "file_a", "limit": "3"}, "limit"),
        ({"ids": "file_a", "page": "file_b"}, "page"),
        ({"ids": ",".join(f"f{i}" for i in range(101))}, "ids"),
        ({"page": "file_none"}, "after_id"),
        ({"order": "asc"}, "order"),
    ],
)
async def test_refused_lists(place: ServerSetup, query: dict[str, str], param: str) -> None:
    async with place.run() as site:
        found = await site.send("GET", "/v1/files", params=query, headers=ANTHROPIC)
        assert (found["status_code"], found["error"]["message"].split(":")[0]) == (400, param)


async def test_files_expire(place: ServerSetup) -> None:
    """OpenAI's `expires_after`, to the second: no request finds the file then; a batch of it goes on."""
    place.engine = False
    async with place.run() as site:
        file = await site.upload(chats(2), expires_after=3600)
        ever = await site.upload(chats(1))
        made = await site.create(file)
        found = await site.send("GET", f"/v1/files/{file}")
        assert found["expires_at"] == found["created_at"] + 3600
        place.clock.now += 3599
        assert len((await site.send("GET", "/v1/files"))["data"]) == 2
        place.clock.now += 1
        assert [each["id"] for each in (await site.send("GET", "/v1/files"))["data"]] == [ever]
        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            assert (await site.send(method, f"/v1/files/{file}{path}"))["status_code"] == 404
        assert (await site.create(file))["error"]["param"] == "input_file_id"
        await site.queue.start(site.jobs)
        done = await site.wait_until_ended(made["id"])
        assert (done["status"], done["request_counts"]["completed"]) == ("completed", 2)


async def test_files_expire_while_no_server_runs(place: ServerSetup) -> None:
    async with place.run() as site:
        file = await site.upload(chats(1), expires_after=3600)
    place.clock.now += 3600
    async with place.run() as site:
        assert (await site.send("GET", "/v1/files"))["data"] == []
        assert (await site.send("GET", f"/v1/files/{file}"))["status_code"] == 404
    assert not list((place.root / "files").iterdir())


async def test_outputs_expire(place: ServerSetup) -> None:
    """`output_expires_after` counts from the creation of the files; the batch itself stays, also over a
    restart in between."""
    place.engine = False
    policy = {"anchor": "created_at", "seconds": 3600}
    async with place.run() as site:
        made = await site.create(await site.upload(chats(2)), output_expires_after=policy)
        place.clock.now += 7200
    place.engine = True
    async with place.run() as site:
        done = await site.wait_until_ended(made["id"])
        file = await site.send("GET", f"/v1/files/{done['output_file_id']}")
        assert file["expires_at"] == file["created_at"] + 3600 == int(place.clock.now) + 3600
        assert len(await site.records(done["output_file_id"])) == 2
        place.clock.now += 3600
        assert (await site.send("GET", f"/v1/files/{done['output_file_id']}"))["status_code"] == 404
        assert (await site.send("GET", f"/v1/batches/{made['id']}"))["status"] == "completed"
